"""What the engine itself predicts moves as the ladder says, and as the table of families has it."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import pytest

from engine.memory.__main__ import answer
from engine.memory.estimator import Estimator
from engine.toy import DTYPES, write_toy
from jobs.errors import UserError
from jobs.machine.gpu import Gpu
from jobs.memory.calibration import Calibration
from jobs.memory.estimate import Estimate, Place
from jobs.memory.fit import CARDS, CARDS_FILE, IN_TABLES, KINDS, read_smallest
from jobs.memory.ladder import LADDER, climb
from jobs.memory.predicted import Predicted
from jobs.memory.question import Server, predict
from jobs.models import model_config
from jobs.models.published_sizes import by_size
from jobs.paths import exists
from jobs.preflight import check_job
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.value_types import AttentionBackend
from tests.support.engine.memory import with_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from engine.toy import ToyPaths

SMALL = "pixart_sigma"  # 0.6 B parameters


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real one, warm for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        one = Server(patience=600)
        yield one
        one.close()


def estimate(server: Server, **values: Any) -> Estimate:
    usual = {"model_family": SMALL, "dataset": ".", "num_processes": 4, "strategy": "fsdp2"}
    return Estimate(
        JobSpec.model_validate(usual | values),
        Place(True, (CARDS[24],), here=False),
        server,
        Calibration(),
    )


@pytest.mark.slow
def test_each_step_of_the_ladder_needs_less_than_the_one_before(server: Server) -> None:
    spec = estimate(
        server,
        model_type="full",
        strategy="ddp",
        mixed_precision="no",
        device="cuda",
        resolution=512,
    ).spec
    place = Place(True, (CARDS[24],), here=False)

    def fit(one: JobSpec) -> Any:
        found = predict(one, server, strategy=one.strategy, ranks=4)
        return place.fit(found) if isinstance(found, Predicted) else None

    # Not to its end: each lower resolution is traced anew.
    found = list(islice(climb(spec, fit, enough=lambda fit: False), 4))
    titles = [step.rung.title for step in found]
    assert {"activation checkpointing", "shard over all ranks"} <= set(titles)
    assert [step.after.high for step in found] == sorted(
        (step.after.high for step in found), reverse=True
    )
    assert set(titles) <= {rung.title for rung in LADDER}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "helps"),
    [({}, True), ({"gradient_checkpointing": True, "resolution": 256}, False)],
    ids=["many activations", "few activations"],
)
def test_accumulation_is_named_where_it_helps(
    server: Server, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], helps: bool
) -> None:
    """A smaller batch has fewer activations, and its second half begins with gradients there."""
    spec = estimate(
        server,
        **{"model_type": "full", "device": "cuda", "resolution": 512} | changes,
        train_batch_size=4,
    ).spec
    (rung,) = (one for one in LADDER if one.title == "smaller batch, more accumulation")
    after = spec.model_copy(update=rung.change(spec))
    found = [predict(one, server, strategy="fsdp2", ranks=4) for one in (spec, after)]
    high = [one.device[1] for one in found if isinstance(one, Predicted)]
    assert (high[1] < high[0]) is helps
    place = Place(True, (CARDS[24],), here=False)

    def fit(one: JobSpec) -> Any:
        found = predict(one, server, strategy=one.strategy, ranks=4)
        return place.fit(found) if isinstance(found, Predicted) else None

    monkeypatch.setattr("jobs.memory.ladder.LADDER", (rung,))
    assert bool(list(islice(climb(spec, fit, enough=lambda fit: False), 1))) is helps


@pytest.mark.slow
def test_sharding_holds_less_than_copies(server: Server) -> None:
    found = estimate(server, model_type="full", gradient_checkpointing=True, resolution=512)
    need = {name: found.candidate(name, 4).fit for name in ("ddp", "hsdp", "fsdp2")}
    assert all(fit is not None for fit in need.values())
    highs = [fit.high for fit in need.values() if fit is not None]
    assert highs == sorted(highs, reverse=True)
    assert found.advised == "ddp", "all fit, and it is the fastest"


@pytest.mark.slow
def test_the_table_says_what_is_predicted(server: Server) -> None:
    known = read_smallest()[SMALL]
    for kind, keys in KINDS.items():
        found = estimate(
            server,
            model_flavour=known["flavour"],
            strategy="auto",
            gradient_checkpointing=True,
            **keys,
        )
        counts = {str(card): found.fewest(CARDS[card]) for card in IN_TABLES}
        assert counts == known[kind], "run `python tests/bench/cards.py`"


class Here(Server):
    """Predicts in this process, and keeps its traces."""

    estimator = Estimator()

    def ask(self, request: dict[str, Any], cancelled: Any = None) -> dict[str, Any]:
        return answer(self.estimator, request, load_spec(None, request["job"]))


@pytest.fixture
def _few_layers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published configs with two blocks of a kind: what is predicted of more takes longer.

    So does SD3's table of positions, which is computed for images of 6144 pixels.
    """
    published = model_config._of_hub_id

    def fewer(hub_id: str) -> dict[str, Any] | None:
        config = published(hub_id)
        positions = {"pos_embed_max_size": 64} if "stable-diffusion-3" in hub_id else {}
        return config and with_layers(config, 2) | positions

    monkeypatch.setattr(model_config, "_of_hub_id", fewer)
    gpus = [Gpu(n, f"GPU-{n}", "H100", CARDS[80].total, 0) for n in range(16)]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)


