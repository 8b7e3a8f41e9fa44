"""Which config is looked at, what is remembered of it, and what a choice of blocks would do."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import SpecError, UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.models import blocks
from jobs.models.blocks import cached_detection, detect_blocks, recall, remember
from jobs.models.model_config import find_target
from jobs.models.parts import Part, Parts
from jobs.paths import cache_home
from jobs.preflight import check_job
from jobs.preflight.check_job import check_names
from jobs.spec.families import FAMILIES, Family, Flavour
from jobs.spec.file.load import load_spec
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROCESSES = 50
CONFIG = {"_class_name": "FluxTransformer2DModel", "num_layers": 2}
# Two blocks of 21 in a list, one linear layer of 10 in each, 5 and another linear in the root.
PARTS = Parts(
    (
        Part("Linear", 10),
        Part("Block", 11, ((0, 1),)),
        Part("WideBlock", 30, ((0, 2),)),
        Part("ModuleList", 0, ((1, 2), (2, 1))),
        Part("Model", 5, ((0, 1), (3, 1))),
    ),
    {"WideBlock": ("Block",)},
    ("ModuleList",),
)
FOUND: dict[str, Any] = {
    "model_class": "Model",
    "total_params": 107,
    "no_split_modules": ["Block"],
    "classes": [
        {
            "class_name": name,
            "count": 2,
            "params_each": 21,
            "params_total": 42,
            "share": 0.4,
            "recommended": name == "Block",
            "in_no_split_modules": name == "Block",
            "in_repeated_blocks": False,
            "sample_paths": ["blocks.0", "blocks.1"],
        }
        for name in ("Block", "Linear")
    ],
    "parts": PARTS.to_dict(),
}


class Engine:
    """Stands where a process would be asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Any = FOUND

    def __call__(
        self, module: str, arguments: Sequence[str], answer: Path, told: Any, cancelled: Any
    ) -> Any:
        assert module == "engine.blocks"
        (config,) = arguments
        assert Path(config).name == "config.json"  # as transformers wants it
        self.asked.append(json.loads(Path(config).read_text()))
        if cancelled():
            raise Cancelled
        told("step 3 3")
        told("some warning")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(blocks, "ask", engine)
    return engine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A pipeline with two configs, without weights."""
    root = tmp_path / "pipeline"
    for part, config in {
        "transformer": CONFIG,
        "text_encoder": {"model_type": "t5", "architectures": ["T5EncoderModel"]},
    }.items():
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_text(json.dumps(config))
    (root / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return root


def weights(path: Path, **tensors: tuple[str, list[int]]) -> None:
    """A safetensors file of which only the header is right."""
    width = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + width[dtype] * shape[0]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


# -- what a choice does --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "units", "largest", "root"),
    [
        ([], 0, 0, 107),
        (["Linear"], 5, 10, 57),
        (["WideBlock"], 1, 50, 57),
        (["Block"], 3, 50, 15),  # a `WideBlock` is one
        (["Block", "Linear"], 8, 30, 5),
        (["Model"], 0, 0, 107),  # the root is a unit in any case
        (["Nothing"], 0, 0, 107),
    ],
)
def test_coverage(chosen: list[str], units: int, largest: int, root: int) -> None:
    does = PARTS.coverage(chosen)
    assert (does.units, does.largest, does.root) == (units, largest, root)
    assert does.share == pytest.approx(1 - root / 107)


def test_coverage_names_what_is_nested_and_what_is_not_there() -> None:
    does = PARTS.coverage(["Block", "Linear", "Nothing", "Nothing"])
    assert does.nested == (("Block", "Linear"),)
    assert does.unknown == ("Nothing",)
    assert PARTS.coverage(["Block"]).nested == ()


def test_a_model_without_parameters_is_covered_by_nothing() -> None:
    assert Parts((Part("Empty", 0),)).coverage(["Block"]).share == 0.0


@pytest.mark.parametrize(
    "damage",
    [
        {"parts": []},
        {"parts": [["A", 1, [[0, 1]]]]},  # in itself
        {"parts": [["A", 1, [[5, 1]]]]},
        {"parts": [["A", "many", []]]},
        {"parts": None},
        {"ancestors": []},
    ],
)
def test_damaged_parts_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Parts.from_dict(PARTS.to_dict() | damage)


# -- which config --------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["", "transformer", "transformer/config.json", "model_index.json"])
def test_a_pipeline_a_folder_of_it_and_files_are_taken(of: str, model: Path) -> None:
    target = find_target(pretrained_model=str(model / of))
    assert target.config == CONFIG
    assert target.model_family is None
    assert Path(target.name).is_absolute()


def test_a_text_encoder_is_taken_when_it_is_named(model: Path) -> None:
    target = find_target(pretrained_model=str(model / "text_encoder"))
    assert target.config["model_type"] == "t5"


@pytest.mark.parametrize("flavour", FAMILIES["flux"].flavours)
def test_published_configs_need_no_network(flavour: str, home: Path) -> None:
    target = find_target("flux", flavour)
    assert target.name == FAMILIES["flux"].flavours[flavour].hub_id
    assert target.config["guidance_embeds"] is (flavour != "schnell")
    assert target.dtype_bytes == 2


def test_the_first_flavour_is_the_default_and_hub_ids_are_known(home: Path) -> None:
    assert find_target("flux").model_flavour == "dev"
    assert find_target("Flux").model_family == "flux"
    target = find_target(pretrained_model="black-forest-labs/FLUX.2-dev")
    assert target.config["_class_name"] == "Flux2Transformer2DModel"


def test_a_hub_id_in_the_cache_is_taken_where_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, as when only its README was fetched, as it is published."""
    hub_id = "black-forest-labs/FLUX.1-dev"
    repository = tmp_path / "models--black-forest-labs--FLUX.1-dev"
    snapshot = repository / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_target(pretrained_model=hub_id).config["num_layers"] == 19
    (snapshot / "transformer").mkdir()
    (snapshot / "transformer/config.json").write_text(json.dumps(CONFIG))
    for target in (find_target(pretrained_model=hub_id), find_target("flux")):
        assert (target.name, target.config) == (hub_id, CONFIG)


