"""Splitting a sample over ranks changes nothing but rounding; what cannot be split is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from engine import families
from engine.parallel.context_parallel import (
    MODELS,
    check_model,
    check_tokens,
    require_cuda,
)
from jobs.errors import UserError
from jobs.models.model_config import find_target
from jobs.spec.families import FAMILIES
from tests.support.engine.ranks.context_parallel import CASES, SAMPLED, Case, work
from tests.support.engine.toy_jobs import start_ranks

if TYPE_CHECKING:
    from jobs.spec.families import Family as FamilyFacts

EXACT = 1e-5  # relative; fp32 rounding


FAST = ("plain", "LoRA replicated")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the ranks found, by case: of those that are chosen, and sampling with two ranks."""
    root = tmp_path_factory.mktemp("context")
    here = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params.get("case") for item in here if hasattr(item, "callspec")]
    for ranks in (2, 4):
        cases = [case for case in chosen if case is not None and case.ranks == ranks]
        if cases or ranks == 2:
            meeting = f"{root}/meeting-{ranks}"
            start_ranks(work, ranks, cases, meeting, root / "results.json").join()
    found: dict[str, dict[str, Any]] = json.loads((root / "results.json").read_text())
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.name in FAST else pytest.mark.slow) for c in CASES],
    ids=lambda case: f"{case.ranks} ranks, {case.name}",
)
def test_a_split_step_is_that_of_one_process(
    results: dict[str, dict[str, Any]], case: Case
) -> None:
    found = results[case.name]
    assert found["compared"] >= 20
    if case.autocast:
        # Queries and keys are rounded once more than autocast alone would.
        assert found["output"] < 0.02
        assert found["gradient"] < 0.05
        return
    assert found["output"] < EXACT
    if case.factor is None:
        assert found["gradient"] < EXACT, found["worst"]
    else:
        # All of them too small, by the same factor: what the loss is multiplied for.
        off = 1 - case.factor / case.context
        assert found["mildest"] == pytest.approx(off, rel=EXACT)
        assert found["gradient"] == pytest.approx(off, rel=EXACT)


@pytest.mark.e2e
@pytest.mark.parametrize("family", SAMPLED)
def test_sampling_in_a_split_model_draws_the_same(
    results: dict[str, dict[str, Any]], family: str
) -> None:
    assert results[f"{family} sampling"]["output"] < EXACT


@pytest.mark.parametrize("facts", FAMILIES.values(), ids=lambda facts: facts.name)
def test_families_are_split_if_there_is_a_plan(facts: FamilyFacts) -> None:
    """The last wave's others are refused since diffusers has none, which may change."""
    for flavour in facts.flavours:
        model = families.load(facts.name, flavour).transformer_class()
        split = MODELS.get(model.__name__)
        assert facts.context_parallel is (split is not None)
        plan = model._cp_plan if hasattr(model, "_cp_plan") else None
        if split is None:
            assert not plan, "see `Split`, and test its gradients"
            continue
        if split.plan is not None:
            plan = split.plan(SimpleNamespace(rope_type="split"))
        inputs = {name for entry in plan.values() if isinstance(entry, dict) for name in entry}
        assert facts.splits_text is ("encoder_hidden_states" in inputs)


@pytest.mark.e2e
def test_diffusers_plan_of_ltx_video_cannot_train_still(results: dict[str, dict[str, Any]]) -> None:
    """Texts are not split for it, see `Split.plan`."""
    assert "is invalid for input of size" in results["own plan"]["error"]


def test_diffusers_plan_of_ltx_2_has_other_rotations_still() -> None:
    """Then `_plan_of_ltx2` can split what it makes of positions, as that plan does."""
    kind = find_target("ltx2").config["rope_type"]
    rope = LTX2AudioVideoRotaryPosEmbed(24, rope_type=kind, num_attention_heads=2)
    cos, _ = rope(rope.prepare_coords(1, 2, 2, 2, torch.device("cpu")))
    assert LTX2VideoTransformer3DModel._cp_plan["rope"][0].expected_dims != cos.dim()


def test_models_without_a_plan_are_refused_by_name_and_others_named() -> None:
    with pytest.raises(UserError) as caught:
        check_model("SD3Transformer2DModel", heads=24, ulysses=2)
    assert "SD3Transformer2DModel" in str(caught.value)
    assert "FluxTransformer2DModel, Flux2Transformer2DModel" in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "divisors"), [(24, {1, 2, 3, 4, 6, 8, 12, 24}), (40, {1, 2, 4, 5, 8, 10, 20, 40})]
)
def test_only_heads_that_divide_pass(heads: int, divisors: set[int]) -> None:
    for ulysses in range(1, heads + 1):
        if ulysses in divisors:
            check_model("FluxTransformer2DModel", heads, ulysses)
        else:
            with pytest.raises(UserError, match=f"{ulysses} does not divide the {heads} attention"):
                check_model("FluxTransformer2DModel", heads, ulysses)


def test_tokens_that_do_not_divide_are_refused() -> None:
    check_tokens(512, 2, "max_sequence_length")
    with pytest.raises(UserError, match="2 does not divide the 255 tokens of pictures"):
        check_tokens(255, 2, "pictures of 240x272")


def test_devices_other_than_cuda_are_refused() -> None:
    require_cuda(torch.device("cuda", 1))
    with pytest.raises(UserError, match="Context parallelism runs on CUDA GPUs only"):
        require_cuda(torch.device("cpu"))