def refused_by_submit(values: Mapping[str, Any]) -> str:
    """The sentence with which `submit` refuses a job; "" if it takes it."""
    try:
        spec = load_spec(None, values)
        if exists(Path(spec.pretrained_model_name_or_path)):
            check_job.check(spec)
    except UserError as error:
        return str(error).removeprefix("flags: ")
    return ""


def refused_by_estimate(values: Mapping[str, Any], server: Server) -> str:
    """The sentence with which `estimate` refuses a job; "" if it answers."""
    place = Place(True, (CARDS[24],), here=False)
    try:
        asked = Estimate(load_spec(None, values), place, server, Calibration())
        own = asked.own
    except UserError as error:
        return str(error).removeprefix("flags: ")
    if isinstance(own, Predicted):
        few = asked.fewest(CARDS[141])
        assert few is not None
        assert few % asked.spec.context_parallel_size == 0
        return ""
    return f"{own.error}; {own.hint}" if own.hint else own.error


def small(family: str) -> dict[str, Any]:
    facts = FAMILIES[family]
    frames = {"num_frames": facts.shortest} if facts.frame_step else {}
    return {"model_family": family, "resolution": 64, "max_sequence_length": 64} | frames


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """One after the other for all tests of it, which then find each other's traces."""
    return str(request.param)


@pytest.fixture(scope="module")
def toys(family: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ToyPaths]:
    """A family's toy with files in the precision that is asked for."""
    root = tmp_path_factory.mktemp("toys")
    return cache(lambda dtype: write_toy(root / dtype, family, pictures=4, size=64, dtype=dtype))


# Where the weights are, the job's precision, and what is trained: each place and kind.
OF_EACH: Final = (
    ("published", "bf16", "lora"),
    ("float16", "no", "full"),
)
# All pairs for one family: the lines that read and check files' precision are the same for all.
OF_ONE: Final = {
    "flux": (
        ("float16", "fp16", "lora"),
        ("published", "no", "lora"),
        ("published", "fp16", "lora"),
        ("float32", "no", "lora"),
        ("bfloat16", "no", "lora"),
        ("bfloat16", "bf16", "lora"),
        ("float16", "no", "lora"),
    )
}


