"""`fsdp-tui detect` and `fsdp-tui cache`, as people and scripts type them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs import service
from jobs.errors import StateError
from jobs.machine.engine_tools import Cancelled
from jobs.models.blocks import detect_blocks, remember
from jobs.paths import cache_home
from jobs.queue.states import State
from jobs.service import caches
from jobs.spec.file.load import load_spec
from tests.support.left_over import runs_with
from tests.support.waiting import eventually
from tui.cli import commands
from tui.cli.prepare.detect import facts, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Store

    Run = Callable[..., tuple[int, str, str]]

FAMILY = ("--model_family", "flux")
KEYS = {
    "model_family",
    "model_flavour",
    "pretrained_model",
    "total_params",
    "no_split_modules",
    "cached",
    "classes",
}
CLASS_KEYS = {
    "class_name",
    "count",
    "params_each",
    "params_total",
    "share",
    "recommended",
    "sample_paths",
}


pytestmark = pytest.mark.usefixtures("no_gpus", "started", "forked")


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fsdp-tui` in this process; a look itself is a process of its own."""

    def fsdp_tui(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fsdp-tui", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        out, err = capsys.readouterr()
        return int(str(ended.value.code or 0)), out, err

    return fsdp_tui


# -- detect --------------------------------------------------------------------------------


def test_the_toy_is_looked_at_and_remembered(run: Run, toy: Path) -> None:
    words = ("detect", *FAMILY, "--pretrained_model_name_or_path", toy / "model", "--json")
    status, out, err = run(*words, "--ranks", 2)
    assert status == 0, err
    found = json.loads(out)
    assert found.keys() >= KEYS
    assert found["classes"][0].keys() >= CLASS_KEYS
    chosen = {one["class_name"]: one for one in found["classes"] if one["recommended"]}
    assert chosen.keys() == {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
    config = json.loads((toy / "model/transformer/config.json").read_text())
    assert chosen["FluxTransformerBlock"]["count"] == config["num_layers"]
    assert not found["cached"]
    assert found["ranks"] == 2
    one = chosen["FluxTransformerBlock"]
    assert one["bytes_per_rank"] == -(-one["params_total"] // 2) * found["dtype_bytes"]
    assert found["coverage"]["units"] == config["num_layers"] + config["num_single_layers"]

    again = json.loads(run(*words)[1])
    assert again["cached"]
    assert again["classes"][0]["params_total"] == found["classes"][0]["params_total"]


def test_what_a_person_reads(run: Run, toy: Path) -> None:
    status, out, err = run("detect", toy / "model" / "transformer" / "config.json", "--ranks", 4)
    assert status == 0, err
    assert "recommended: Flux" in out
    config = json.loads((toy / "model/transformer/config.json").read_text())
    units = config["num_layers"] + config["num_single_layers"]
    assert f" in {units} units; largest unit " in out
    assert "a rank of 4" in out
    assert all(len(line) < 140 for line in out.splitlines())
    found = detect_blocks(pretrained_model=str(toy / "model/transformer/config.json"))
    assert found.cached
    assert len(text(found, 1, every=True)) > len(text(found, 1))
    assert facts(found, 1)["coverage"]["bytes_per_rank"] == found.total_params * found.dtype_bytes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no model given"),
        (("/no/such/place",), "no such model directory: /no/such/place"),
        (("--model_family", "fluks"), 'did you mean "flux"'),
        ((*FAMILY, "--model_flavour", "def"), 'did you mean "dev"'),
        (("one", "--pretrained_model_name_or_path", "two"), "expected one model"),
        ((*FAMILY, "--ranks", "0"), "--ranks"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: tuple[str, ...], told: str) -> None:
    status, out, err = run("detect", *words)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_config_that_builds_nothing_is_bad_input(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "NoSuchModel"}))
    status, _, err = run("detect", path)
    assert status == 2
    assert f"{path}: diffusers" in err
    assert "has no model class NoSuchModel" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_two_looks_at_once_leave_a_cache_of_both(home: Path, toy: Path) -> None:
    models = [str(toy / "model" / part) for part in ("transformer", "text_encoder_2")]
    looks = [
        subprocess.Popen(
            [sys.executable, "-m", "tui", "detect", model, "--json"], stdout=subprocess.PIPE
        )
        for model in models
    ]
    for look in looks:
        out, _ = look.communicate()
        assert look.returncode == 0
        assert not json.loads(out)["cached"]
    assert all(detect_blocks(pretrained_model=model).cached for model in models)


def test_who_cancels_ends_the_process(
    home: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where it finds its task
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    with pytest.raises(Cancelled):
        detect_blocks(pretrained_model=str(toy / "model"), cancelled=cancelled)
    eventually(lambda: not runs_with(tmp_path))
    assert not (cache_home() / "blocks.json").exists()


def test_a_wrong_block_is_told_before_a_job_is_queued(
    run: Run, toy: Path, job_values: dict[str, Any], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    changes = {
        "pretrained_model_name_or_path": str(toy / "model"),
        "strategy": "fsdp2",
        "fsdp_transformer_layer_cls_to_wrap": "FluxTransformerBlok",
    }
    job.write_text(yaml.safe_dump(job_values | changes))
    status, _, err = run("submit", job)
    assert status == 2
    assert '"FluxTransformerBlok" is not in the model (did you mean "FluxTransformerBlock"?)' in err
    assert json.loads(run("list", "--json")[1]) == []
    status, _, err = run("submit", job, "--fsdp_transformer_layer_cls_to_wrap=FluxAttention")
    assert status == 0, err


# -- caches --------------------------------------------------------------------------------


@pytest.fixture
def filled(home: Path) -> Path:
    """A cache directory with 100 bytes in two files of each kind but detection."""
    for name in ("latents", "text", "index", "tables"):
        for number, folder in enumerate(("ab", "cd")):
            path = cache_home() / name / folder / f"{number}.safetensors"
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes(50))
    remember("key", {"is": "kept"})
    (cache_home() / "not-ours").write_text("stays")
    return cache_home()


def start(store: Store, values: dict[str, Any], **changes: Any) -> int:
    """A job that is said to run."""
    job = service.submit(store, load_spec(None, values | changes))
    store.change(job.id, State.STARTING, "test")
    store.change(job.id, State.RUNNING, "test")
    return job.id


def test_sizes_are_told(run: Run, filled: Path) -> None:
    listed = {one["name"]: one for one in json.loads(run("cache", "list", "--json")[1])}
    known = {
        "detection",
        "latents",
        "text",
        "index",
        "webdataset",
        "tables",
        "stores",
        "old_stores",
    }
    assert listed.keys() == known | {"masks", "sounds", "class_images"}
    assert (listed["latents"]["bytes"], listed["latents"]["files"]) == (100, 2)
    assert listed["text"]["path"] == str(filled / "text")
    assert listed["detection"]["bytes"] == (filled / "blocks.json").stat().st_size
    assert "latents" in run("cache", "list")[1]


def test_nothing_cached_is_no_failure(run: Run) -> None:
    assert {one["bytes"] for one in json.loads(run("cache", "list", "--json")[1])} == {0}
    assert json.loads(run("cache", "clear", "--json")[1])["files"] == 0


def test_one_cache_is_cleared_and_others_stay(run: Run, filled: Path) -> None:
    assert json.loads(run("cache", "clear", "latents", "--json")[1]) == {
        "names": ["latents"],
        "bytes": 100,
        "files": 2,
    }
    assert list((filled / "latents").iterdir()) == []
    assert (filled / "text/ab/0.safetensors").exists()
    status, out, _ = run("cache", "clear", "-y")
    assert status == 0
    assert out.startswith("freed ")
    assert not (filled / "blocks.json").exists()
    assert (filled / "not-ours").read_text() == "stays"


def test_what_cannot_be_deleted_is_told(
    run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = type(filled).unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "0.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(type(filled), "unlink", refuse)
    status, _, err = run("cache", "clear", "text")
    assert status == 2
    stuck = filled / "text/ab/0.safetensors"
    assert f"1 files could not be deleted: {stuck} (Permission denied); 1 deleted" in err
    assert stuck.exists()
    assert not (filled / "text/cd").exists()


def test_links_are_not_followed(run: Run, filled: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("stays")
    (filled / "latents" / "link").symlink_to(elsewhere)
    run("cache", "clear", "latents")
    assert (elsewhere / "precious").read_text() == "stays"
    assert not (filled / "latents/link").is_symlink()


def test_an_unknown_cache_is_told(run: Run, filled: Path) -> None:
    status, _, err = run("cache", "clear", "latent")
    assert status == 2
    assert 'no cache "latent" (did you mean "latents"?)' in err


def test_a_running_jobs_caches_stay(
    run: Run,
    filled: Path,
    store: Store,
    job_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "refresh", lambda store: None)  # it has no supervisor to ask
    job = start(store, job_values)
    status, _, err = run("cache", "clear", "detection", "text")
    assert status == 2
    assert f"job {job}" in err
    assert "may be using the cache text" in err
    assert (filled / "text/ab/0.safetensors").exists()
    assert (filled / "blocks.json").exists()
    assert run("cache", "clear", "detection")[0] == 0
    assert run("cache", "clear", "text", "--force")[0] == 0
    assert not (filled / "text/ab").exists()


def test_a_job_with_a_cache_elsewhere_only_uses_tables(
    filled: Path,
    store: Store,
    job_values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "refresh", lambda store: None)
    start(store, job_values, cache_dir=str(tmp_path / "own"))
    assert caches.clear(store, ["latents", "text", "index"]).files == 6
    with pytest.raises(StateError, match="tables"):
        caches.clear(store, ["tables"])


def test_a_job_that_has_ended_uses_nothing(
    filled: Path, store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "refresh", lambda store: None)
    store.change(start(store, job_values), State.COMPLETED, "test")
    assert caches.clear(store, []).files == 9
