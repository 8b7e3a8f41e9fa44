"""Fetching models and datasets from a server that speaks the hub's protocol."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest

from jobs import service
from jobs.errors import SpecError
from jobs.hub import fetch as fetching
from jobs.hub import fetches, listing
from jobs.hub.listing import choose, find_parts
from jobs.hub.trouble import HubError
from jobs.hub.wanted import ask_sizes, find_missing, names_in, noted, question
from jobs.models.find_model import find_model
from jobs.models.model_config import find_target
from jobs.models.scorers import check_scorers
from jobs.preflight.data import check_dataset
from jobs.queue.states import State
from jobs.service.plan import plan_submit
from jobs.spec.families import flavour_of
from jobs.spec.file.load import load_spec
from jobs.spec.values.datasets import datasets_of
from jobs.spec.values.hub_names import HubName
from tests.conftest import plain_png
from tests.support.hub.repos import CHOSEN, clip_like, flux_like
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from jobs.hub.fetches import Fetch
    from jobs.queue.store import Store
    from tests.support.hub.server import Hub

pytest_plugins = ["tests.support.hub.fixture"]

MODEL = HubName("model", "someone/FLUX.1-dev")
DATA = HubName("dataset", "someone/cats")


def model(text: str) -> HubName:
    found = HubName.read("model", text)
    assert found is not None
    return found


def tree_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def fetch(name: HubName) -> Path:
    """In this process, without pauses."""
    return fetching.fetch(name, lambda now: None, pause=lambda seconds: None)


def test_names() -> None:
    assert model("a/b") == HubName("model", "a/b")
    assert model("a/b@v1.0") == HubName("model", "a/b", "v1.0")
    assert HubName.read("dataset", "a/b@v1/x/y") == HubName("dataset", "a/b", "v1", "x/y")
    assert str(HubName("dataset", "a/b", "v1", "x/y")) == "a/b@v1/x/y"
    for text in ("", "a", "/a/b", "./a/b", "../a", "~/a/b", "a/../b", "a/b/c", "a/b@", "a b/c"):
        assert HubName.read("model", text) is None, text


def test_a_revision_is_of_the_same_flavour_and_blocks() -> None:
    for revision in ("", "@v1"):
        name = f"black-forest-labs/FLUX.1-schnell{revision}"
        assert flavour_of("flux", name) == "schnell"
        assert find_target("flux", pretrained_model=name).config["num_layers"] == 19


def test_only_what_a_job_reads_is_chosen() -> None:
    files = flux_like()
    index = json.loads(files["model_index.json"])
    parts = [name for name, entry in index.items() if isinstance(entry, list) and all(entry)]
    assert choose(MODEL, files, parts) == sorted(CHOSEN)
    only_pickled = [path for path in files if path != "text_encoder/model.safetensors"]
    chosen = choose(MODEL, only_pickled, parts)
    assert "text_encoder/pytorch_model.bin" in chosen, "the only plain weights"
    assert "text_encoder/model.fp16.safetensors" not in chosen
    assert choose(MODEL, ["a.gguf", "b.safetensors", "README.md"]) == ["README.md"]


def test_of_two_denoisers_the_one_that_is_trained_is_chosen() -> None:
    """LTX-2.5's `transformer` is distilled."""
    index = {"_class_name": "LTX2Pipeline", "transformer": ["a", "B"], "vae": ["a", "B"]}
    index["prompt_enhancer"] = [None, None]
    names = ("transformer", "transformer_full", "vae", "diffusion_decoder", "prompt_enhancer")
    files = ["model_index.json", *(f"{name}/model.safetensors" for name in names)]
    chosen = ["model_index.json", "transformer_full/model.safetensors", "vae/model.safetensors"]
    assert choose(MODEL, files, find_parts(index, files)) == chosen
    plain = [path for path in files if not path.startswith("transformer_full")]
    chosen[1] = "transformer/model.safetensors"
    assert choose(MODEL, plain, find_parts(index, plain)) == chosen
    index["_class_name"] = "FluxPipeline"
    assert choose(MODEL, files, find_parts(index, files)) == chosen