def test_the_bytes_are_those_of_most_stored_numbers(model: Path) -> None:
    folder = model / "transformer"
    (folder / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float32"}))
    assert find_target(pretrained_model=str(model)).dtype_bytes == 4
    file = folder / "diffusion_pytorch_model.safetensors"
    weights(file, a=("F32", [3]), b=("BF16", [9]), c=("F32", [2]))
    assert find_target(pretrained_model=str(model)).dtype_bytes == 2
    file.write_bytes(b"damaged")
    assert find_target(pretrained_model=str(model)).dtype_bytes == 4


def test_a_config_without_a_class_is_that_of_the_family(model: Path) -> None:
    config = model / "transformer/config.json"
    config.write_text("{}")
    target = find_target("flux", pretrained_model=str(model))
    assert target.config == {"_class_name": "FluxTransformer2DModel"}
    with pytest.raises(SpecError, match="is not a model"):
        find_target(pretrained_model=str(model))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({}, "no model given"),
        ({"model_flavour": "dev"}, "needs a model_family"),
        ({"model_family": "fluks"}, 'unknown model_family "fluks" .did you mean "flux"'),
        ({"model_family": "flux", "model_flavour": "def"}, 'did you mean "dev"'),
        ({"pretrained_model": "/no/such/place"}, "no such model directory: /no/such/place"),
        ({"pretrained_model": "someone/something"}, "fsdp-tui fetch someone/something"),
    ],
)
def test_what_cannot_be_found_is_told(words: dict[str, str], told: str, home: Path) -> None:
    with pytest.raises(SpecError, match=told):
        find_target(**words)


