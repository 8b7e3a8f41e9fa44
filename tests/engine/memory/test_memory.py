"""Predicted memory: the echo against all blocks, the arithmetic against torch's own FSDP2."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from engine.memory import estimator as estimator_module
from engine.memory.__main__ import serve
from engine.memory.estimator import Estimator
from engine.memory.predict import Overheads, Trained, predict, state_bytes, temporary_bytes
from engine.memory.tracing.live import Live, rounded
from engine.memory.tracing.model import Shape, shape_of
from engine.memory.tracing.timeline import Mark, Recorder, work_of
from engine.memory.tracing.trace import Trace, trace_model
from engine.memory.tracing.work import Counter
from engine.memory.walk import Layout, cost_of
from engine.model.packing import Packing
from engine.sample.scores import BATCH, load_scoring_model
from engine.train.optimizer import build_optimizer
from jobs.memory.predicted import TITLES, Parts, Phase, Predicted
from jobs.models.scorers import CLIP, DINO
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from tests.support.engine import scorers
from tests.support.engine.memory import peaks_of, reference, small_toy, with_layers
from tests.support.engine.toy_jobs import toy_values
from tests.support.engine.training_adapters import write_training_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

FULL: Final = {"model_type": "full"}
BF16: Final = {"mixed_precision": "bf16"}
CHECKPOINTED: Final = {"gradient_checkpointing": True}
FLOPS: Final = ("half", "single", "eight", "attention", "small")
ROUTED: Final = {"tread": {"0..-1": 0.5}}
SCALED: Final = {"lora_rank": 1, "base_precision": "fp8_scaled", "base_matmul": "scaled"}


def values_of(toy: Path, **changes: Any) -> dict[str, Any]:
    """A job for GPUs, on the toy."""
    values = {"device": "auto", "resolution": 128, "train_batch_size": 2} | changes
    return toy_values(toy, **{"num_processes": 2, **values})


def spec_of(toy: Path, **changes: Any) -> JobSpec:
    return load_spec(None, values_of(toy, **changes))


def shape(spec: JobSpec, *, sharded: bool = True) -> Shape:
    found = shape_of(spec, sharded=sharded)
    assert found is not None
    return found


@cache
def traced(shape: Shape) -> Trace:
    """A trace that several tests look at; to make one takes a second."""
    return trace_model(shape)


def phases_of(trace: Trace) -> dict[str, int]:
    recorder = Recorder(Live())
    recorder.entries = list(trace.timeline)
    return peaks_of(recorder, 0)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_toy(tmp_path_factory.mktemp("few-blocks"))


# -- the trace -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "checkpointing", "sharded"),
    [
        ("lora", {"base_precision": "nf4"}, True),
        pytest.param(*("lora", CHECKPOINTED, False), marks=pytest.mark.slow),
        pytest.param(*("full", {}, False), marks=pytest.mark.slow),
        ("full", CHECKPOINTED | {"gradient_checkpointing_interval": 2}, True),
        pytest.param(*("lora", CHECKPOINTED | ROUTED, True), marks=pytest.mark.slow),
        pytest.param(*("full", ROUTED, False), marks=pytest.mark.slow),
    ],
)
def test_an_echo_takes_what_its_block_does(
    toy: Path, kind: str, checkpointing: dict[str, Any], sharded: bool
) -> None:
    spec = spec_of(toy, model_type=kind, **checkpointing, **BF16)
    one = trace_model(shape(spec, sharded=sharded))
    every = trace_model(shape(spec, sharded=sharded), echo=False)
    assert phases_of(one) == pytest.approx(phases_of(every), rel=0.01)
    ends = [[e for e in t.timeline if not isinstance(e, Mark)][-1] for t in (one, every)]
    assert ends[0].gradients == ends[1].gradients
    # All that was kept is freed, but for the adapters in bf16, which the next forward fills again.
    adapters = [w for unit in one.units for w in unit.weights if w.lora]
    assert bool(adapters) == (kind == "lora")
    narrow = sum(rounded(2 * weight.numel) for weight in adapters)
    assert {end.activations for end in ends} == {narrow}


@pytest.mark.slow
def test_selective_checkpointing_keeps_more_than_full_and_less_than_none(toy: Path) -> None:
    kinds = {
        "full": {"gradient_checkpointing": True},
        "selective": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_policy": "selective",
        },
        "none": {},
    }
    forward = [
        phases_of(trace_model(shape(spec_of(toy, **FULL, **changes))))["forward"]
        for changes in kinds.values()
    ]
    assert forward == sorted(forward)
    assert len(set(forward)) == 3


# -- the arithmetic ------------------------------------------------------------------------


# Two ranks halve what 64 cut into rows with padding; that is asked of a LoRA and of full training
# on both, and of what options change on one of them. Each option is in one case.
@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({}, (2, 64)),
        pytest.param(CHECKPOINTED | {"lora_placement": "sharded"}, (64,), marks=pytest.mark.slow),
        (FULL, (2, 64)),
        pytest.param(CHECKPOINTED | BF16 | ROUTED, (2,), marks=pytest.mark.slow),
        pytest.param(FULL | ROUTED, (2,), marks=pytest.mark.slow),
        pytest.param(
            FULL | BF16 | CHECKPOINTED | {"gradient_checkpointing_interval": 2},
            (2,),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FULL | BF16 | {"fsdp_reshard_after_forward": False}, (64,), marks=pytest.mark.slow
        ),
        pytest.param(
            FULL | BF16 | {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2},
            (2,),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FULL | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 50_000},
            (64,),
            marks=pytest.mark.slow,
        ),
        pytest.param(FULL | {"fsdp_auto_wrap_policy": "NO_WRAP"}, (2,), marks=pytest.mark.slow),
    ],
    ids=lambda value: (
        (" ".join(map(str, value.values())) or "lora")
        if isinstance(value, dict)
        else " and ".join(map(str, value))
    ),
)
def test_units_take_what_fsdp2_takes(
    toy: Path, changes: dict[str, Any], on: tuple[int, ...]
) -> None:
    """Torch's own `fully_shard`, among fake ranks, on all blocks of the model."""
    spec = spec_of(toy, strategy="fsdp2", **changes)
    trace = traced(shape(spec))
    for ranks in on:
        expected = reference(shape(spec), spec, ranks)
        found = predict(trace, spec, ranks, "fsdp2")
        for name in ("forward", "backward"):
            phase = found.phase(name)
            assert phase is not None
            without_state = phase.peak - phase.parts.optimizer
            assert without_state == pytest.approx(expected[name], rel=0.01), (ranks, phase)


