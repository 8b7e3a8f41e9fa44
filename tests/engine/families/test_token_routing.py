"""Routing tokens around blocks (`tread`), in every family that has blocks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from engine import families
from engine.families.shared.references import REFERENCE, first_frame_of
from engine.model.activation_checkpointing import checkpoint_activations
from engine.toy.components.weights import one_thread
from engine.train.token_routing import TokenRouting, blocks_in_order
from jobs.errors import UserError
from jobs.models.model_files import check_config
from jobs.spec.families import FAMILIES
from tests.support.engine.families import PROMPT, Case, batch_of, cases, chosen, toys_root
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUTED: Final = [name for name in cases() if FAMILIES[name.partition(":")[0]].routed_blocks]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=chosen(ROUTED))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


class Rig:
    """A family's toy, and its forward and backward on two samples with texts of two lengths."""

    def __init__(self, case: Case, **changes: Any) -> None:
        self.family = case.family
        self.spec = case.spec(model_type="full", **changes)
        denoiser = case.stock().components[case.family.component]
        self.model = denoiser.train().requires_grad_(True)
        self.blocks = blocks_in_order(self.model, case.family)
        if self.spec.gradient_checkpointing:
            checkpoint_activations(self.model, self.spec)
        vae = case.family.load_vae(case.paths.model, torch.float32).eval()
        frames = (1,) if case.facts.frame_step else ()
        pixels = torch.zeros(1, 3, *frames, case.side, case.side)
        with torch.no_grad():
            shape = case.family.encode_pictures(vae, pixels).shape[1:]
            texts = batch_of(case.encoded("a star"), case.encoded(PROMPT))
        self.condition = case.family.arrange(texts)
        self.noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
        if case.first_frame:  # each token has a time of its own
            self.condition |= first_frame_of(torch.ones_like(self.noisy))
        elif case.takes is not None:  # tokens of its own
            self.condition[f"{REFERENCE}0"] = torch.ones_like(self.noisy)

    def run(self, step: int | None = None, routing: TokenRouting | None = None) -> Any:
        """Prediction, and the gradient of each parameter."""
        self.model.zero_grad()

        def both() -> torch.Tensor:
            levels = torch.tensor([0.3, 0.8])
            condition = dict(self.condition)
            output = self.family.predict(self.model, self.noisy, levels, condition, 1.0)
            output.square().mean().backward()
            return output.detach()

        if routing is None or step is None:
            output = both()
        else:
            with routing.step(step):
                output = both()
        return output, {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


class InAnotherOrder(TokenRouting):
    """Passes all tokens, in another order."""

    def _kept(self, number: int, share: float, tokens: int) -> torch.Tensor:
        return torch.randperm(tokens, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("tread", [{"0..-1": 0.5}, {"0..0": 0.5, "-1..-1": 0.3}])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_token_keeps_its_position_mask_and_place(
    case: Case, tread: dict[str, float], recomputed: bool
) -> None:
    """To a transformer, the order of tokens that keep all of theirs is the same."""
    rig = Rig(case, tread=tread, gradient_checkpointing=recomputed)
    plain, gradients = rig.run()
    routed, others = rig.run(0, InAnotherOrder(rig.model, rig.spec, rig.family))
    assert torch.allclose(routed, plain, atol=1e-5, rtol=1e-4)
    assert others.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert torch.allclose(others[name], gradient, atol=1e-5 * largest, rtol=1e-3), name


def test_tokens_that_skip_blocks_come_back_as_they_were(case: Case) -> None:
    rig = Rig(case, tread={"0..-1": 0.5})
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    place = rig.family.TOKENS.output if rig.family.TOKENS else 0
    rig.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: before.append([*args, *kwargs.values()][0].detach()),
        with_kwargs=True,
    )
    routing = TokenRouting(rig.model, rig.spec, rig.family)
    rig.blocks[-1].register_forward_hook(
        lambda _, __, out: after.append(out[place] if isinstance(out, tuple) else out)
    )
    plain, _ = rig.run(None, routing)
    first, _ = rig.run(0, routing)
    again, _ = rig.run(0, routing)
    other, _ = rig.run(1, routing)
    assert first.equal(again)
    assert not first.equal(other)
    assert not first.equal(plain)
    layout = rig.family.TOKENS
    assert layout is not None
    stayed = []
    for old, new in zip(before, after, strict=True):
        sides = sorted((old, new), key=lambda side: side.shape[1])
        count = sides[0].shape[1]
        ours = slice(-count, None) if layout.text_first else slice(count)
        stayed.append((sides[0] == sides[1][:, ours]).all(-1))
    assert not stayed[0].any(), "all tokens pass through outside of a step"
    for same in stayed[1:]:
        rows = same.sum(1)
        tokens = rig.family.tokens_of(*rig.noisy.shape[-2:])
        assert (rows == rows[0]).all()
        assert abs(int(rows[0]) - tokens / 2) <= 16
    assert stayed[1].equal(stayed[2])
    assert not stayed[1].equal(stayed[3])
    assert stayed[1][0].equal(stayed[1][1]), "one draw for a step"


def test_blocks_that_change_nothing_can_be_skipped(case: Case) -> None:
    """And outside of a step, or with a share of 0, nothing is routed: bit for bit."""
    rig = Rig(case, tread={"0..-1": 0.5})
    layout = rig.family.TOKENS
    assert layout is not None
    untouched, gradients = rig.run()
    assert rig.run(0, TokenRouting(rig.model, case.spec(tread={"0..-1": 0}), rig.family))[0].equal(
        untouched
    )
    routing = TokenRouting(rig.model, rig.spec, rig.family)
    plain, others = rig.run(None, routing)
    assert plain.equal(untouched)
    assert all(others[name].equal(gradient) for name, gradient in gradients.items())
    for block in rig.blocks:

        def unchanged(block: Any, args: Any, kwargs: Any, output: Any) -> Any:
            stream, *_ = given = [*args, *kwargs.values()]
            if not isinstance(output, tuple):
                return stream + 0
            both = (stream, given[1])
            return both if layout.output == 0 else both[::-1]

        block.register_forward_hook(unchanged, with_kwargs=True, prepend=True)
    without, gradients = rig.run()
    routed, others = rig.run(0, routing)
    assert not without.equal(untouched)
    assert routed.equal(without)
    for name, gradient in gradients.items():
        assert torch.allclose(others[name], gradient, atol=1e-7, rtol=1e-4), name


def test_the_config_counts_the_blocks(case: Case) -> None:
    """So that a range that the model does not have is refused before the job starts."""
    rig = Rig(case)
    assert sum(rig.model.config[name] for name in case.facts.routed_blocks.values()) == len(
        rig.blocks
    )
    last = {f"{len(rig.blocks)}..-1": 0.5}
    with pytest.raises(UserError, match=f"is no range of the model's {len(rig.blocks)} blocks"):
        check_config(case.spec(tread=last), rig.model.config)


def test_each_family_has_blocks_for_it_or_a_reason() -> None:
    documented = (ROOT / "docs/training.md").read_text()
    for name, facts in FAMILIES.items():
        layout = families.load(name).TOKENS
        assert bool(facts.routed_blocks) is (layout is not None) is (not facts.not_routed), name
        assert not facts.not_routed or f"| {facts.not_routed} |" in documented