def test_of_a_dataset_what_readers_read_is_chosen() -> None:
    files = [
        *("README.md", ".gitattributes", "x.py", "data/train-00000-of-00001.parquet"),
        *("a/1.png", "a/1.txt", "a/metadata.jsonl", "b/2.jpg", "c/0.tar", "c/model.bin"),
    ]
    assert set(choose(DATA, files)) == set(files) - {".gitattributes", "x.py", "c/model.bin"}
    folder = HubName("dataset", "someone/cats", folder="a")
    assert choose(folder, files) == ["README.md", "a/1.png", "a/1.txt", "a/metadata.jsonl"]


@pytest.mark.parametrize("path", ["model_index.json", "transformer/config.json", "large"])
def test_wrong_bytes_of_the_right_size_are_fetched_again(
    path: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = flux_like()
    hub.add(MODEL.repo, files)
    if path == "large":  # such as the hub names by its SHA-256
        path = max(CHOSEN, key=lambda name: len(files[name]))
    told: list[Fetch] = []
    snapshot, spoils = huggingface_hub.snapshot_download, [True]

    def spoil(*words: Any, **options: Any) -> str:
        folder = snapshot(*words, **options)
        if spoils.pop() if spoils else False:
            blob = Path(folder, path).resolve()
            blob.write_bytes(bytes(blob.stat().st_size))
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", spoil)
    root = fetching.fetch(MODEL, told.append, pause=lambda seconds: None)
    assert (root / path).read_bytes() == files[path]
    reasons = [now.reason for now in told if now.state == "waiting"]
    assert reasons == [f"{path} of {MODEL.repo} came through damaged"]


def test_a_fetched_model_is_found_and_nothing_is_fetched_twice(hub: Hub) -> None:
    files = flux_like()
    repo = hub.add(MODEL.repo, files)
    with pytest.raises(SpecError, match=r"fsdp-tui fetch someone/FLUX\.1-dev"):
        find_model(str(MODEL))
    root = fetch(MODEL)
    assert tree_of(root) == {path: files[path] for path in CHOSEN}
    assert find_model(str(MODEL)) == root
    assert all(hub.sent.get(path, 0) == len(files[path]) for path in CHOSEN if files[path])
    assert not set(hub.sent) - set(CHOSEN)
    sent = dict(hub.sent)
    assert fetch(MODEL) == root
    assert hub.sent == sent
    # Another revision has its own folder, and what is the same is not fetched again.
    new = repo.commit("second", files | {"README.md": b"changed"})
    other = fetch(HubName("model", MODEL.repo, new))
    assert other != root
    assert (other / "README.md").read_bytes() == b"changed"
    sent["README.md"] += len(b"changed")
    assert hub.sent == sent
    assert find_model(f"{MODEL.repo}@{new}") == other
    assert find_model(str(MODEL)) == root


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("someone/gated", "is gated, .* accept it on https://.*, log in with `hf auth login`,"),
        ("someone/private", "has no model someone/private .* log in with `hf auth login`"),
        ("someone/missing", "has no model someone/missing"),
        ("someone/flux@v9", "someone/flux has no revision v9"),
        ("someone/tables", "has no model in the layout of diffusers"),
        ("someone/words", "has no model in the layout of diffusers"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(hub: Hub, name: str, says: str) -> None:
    hub.token = "hf_" + "x" * 34
    hub.add("someone/gated", flux_like(), gated=True)
    hub.add("someone/private", flux_like(), private=True)
    hub.add("someone/flux", flux_like())
    hub.add("someone/words", clip_like("gpt2"))
    hub.add("someone/tables", {"README.md": b"", "model.gguf": b""})
    with pytest.raises(HubError, match=says) as error:
        fetch(model(name))
    assert not error.value.passing
    assert hub.token not in str(error.value)


def test_a_token_opens_a_private_model_and_is_written_nowhere(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.token = "hf_" + "x" * 34
    hub.add("someone/private", flux_like(), private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    name = model("someone/private")
    fetches.start(name)
    assert fetches.wait(name, lambda now: None, every=0.02).state == "done"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or hub.token.encode() not in path.read_bytes()


def test_a_full_disk_is_told_before(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(MODEL.repo, flux_like())
    monkeypatch.setattr(listing, "_SPARE", 1 << 60)
    with pytest.raises(HubError, match=r"needs .* free; free space, or set HF_HOME"):
        fetch(MODEL)
    assert set(hub.sent) == {"model_index.json"}


def test_a_server_that_is_down_is_waited_for(hub: Hub) -> None:
    files = flux_like()
    hub.add(MODEL.repo, files)
    hub.down = [503, 502, 504]
    told: list[Fetch] = []
    pauses: list[float] = []
    root = fetching.fetch(MODEL, told.append, pauses.append)
    assert tree_of(root) == {path: files[path] for path in CHOSEN}
    assert pauses
    assert "answered with status 503" in next(now for now in told if now.state == "waiting").reason


def test_who_is_offline_asks_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, job_values: dict[str, Any]
) -> None:
    hub.add(MODEL.repo, flux_like())
    spec = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ask_sizes(find_missing(spec)) == {}
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    assert ask_sizes(find_missing(spec)) == {}


def test_a_dataset_of_the_hub_is_read_where_it_was_fetched(
    hub: Hub, job_values: dict[str, Any]
) -> None:
    files = {"train/1.png": plain_png((9, 9, 9)), "train/1.txt": b"a cat", "test/2.png": b"\x89PNG"}
    hub.add(DATA.repo, files, "datasets")
    spec = load_spec(None, job_values | {"dataset": "someone/cats/train"})
    assert names_in(spec) == [HubName("dataset", "someone/cats", folder="train")]
    with pytest.raises(SpecError, match="fsdp-tui fetch --dataset someone/cats/train"):
        check_dataset(spec)
    root = fetch(names_in(spec)[0])
    assert tree_of(root) == {"1.png": files["train/1.png"], "1.txt": b"a cat"}
    assert [entry.path for entry in datasets_of(spec)] == [str(root)]
    assert find_missing(spec) == []


def test_a_job_waits_for_the_models_that_score_its_samples(
    hub: Hub, job_values: dict[str, Any]
) -> None:
    files = clip_like()
    hub.add("someone/clip", files)
    hub.add("someone/dino", clip_like("dinov2"))
    spec = load_spec(
        None,
        job_values
        | {"validation_prompts": ["a"], "validation_fraction": 0.5, "validation_scores": "clip_t"}
        | {"validation_clip_model": "someone/clip", "validation_dino_model": "someone/dino"},
    )
    (clip,) = find_missing(spec)
    assert clip == model("someone/clip"), "not what no score needs"
    (size,) = ask_sizes([clip]).values()
    chosen = set(files) - {"pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"}
    assert size == sum(len(files[path]) for path in chosen)
    with pytest.raises(SpecError, match=r"validation_clip_model: no such model.*fsdp-tui fetch"):
        check_scorers(spec)
    check_scorers(spec, [clip])
    root = fetch(clip)
    assert set(tree_of(root)) == chosen
    assert find_missing(spec) == []
    check_scorers(spec)
    both = spec.model_copy(update={"validation_scores": ["dino_i", "clip_t"]})
    assert find_missing(both) == [model("someone/dino")]
    (root / "model.safetensors").unlink()
    assert find_missing(spec) == [clip]


def test_a_job_waits_for_its_model_and_starts(
    hub: Hub, store: Store, job_values: dict[str, Any], started: list[int], no_gpus: None
) -> None:
    hub.add(MODEL.repo, flux_like())
    spec = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
    sizes = ask_sizes(find_missing(spec))
    assert question(sizes).startswith("FLUX.1-dev is not on this machine: fetch ")
    hub.down = [503] * 3
    job = service.carry_out(store, plan_submit(store, spec, list(sizes)))
    assert job.state is State.QUEUED
    assert job.reason == "waiting for its model: listing its files"

    def starts() -> bool:
        service.refresh(store)
        return store.get(job.id).state is State.STARTING

    eventually(starts, told=lambda: store.get(job.id))
    assert started == [job.id]
    assert noted(job.run_dir) == [MODEL], "its supervisor checks it, and forgets it"


def test_a_job_fails_where_its_model_cannot_be_fetched(
    hub: Hub, store: Store, job_values: dict[str, Any], started: list[int], no_gpus: None
) -> None:
    hub.add(MODEL.repo, flux_like(), gated=True)
    spec = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
    job = service.carry_out(store, plan_submit(store, spec, [MODEL]))

    def failed() -> bool:
        service.refresh(store)
        return store.get(job.id).state is State.FAILED

    eventually(failed, told=lambda: store.get(job.id))
    reason = store.get(job.id).reason
    assert reason.startswith("its model could not be fetched: someone/FLUX.1-dev is gated")
    assert noted(job.run_dir) == []
    assert started == []


def test_a_fetch_that_just_starts_ends_too(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid is not recorded yet, so no signal can be sent."""
    hub.add(MODEL.repo, flux_like())
    monkeypatch.setattr(fetches, "start_detached", lambda *words, **options: None)
    fetches.start(MODEL)
    assert not fetches.end(MODEL)
    assert fetching._run(MODEL) == 1
    assert hub.requests == []
    fetches.start(MODEL)  # somebody wants it again
    assert fetching._run(MODEL) == 0


def test_a_fetch_ends_with_the_only_job_that_waits_for_it(
    hub: Hub, store: Store, job_values: dict[str, Any], started: list[int], no_gpus: None
) -> None:
    hub.add(MODEL.repo, flux_like(1 << 20))
    hub.hold()
    try:
        spec = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
        job = service.carry_out(store, plan_submit(store, spec, [MODEL]))
        other = service.carry_out(store, plan_submit(store, spec, [MODEL]))
        eventually(lambda: (now := fetches.look_at(MODEL)) is not None and now.done > 0)
        service.refresh(store)
        assert " of 4 MiB" in store.get(job.id).reason
        now = fetches.look_at(MODEL)
        assert now is not None
        service.stop(store, job.id)
        assert now.alive
        with fetches.waiting_for(MODEL):  # as `fsdp-tui fetch` does
            last = service.carry_out(store, plan_submit(store, spec, [MODEL]))
            service.stop(store, last.id)
            service.stop(store, other.id)
            assert now.alive
        other = service.carry_out(store, plan_submit(store, spec, [MODEL]))
        service.stop(store, other.id)
        eventually(lambda: not now.alive)
        partial = [*fetching._blobs(MODEL).glob("*.incomplete")]
        assert partial == [], "nothing that takes room and is of no use"
    finally:
        hub.release()
    assert fetches.is_cut_off(MODEL)
    assert find_missing(spec) == [MODEL]


def test_who_asks_for_a_size_leaves_nothing_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    files = flux_like()
    hub.add(MODEL.repo, files)
    assert fetches.ask_size(MODEL)[0] == sum(len(files[path]) for path in CHOSEN)
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]


def test_nothing_of_the_hub_is_imported_by_who_starts_a_fetch() -> None:
    code = "import sys, jobs.hub.wanted, jobs.service; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_cut_connections_lose_nothing(hub: Hub, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third answer is cut off somewhere; what arrives is whole, whatever was tried."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    files = flux_like(200_000)
    hub.add(MODEL.repo, files)
    hub.cuts = random.Random(seed)
    root = fetch(MODEL)
    hub.cuts = None
    assert tree_of(root) == {path: files[path] for path in CHOSEN}
    assert not [*root.parent.parent.rglob("*.incomplete")]