OPTIMIZERS: Final = (
    "adamw",
    "sgd",
    "lion",
    "prodigy",
    "adafactor",
    "adamw_8bit",
    "adamw_schedule_free",
    "came",
    "muon",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_takes_what_the_real_one_does(toy: Path, name: str) -> None:
    spec = spec_of(toy, optimizer=name, weight_decay=0.01, device="cpu")
    shapes = [(512, 256), (300,), (64, 64), (1024, 512), (7,)]
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in shapes]
    with Live() as live:
        for parameter in parameters:
            live.ignore(parameter)
        matrices = [p for p in parameters if p.ndim == 2]
        optimizer = build_optimizer(spec, parameters, torch.device("cpu"), matrices=matrices)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            before = live.activations
            live.reset()
            optimizer.step()
        gradients = sum(rounded(4 * p.numel()) for p in parameters)
        state = live.activations - gradients
    trained = [Trained(p.numel(), tuple(p.shape), matrix=p.ndim == 2) for p in parameters]
    # Sums and steps that a library keeps as tensors on the way: some blocks each.
    slack = 512 * 4 * len(shapes)
    assert state_bytes(spec, trained) == pytest.approx(state, abs=slack)
    expected = temporary_bytes(spec, trained, on_cuda=False)
    assert live.most - before == pytest.approx(expected, abs=slack, rel=0.15)