def test_what_is_no_model_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(SpecError, match="cannot be read as a JSON object"):
        find_target(pretrained_model=str(tmp_path / "x.json"))
    (model / "transformer/config.json").unlink()
    with pytest.raises(SpecError, match="it has text_encoder; use one of them"):
        find_target(pretrained_model=str(model))
    with pytest.raises(SpecError, match="is a t5, not the FluxTransformer2DModel"):
        find_target("flux", pretrained_model=str(model / "text_encoder"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"neither a config\.json nor a transformer or unet"):
        find_target(pretrained_model=str(tmp_path / "empty"))


def test_a_flavour_without_a_published_config_says_what_to_give(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Family("new", "New", (), "NewModel", ("NewBlock",), {"one": Flavour("someone/new-one")})
    monkeypatch.setitem(FAMILIES, "new", new)
    with pytest.raises(SpecError, match=r"config of New one .* not available; .*fsdp-tui fetch"):
        find_target("new")


# -- what is remembered --------------------------------------------------------------------


def test_a_model_is_looked_at_once(engine: Engine, model: Path) -> None:
    steps: list[tuple[int, int]] = []
    assert cached_detection(pretrained_model=str(model)) is None
    first = detect_blocks(pretrained_model=str(model), progress=lambda *step: steps.append(step))
    again = detect_blocks(pretrained_model=str(model))
    assert (first.cached, again.cached) == (False, True)
    assert first.classes == again.classes
    assert first.parts == again.parts == PARTS
    assert first.recommended == ["Block"]
    assert engine.asked == [CONFIG]
    assert steps == [(3, 3)]
    assert cached_detection(pretrained_model=str(model)) == again
    assert stat.S_IMODE(cache_home().stat().st_mode) == 0o700


def test_refresh_looks_again_and_remembers_that(engine: Engine, model: Path) -> None:
    detect_blocks(pretrained_model=str(model))
    engine.answer = FOUND | {"model_class": "Other"}
    assert not detect_blocks(pretrained_model=str(model), refresh=True).cached
    assert detect_blocks(pretrained_model=str(model)).model_class == "Other"


def test_another_config_family_or_library_is_another_model(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detect_blocks(pretrained_model=str(model))
    config = model / "transformer/config.json"
    config.write_text(json.dumps(CONFIG | {"num_layers": 3}))
    assert cached_detection(pretrained_model=str(model)) is None
    config.write_text(json.dumps(CONFIG, indent=7))  # says the same
    assert cached_detection(pretrained_model=str(model)) is not None
    assert cached_detection(model_family="flux", pretrained_model=str(model)) is None
    monkeypatch.setattr("jobs.models.model_config.version", lambda package: "999")
    assert cached_detection(pretrained_model=str(model)) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\x00",
        b"[]",
        b'{"schema": 99, "entries": {}}',
        b'{"schema": 1}',
        b'{"schema": 1, "entries": []}',
    ],
)
def test_a_damaged_cache_is_looked_past_and_mended(
    content: bytes, engine: Engine, model: Path
) -> None:
    cache_home().mkdir(parents=True)
    blocks.cache_file().write_bytes(content)
    assert cached_detection(pretrained_model=str(model)) is None
    assert not detect_blocks(pretrained_model=str(model)).cached
    assert detect_blocks(pretrained_model=str(model)).cached


@pytest.mark.parametrize("damage", ["classes", "parts", "model_class"])
def test_a_damaged_entry_is_looked_at_again(damage: str, engine: Engine, model: Path) -> None:
    detect_blocks(pretrained_model=str(model))
    data = json.loads(blocks.cache_file().read_text())
    (entry,) = data["entries"].values()
    del entry["found"][damage]
    blocks.cache_file().write_text(json.dumps(data))
    assert not detect_blocks(pretrained_model=str(model)).cached
    assert detect_blocks(pretrained_model=str(model)).cached


def test_a_cache_that_cannot_be_written_fails_nothing(engine: Engine, model: Path) -> None:
    cache_home().parent.mkdir(exist_ok=True)
    cache_home().write_text("a file where the directory should be")
    assert not detect_blocks(pretrained_model=str(model)).cached


def test_a_writer_that_hangs_holds_nobody_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_PATIENCE", 0.0)
    cache_home().mkdir(parents=True)
    with blocks._locked():
        remember("a", {"is": "kept"})
    assert recall("a") == {"is": "kept"}


def test_the_oldest_entries_go(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MOST", 3)
    for key in "abcad":
        remember(key, {"is": key})
    assert [key for key in "abcd" if recall(key)] == ["a", "c", "d"]


def test_errors_of_the_engine_name_the_model(engine: Engine, model: Path) -> None:
    engine.answer = UserError("X cannot be built", "do this")
    with pytest.raises(SpecError, match=r"pipeline: X cannot be built; do this"):
        detect_blocks(pretrained_model=str(model))
    engine.answer = {"something": "else"}
    with pytest.raises(ToolError, match="unexpected answer"):
        detect_blocks(pretrained_model=str(model))
    assert cached_detection(pretrained_model=str(model)) is None


def test_who_cancels_gets_nothing(engine: Engine, model: Path) -> None:
    with pytest.raises(Cancelled):
        detect_blocks(pretrained_model=str(model), cancelled=lambda: True)


def _remember(number: int, start: Any) -> None:
    start.wait()
    remember(f"key-{number}", {"number": number, "much": "x" * 5000})


def test_fifty_processes_at_once_lose_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_PATIENCE", PATIENCE)
    context = multiprocessing.get_context("fork")
    start = context.Barrier(PROCESSES)
    writers = [context.Process(target=_remember, args=(n, start)) for n in range(PROCESSES)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * PROCESSES
    assert all((recall(f"key-{n}") or {}).get("number") == n for n in range(PROCESSES))
    assert sorted(os.listdir(cache_home())) == ["blocks.json", "blocks.json.lock"]


# -- names in a job ------------------------------------------------------------------------


@pytest.fixture
def named(engine: Engine, job_values: dict[str, Any]) -> Callable[..., None]:
    """Checks a job on two sharding ranks that names these classes."""

    def check(*names: str, **changes: Any) -> None:
        values = {"strategy": "fsdp2", "fsdp_transformer_layer_cls_to_wrap": list(names)}
        check_job.check(load_spec(None, job_values | values | changes))

    return check


def test_the_familys_own_blocks_are_not_looked_up(
    named: Callable[..., None], engine: Engine
) -> None:
    named("FluxSingleTransformerBlock")
    named()
    assert engine.asked == []


def test_names_that_the_model_has_pass(named: Callable[..., None], engine: Engine) -> None:
    named("Block", "Linear")
    named("Block")
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Blok", '"Blok" is not in the model .did you mean "Block"..; Model has Block, Linear'),
        ("block", 'did you mean "Block"'),
        ("Xyz", '"Xyz" is not in the model; Model has'),
        ("ModuleList", "has no forward and cannot be wrapped"),
        ("Model", "not in the model"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(
    name: str, told: str, named: Callable[..., None]
) -> None:
    with pytest.raises(SpecError, match=told):
        named(name)


def test_names_that_nobody_uses_are_not_looked_up(
    named: Callable[..., None], engine: Engine
) -> None:
    named("Blok", strategy="ddp")
    assert engine.asked == []


def test_a_tool_that_fails_stops_no_job(named: Callable[..., None], engine: Engine) -> None:
    engine.answer = ToolError("it was killed by SIGKILL")
    named("Blok")


def test_names_are_checked_in_their_order(engine: Engine, model: Path) -> None:
    found = detect_blocks(pretrained_model=str(model))
    check_names(["Block", "WideBlock"], found)
    with pytest.raises(SpecError, match='"One"'):
        check_names(["Block", "One", "Two"], found)