@pytest.mark.slow
@pytest.mark.usefixtures("_few_layers")
def test_a_job_of_any_precision_is_predicted_or_refused_as_submit_refuses_it(
    family: str, toys: Callable[[str], ToyPaths], tmp_path: Path
) -> None:
    """Of published models, and of files in any precision."""
    hub_id = next(iter(FAMILIES[family].flavours.values())).hub_id
    server, peaks = Here(), []
    for source, precision, kind in (*OF_EACH, *OF_ONE.get(family, ())):
        model, data = hub_id, str(tmp_path)
        if source != "published":
            model, data = str(toys(source).model), str(toys(source).data)
        values = small(family) | {
            "pretrained_model_name_or_path": model,
            "dataset": data,
            "model_type": kind,
            "mixed_precision": precision,
        }
        assert refused_by_estimate(values, server) == refused_by_submit(values)
        if source != "published" and (precision, kind) == ("no", "lora"):
            found = predict(load_spec(None, values), server, strategy="single")
            assert isinstance(found, Predicted)
            peaks.append(found.peak)
    if family in OF_ONE:
        assert len(peaks) == len(DTYPES)
        assert len(set(peaks)) == 1, "the base is in fp32, whatever the files have"


@pytest.mark.slow
@pytest.mark.usefixtures("_few_layers")
def test_any_attention_kernel_is_predicted_or_refused_as_submit_refuses_it(family: str) -> None:
    """No CPU has the kernels of a GPU, and `estimate` asks no GPU."""
    server, peaks = Here(), {}
    for kernel in get_args(AttentionBackend):
        values = small(family) | {
            "dataset": ".",
            "pretrained_model_name_or_path": next(iter(FAMILIES[family].flavours.values())).hub_id,
            "attention_backend": kernel,
            "mixed_precision": "bf16",
            "device": "cuda",
        }
        refused = refused_by_submit(values)
        assert refused_by_estimate(values, server) == refused
        if refused:
            continue
        found = predict(load_spec(None, values), server, strategy="single")
        assert isinstance(found, Predicted), (kernel, found)
        peaks[kernel] = found.peak
    assert {peaks[kernel] for kernel in peaks if kernel != "math"} == {peaks["auto"]}


@pytest.mark.slow
@pytest.mark.usefixtures("_few_layers")
def test_any_context_parallel_job_is_predicted_or_refused_as_submit_refuses_it(
    family: str, toys: Callable[[str], ToyPaths]
) -> None:
    """On 2 to 16 ranks, whatever number of them shares a sample."""
    toy = toys("float16")
    server, able = Here(), 0
    for ranks in range(2, 17):
        for size in {2, 3, 4, 8, ranks}:
            for comm in ("allgather", "alltoall"):
                values = small(family) | {
                    "pretrained_model_name_or_path": str(toy.model),
                    "dataset": str(toy.data),
                    "num_processes": ranks,
                    "strategy": "fsdp2",
                    "context_parallel_size": size,
                    "context_parallel_comm_strategy": comm,
                    "attention_backend": "auto",
                }
                said = refused_by_submit(values)
                assert refused_by_estimate(values, server) == said, (ranks, size, comm)
                able += not said
    assert bool(able) == FAMILIES[family].context_parallel


def test_every_family_is_in_the_table() -> None:
    assert (read_json(CARDS_FILE) or {})["schema"] == 1
    assert list(read_smallest()) == list(FAMILIES)
    for name, row in read_smallest().items():
        first, *others = (names[0] for names in by_size(FAMILIES[name]).values())
        assert row["flavour"] == first
        sizes = row.get("sizes", {})
        assert list(sizes) == others, "run `python tests/bench/cards.py`"
        for counts in (row[kind] for row in (row, *sizes.values()) for kind in KINDS):
            assert list(counts) == [str(card) for card in IN_TABLES]


@pytest.mark.slow
def test_the_setups_in_the_docs_are_what_is_predicted(server: Server) -> None:
    kept = read_json(Path(__file__).resolve().parents[3] / "docs" / "setups.json")
    assert kept is not None
    shared = {"model_family": SMALL, "dataset": ".", "resolution": 1024, "mixed_precision": "bf16"}
    spec = JobSpec.model_validate(shared | {"gradient_checkpointing": True, "lora_rank": 16})
    predicted = predict(spec, server, strategy="ddp", ranks=4)
    assert isinstance(predicted, Predicted)
    again = "delete docs/setups.json, then python docs/setups.py and python docs/make.py"
    values = kept[f"{SMALL} lora ddp 4 none 1 0"]
    assert {name: predicted.values[name] for name in values} == values, again