def test_a_training_adapter_is_counted_whole_on_every_rank(toy: Path) -> None:
    spec = spec_of(toy, **BF16)
    file = write_training_adapter(toy)
    adapted = spec.model_copy(update={"training_adapter": str(file)})
    matrices = [t for t in load_file(file).values() if t.dim()]
    size = sum(rounded(2 * tensor.numel()) for tensor in matrices)
    plain, more = trace_model(shape(spec)), trace_model(shape(adapted))
    assert more.buffers - plain.buffers == size
    for name in ("forward", "backward"):
        phases = [predict(t, spec, 2, "fsdp2").phase(name) for t in (plain, more)]
        parameters = [phase.parts.parameters for phase in phases if phase is not None]
        assert parameters[1] - parameters[0] == size
    sampling = [replace(shape(each), training=False) for each in (spec, adapted)]
    timelines = [trace_model(each).timeline for each in sampling]
    assert timelines[0] == timelines[1]


# -- what changes do -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator()


@pytest.mark.slow
def test_what_routes_save_is_said(estimator: Estimator, toy: Path) -> None:
    """By twelve tokens of sixteen that skip all blocks, and four that pass with the text."""
    plain, routed = (
        estimator.estimate(spec_of(toy, tread=tread)) for tread in (None, {"0..-1": 0.75})
    )
    flops = [
        sum(found.work[phase][name] for phase in ("forward", "backward") for name in FLOPS)
        for found in (plain, routed)
    ]
    (note,) = [text for text in routed.notes if text.startswith("tread: ")]
    said = re.match(r"tread: (\d+) % fewer FLOPs in a step .*, and (\d+) % less memory", note)
    assert said
    assert int(said[1]) == round(100 * (1 - flops[1] / flops[0]))
    assert 10 < int(said[1]) < 75
    assert 10 < int(said[2]) < 75
    assert not [text for text in plain.notes if text.startswith("tread")]


@pytest.mark.parametrize(
    ("changes", "part", "least", "most"),
    [
        # Times what it was; where not a matter of counting, between what would be odd.
        ({"gradient_checkpointing": True}, "activations", 0.2, 0.6),
        ({"train_batch_size": 4}, "activations", 1.95, 2.0),
        ({"resolution": 256}, "activations", 3.0, 4.0),  # four times the pixels, the same texts
        ({"optimizer": "lion"}, "optimizer", 0.48, 0.5),  # one moment of two
        ({"optimizer": "muon"}, "optimizer", 0.5, 0.65),  # one of matrices in blocks
        ({"use_ema": True}, "optimizer", 1.48, 1.5),
        ({"fsdp_cpu_offload": True}, "parameters", 0.0, 0.0),
        ({"fsdp_reshard_after_forward": False}, "gathered", 1.1, 1.3),
        ({"strategy": "ddp"}, "gathered", 0.0, 0.0),
        ({"strategy": "ddp"}, "parameters", 1.98, 2.0),
        ({"num_processes": 4}, "parameters", 0.5, 0.51),
        ({"gradient_accumulation_steps": 2}, "gradients", 1.3, 1.5),
    ],
    ids=lambda value: str(value),
)
def test_each_option_changes_its_part(
    estimator: Estimator, toy: Path, changes: dict[str, Any], part: str, least: float, most: float
) -> None:
    base = FULL | BF16 | {"strategy": "fsdp2"}

    def needed(values: dict[str, Any]) -> int:
        """The most of this part within a step."""
        phases = estimator.estimate(spec_of(toy, **values)).phases
        step = [p for p in phases if p.name in ("forward", "backward", "optimizer")]
        return max(getattr(phase.parts, part) for phase in step)

    assert least <= needed({**base, **changes}) / needed(base) <= most


def test_what_is_arithmetic_is_not_traced_again(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Shape] = []

    def trace(shape: Shape, **more: Any) -> Trace:
        asked.append(shape)
        return traced(shape)

    monkeypatch.setattr(estimator_module, "trace_model", trace)
    estimator = Estimator()
    for ranks in (2, 8, 1024):
        for changes in (
            {},
            {"optimizer": "lion"},
            {"use_ema": True},
            {"fsdp_reshard_after_forward": False},
            {"fsdp_cpu_offload": True},
            {"gradient_accumulation_steps": 4},
        ):
            estimator.estimate(spec_of(toy, strategy="fsdp2", **FULL, **changes), ranks)
    assert len(asked) == 1


def test_what_a_trace_asked_is_known_where_the_same_is_trained(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a block without any gradient, of which another trace would not see that it has one."""
    known: list[Any] = []
    answer = traced(shape(spec_of(toy, **FULL)))
    answer = replace(answer, asked={"last": (False, True), "unused": (False, False)})

    def trace(_: Shape, asked: Any) -> Trace:
        known.append(asked)
        return answer

    monkeypatch.setattr(estimator_module, "trace_model", trace)
    estimator = Estimator()
    for changes in ({}, {"train_batch_size": 1}, {"lora_target_modules": ["to_q"]}, FULL):
        estimator.estimate(spec_of(toy, strategy="fsdp2", **changes))
    assert known == [None, {"last": (False, True)}, None, None]


def test_more_than_two_micro_batches_are_like_two(estimator: Estimator, toy: Path) -> None:
    peaks = [
        estimator.estimate(
            spec_of(toy, strategy="fsdp2", gradient_accumulation_steps=count, **FULL, **BF16)
        ).peak
        for count in (1, 2, 3, 50)
    ]
    assert peaks[0] < peaks[1] == peaks[2] == peaks[3]


def test_accumulation_follows_the_global_batch_on_as_many_ranks_as_are_asked_for(
    estimator: Estimator, toy: Path
) -> None:
    spec = spec_of(toy, strategy="fsdp2", global_batch_size=8, **FULL, **BF16)
    for ranks, forwards in ((2, 2), (4, 1)):
        said = estimator.estimate(spec, ranks)
        alike = spec_of(toy, strategy="fsdp2", gradient_accumulation_steps=forwards, **FULL, **BF16)
        assert said.settings["gradient_accumulation_steps"] == forwards
        assert said.peak == estimator.estimate(alike, ranks).peak


def test_offload_moves_shards_and_state_to_the_host(estimator: Estimator, toy: Path) -> None:
    spec = spec_of(toy, strategy="fsdp2", **FULL, **BF16)
    there = estimator.estimate(spec)
    gone = estimator.estimate(spec.model_copy(update={"fsdp_cpu_offload": True}))
    moved = gone.host["offloaded_weights"] + gone.host["offloaded_optimizer"]
    # In backward, weights that were freed are copied again, and gradients to the host.
    layout = Layout(2, casts=True, offload=True)
    costs = {unit.name: cost_of(unit, layout) for unit in traced(shape(spec)).units}
    assert gone.work["forward"]["copied"] == sum(cost.host for cost in costs.values())
    gradients = sum(cost.output for cost in costs.values())
    freed = costs.keys() - {"", "single_transformer_blocks.1"}
    assert gone.work["backward"]["copied"] - gradients == sum(costs[n].host for n in freed)
    backward, before = gone.phase("backward"), there.phase("backward")
    assert backward is not None
    assert before is not None
    held = before.parts.parameters + before.parts.optimizer
    assert held - backward.parts.parameters - backward.parts.optimizer == moved


def test_ranks_of_a_machine_share_the_blocks_that_they_swap(
    estimator: Estimator, toy: Path
) -> None:
    values = {"num_processes": 2, "strategy": "ddp"}
    plain = estimator.estimate(spec_of(toy, **values))
    swapping = estimator.estimate(spec_of(toy, swap_blocks=2, **values))
    swapped = swapping.host["swapped_blocks"]
    assert plain.phase("load").peak - swapping.phase("load").peak == swapped > 0  # type: ignore[union-attr]
    assert swapping.host["machine"] == 2 * swapping.host["rank"] - swapped
    # The last one stays on the device until its backward.
    copied = [swapping.work[phase]["copied"] for phase in ("forward", "backward")]
    assert copied[0] == swapped > copied[1] > 0


def test_fused_kernels_are_fewer_and_move_less(estimator: Estimator, toy: Path) -> None:
    eager, compiled = (
        estimator.estimate(spec_of(toy, torch_compile=compiles, **BF16)).work
        for compiles in (False, True)
    )
    for phase in ("forward", "backward"):
        assert compiled[phase]["kernels"] < eager[phase]["kernels"]
        assert compiled[phase]["bytes"] < eager[phase]["bytes"]
        assert compiled[phase]["half"] == eager[phase]["half"]


def test_schedule_free_keeps_other_weights_while_samples_are_denoised_and_decoded(
    estimator: Estimator, toy: Path
) -> None:
    spec = spec_of(toy, strategy="fsdp2", validation_prompts=["a red circle"], **FULL, **BF16)
    changed = spec.model_copy(update={"optimizer": "adamw_schedule_free"})
    plain, free = estimator.estimate(spec), estimator.estimate(changed)
    before, after = plain.phase("sample"), free.phase("sample")
    assert before is not None
    assert after is not None
    assert after.note == before.note == "decoding"
    weights = plain.phase("load").parts.parameters  # type: ignore[union-attr]
    assert after.peak - before.peak == pytest.approx(weights, rel=0.02)
    offloaded = [
        estimator.estimate(one.model_copy(update={"fsdp_cpu_offload": True})).host
        for one in (spec, changed)
    ]
    more = offloaded[1]["offloaded_optimizer"] - offloaded[0]["offloaded_optimizer"]
    assert more == pytest.approx(weights, rel=0.02)


def test_gradients_are_offloaded_into_powers_of_two(estimator: Estimator, toy: Path) -> None:
    """Torch pins memory so; the weights' own memory is exact."""
    spec = spec_of(toy, strategy="fsdp2", fsdp_cpu_offload=True, **FULL, **BF16)
    host = estimator.estimate(spec).host
    assert host["offloaded_weights"] < host["offloaded_gradients"]
    assert host["offloaded_gradients"] < 2 * host["offloaded_weights"]


@pytest.mark.slow
def test_samples_and_caches_are_predicted_where_the_model_is_here(
    estimator: Estimator, toy: Path
) -> None:
    found = estimator.estimate(spec_of(toy, validation_prompts=["a red circle"]))
    names = [name for name in TITLES if name not in ("base", "score")]  # which only some jobs have
    assert [phase.name for phase in found.phases] == names
    assert all(phase.peak > 0 for phase in found.phases)
    assert any(note.startswith("torch_compile: true would") for note in found.notes)
    with_class = estimator.estimate(spec_of(toy, class_prompt="a circle", num_class_images=3))
    assert "sample" in [phase.name for phase in with_class.phases], "class images are samples"
    several = estimator.estimate(spec_of(toy, resolution=[32, 128]))
    assert several.peak == estimator.estimate(spec_of(toy, resolution=128)).peak, "the largest"


def test_models_that_score_samples_are_predicted_one_after_the_other(
    estimator: Estimator, toy: Path, tmp_path: Path
) -> None:
    """Against the weights and a batch of the real models; an older config has a number as side."""
    models = {CLIP: scorers.write_clip(tmp_path / "clip"), DINO: scorers.write_dino(tmp_path / "d")}
    config = models[CLIP] / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"crop_size": scorers.SIDE}))
    keys = {key: str(root) for key, root in models.items()} | {
        "validation_prompts": ["a red circle"],
        "validation_fraction": 0.1,
        "validation_scores": ["clip_t", "dino_i"],
    }
    cpu = torch.device("cpu")
    each = []
    for key, root in models.items():
        scoring = load_scoring_model(key, root, cpu)
        weights = [*scoring.model.parameters(), *scoring.model.buffers()]
        with Live() as live, torch.no_grad():
            for weight in weights:
                live.ignore(weight)
            pixels = torch.zeros(BATCH, 3, scorers.SIDE, scorers.SIDE)
            live.reset()
            scoring.embed(pixels)
        each.append(sum(rounded(w.untyped_storage().nbytes()) for w in weights) + live.most)
    found = estimator.estimate(spec_of(toy, device="cpu", **keys))
    phase, save = found.phase("score"), found.phase("save")
    assert phase is not None
    assert save is not None
    assert phase.parts.workspace == pytest.approx(max(each), rel=0.01)
    assert phase.parts.parameters == save.parts.parameters, "beside what is trained"
    none = estimator.estimate(spec_of(toy, device="cpu", **keys | {"validation_scores": []}))
    assert none.phase("score") is None
    half = estimator.estimate(spec_of(toy, **keys)).phase("score")
    assert half is not None
    assert half.parts.workspace == pytest.approx(max(each) / 2, rel=0.05), "fp16 on a GPU"


# -- what is answered ----------------------------------------------------------------------


def test_a_prediction_comes_back_from_json() -> None:
    phases = (Phase("forward", Parts(1, 2, 3, 4, 5, 6)), Phase("backward", Parts(7), "so"))
    one = Predicted("fsdp2", 8, phases, (21, 30), {"nccl": 2}, "Model", 10, 5, {"resolution": 64})
    one = replace(one, host={"rank": 9}, disk={"checkpoint": 3}, notes=("a note",))
    values = json.loads(json.dumps(one.values))
    assert values == one.values
    assert Predicted.of(values) == one
    assert (one.peak, one.largest.name, one.device) == (21, "forward", (23, 32))


@pytest.mark.parametrize("damage", [{"schema": 0}, {"phases": [{}]}, {"reserved": 3}])
def test_a_damaged_prediction_is_told(damage: dict[str, Any]) -> None:
    one = Predicted("single", 1, (Phase("load", Parts(1)),), (1, 1)).values
    with pytest.raises(ValueError, match="prediction"):
        Predicted.of(one | damage)


def test_reserved_is_a_band_above_allocated() -> None:
    overheads = Overheads()
    low, high = overheads.reserved(10**10)
    kept = 8 * overheads.segment
    assert overheads.reserved(10**10, kept) == (low + kept, high + kept)
    assert 10**10 < low < high
    assert not low % overheads.segment
    assert "nccl" not in overheads.driver_bytes(0)
    assert overheads.driver_bytes(2)["nccl"] > overheads.driver_bytes(1)["nccl"]


def test_the_server_answers_each_request_and_survives_bad_ones(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimator_module, "trace_model", lambda shape, **more: traced(shape))
    job = values_of(toy)
    requests = [
        "not json",
        json.dumps(["a list"]),
        json.dumps({"id": 1, "job": job | {"no_such_key": 1}}),
        json.dumps({"id": 2, "job": job | {"pretrained_model_name_or_path": "no/such-model"}}),
        json.dumps(
            {"id": 3, "job": job, "ranks": [2, 4], "strategies": ["ddp", "single", "fsdp2"]}
        ),
    ]
    answers = io.StringIO()
    serve(io.StringIO("\n".join(requests) + "\n"), answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [one["id"] for one in found] == [None, None, 1, 2, 3]
    assert all("error" in one for one in found[:3])
    assert "no/such-model" in found[3]["failed"][0]["error"]
    last = found[4]
    assert [(p["strategy"], p["ranks"]) for p in last["predictions"]] == [
        ("ddp", 2),
        ("ddp", 4),
        ("fsdp2", 2),
        ("fsdp2", 4),
    ]
    assert [(f["strategy"], f["ranks"]) for f in last["failed"]] == [("single", 2), ("single", 4)]
    for one in last["predictions"]:
        Predicted.of(one)


@pytest.mark.slow
def test_a_published_model_need_not_be_here(estimator: Estimator) -> None:
    """The config comes with us; two layers of it are enough to see that it is understood."""
    name = "stabilityai/stable-diffusion-3.5-medium"
    values = {"model_family": "sd3", "pretrained_model_name_or_path": name, "dataset": "."}
    spec = load_spec(None, values | {"resolution": 256})
    whole = shape(spec)
    config = whole.config | {"num_layers": 2, "dual_attention_layers": [0]}
    trace = trace_model(replace(whole, config=config))
    assert trace.model == "SD3Transformer2DModel"
    assert not trace.compiles, "it names no blocks to compile"
    assert predict(trace, spec, 8, "fsdp2").peak > 0


# -- work ----------------------------------------------------------------------------------


# Matrix elements that each token meets in a block, over the width squared: queries, keys, values
# and outputs of attention take four, the feed-forward network eight. Layers are of each kind.
WIDTHS: Final = {
    # FLUX.1: images and texts meet matrices of their own, of the same shapes.
    "flux": {"d": 3072, "each": 12, "tokens": 4096 + 512, "of_texts": 0, "texts": 0, "layers": 1},
    # PixArt-Sigma: two more for queries and outputs of cross-attention, two more for 300 texts.
    "pixart_sigma": {
        "d": 1152,
        "each": 14,
        "tokens": 4096,
        "of_texts": 2,
        "texts": 300,
        "layers": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDTHS)
@pytest.mark.parametrize(
    ("changes", "products", "attention"),
    [
        (FULL, 3, 14),  # 6 N T: weights need gradients as well
        ({"lora_rank": 1}, 2, 14),  # frozen weights need none
        (FULL | CHECKPOINTED, 4, 18),  # and forward again
        (SCALED, 2, 14),  # forward in fp8
    ],
    ids=["full", "lora", "checkpointed", "scaled"],
)
def test_flops_are_those_of_the_closed_form(
    family: str,
    changes: dict[str, Any],
    products: int,
    attention: int,
) -> None:
    name = next(iter(FAMILIES[family].flavours.values())).hub_id
    values = {"model_family": family, "pretrained_model_name_or_path": name, "dataset": "."}
    spec = load_spec(None, values | {"resolution": 1024, "device": "cuda"} | BF16 | changes)
    whole = shape(spec)
    facts = WIDTHS[family]
    few = with_layers(whole.config, facts["layers"])
    trace = trace_model(replace(whole, config=few, key=f"{whole.key} {facts['layers']}"))
    d, tokens, texts = facts["d"], facts["tokens"], facts["texts"]
    blocks = sum(few[name] for name in few if name in ("num_layers", "num_single_layers"))
    of_products = 2 * d**2 * (facts["each"] * tokens + facts["of_texts"] * texts) * blocks
    of_attention = tokens * (tokens + texts) * d * blocks
    forward, backward = (work_of(trace.timeline, name) for name in ("forward", "backward"))
    counted = forward.half + backward.half + forward.eight
    assert bool(forward.eight) == (changes is SCALED)
    # What comes before the first matrix of a LoRA needs no gradient, here in one block of two.
    assert counted == pytest.approx(products * of_products, rel=0.03 if products > 2 else 0.08)
    both = forward.attention + backward.attention
    assert both == pytest.approx(attention * of_attention, rel=0.03)
    assert forward.attention == pytest.approx(4 * of_attention, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, FULL | BF16 | CHECKPOINTED], ids=["lora", "checkpointed"])
def test_a_replayed_block_counts_as_one_that_runs(toy: Path, changes: dict[str, Any]) -> None:
    place = shape(spec_of(toy, **changes))
    replayed, run = (trace_model(place, echo=echo) for echo in (True, False))
    for phase in ("forward", "backward"):
        first, second = (work_of(trace.timeline, phase) for trace in (replayed, run))
        assert first.flops == second.flops > 0
        assert first.bytes == pytest.approx(second.bytes, rel=0.01)
        assert first.kernels == pytest.approx(second.kernels, rel=0.01)


def test_torch_counts_the_same_flops() -> None:
    """Against `FlopCounterMode` itself, which counts what runs on the CPU."""
    layer = torch.nn.Linear(300, 200)
    counter = Counter()
    x = torch.empty(400, 300, requires_grad=True)
    with FlopCounterMode(display=False) as reference, Live(work=counter):
        layer(x).sum().backward()
    work = counter.take()
    assert work.flops == reference.get_total_flops() == 3 * 2 * 400 * 300 * 200
    assert work.kernels > 3
    assert counter.take().kernels == 0
    packing = Packing("fp8_scaled", scaled=True)
    packed, scale = packing.pack(torch.empty(1024, 1024))
    with Live(work=counter):
        packing.product(torch.empty(1024, 1024, dtype=torch.bfloat16), packed, scale, None, None)
    assert counter.take().eight == 2 * 1024**3
