"""Which attention gets a mask: where texts of a batch differ in length, and nowhere else.

That is decided on the host, without asking the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.families.shared import hidream_experts
from engine.families.shared.references import first_frame_of
from engine.model.kernels import choose_attention
from engine.sample.sampler import Forwards
from engine.toy.components.weights import one_thread
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.launch_conflicts import kernel_conflict
from tests.support.engine.families import (
    NEGATIVE,
    PROMPT,
    Case,
    batch_of,
    cases,
    chosen,
    shrink_pipelines,
    toys_root,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.spec.keys.prompts import SampleRequest

SHORT: Final = "a star"
LONG: Final = " ".join([PROMPT] * 5)

# Layout → in a forward of its toy with a short and a long text in the batch: calls of attention
# with a mask, and all of them. Of others none has a mask.
PADDED: Final = {
    "qwen_image": (2, 2),
    "flux3": (5, 7),  # not where the image attends to itself
    "ideogram4": (2, 2),
    "krea2": (3, 4),  # not where it fuses the layers of a token
    "z_image": (3, 4),  # not where it refines the image alone
    "chroma": (5, 5),
    "lumina2": (4, 6),  # the same
    "sana": (3, 3),
    "sana:1.6b": (3, 3),
    "pixart_sigma": (3, 6),  # cross-attention
    "ltxvideo": (2, 4),  # the same
    "ltxvideo:13b-0.9.7-dev": (2, 4),
    "hunyuanvideo": (5, 5),
    "hunyuanvideo15": (3, 3),
}

# Layout → calls with a mask that masks nothing while its pipeline makes a sample without guidance
# and one with it, in two steps each. These pipelines insist on a mask, and the masked attention is
# short: of Lumina's text with itself, of an image with Sana's text.
IN_VAIN: Final = {"lumina2": (4, 4), "sana": (6, 0), "sana:1.6b": (6, 0)}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), pytest.MonkeyPatch.context() as patched:
        shrink_pipelines(patched.setattr)
        yield


@pytest.fixture(scope="module", params=chosen(cases()))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


class Attention(TorchFunctionMode):
    """Counts calls of torch's attention while it is entered.

    Attributes:
        calls: All of them.
        masked: Those with a mask.
        in_vain: Those with a mask that masks nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.masked = self.in_vain = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            self.calls += 1
            if mask is not None:
                self.masked += 1
                self.in_vain += bool((mask if mask.dtype is torch.bool else mask == 0).all())
        return func(*args, **kwargs)


def noise_for(case: Case, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents of a toy's size, and a level for each."""
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    frames = (1,) if case.facts.frame_step else ()
    latents = case.family.encode_pictures(vae, torch.zeros(1, 3, *frames, case.side, case.side))
    noisy = torch.randn(count, *latents.shape[1:], generator=torch.Generator().manual_seed(count))
    levels = torch.linspace(0.3, 0.8, count)
    return noisy, (levels * 1000).long() if case.facts.objective == "denoising" else levels


def condition_for(
    case: Case, noisy: torch.Tensor, prompts: Sequence[str]
) -> dict[str, torch.Tensor]:
    """These prompts, and of models that take them, first frames."""
    condition = case.family.arrange(batch_of(*map(case.encoded, prompts)))
    return condition | (first_frame_of(noisy) if case.first_frame else {})


@torch.no_grad()
def attention_of(case: Case, *prompts: str) -> Attention:
    """Of a forward as training makes it, with a batch of these prompts."""
    denoiser = getattr(case.stock(), case.family.component)
    noisy, levels = noise_for(case, len(prompts))
    condition = condition_for(case, noisy, prompts)
    with Attention() as seen:
        case.family.predict(denoiser, noisy, levels, condition, 2.0)
    assert seen.calls, "it attends"
    return seen


@pytest.mark.parametrize("prompts", [(SHORT,), (LONG,), (SHORT, SHORT)])
def test_no_attention_has_a_mask_where_nothing_is_padded(
    case: Case, prompts: tuple[str, ...]
) -> None:
    """A mask rules out flash attention, whatever is in it."""
    assert attention_of(case, *prompts).masked == 0


def test_attention_has_a_mask_where_a_text_is_padded(case: Case) -> None:
    seen = attention_of(case, SHORT, LONG)
    assert (seen.masked, seen.calls) == PADDED.get(case.name, (0, seen.calls))
    assert seen.in_vain == 0


@torch.no_grad()
@pytest.mark.parametrize("prompts", [(SHORT,), (SHORT, LONG)])
def test_a_forward_reads_nothing_from_the_device(
    case: Case, prompts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without numbers go through it; HiDream reads how many tokens an expert has."""
    # Ideogram 4 turns autocast off, which torch has no notion of for a device without numbers.
    monkeypatch.setattr(torch, "autocast", lambda **_: nullcontext())
    monkeypatch.setattr(hidream_experts, "_read_later", lambda bounds: lambda: [3, 5, 5])
    denoiser = getattr(case.stock(), case.family.component).to("meta")
    noisy, levels = (tensor.to("meta") for tensor in noise_for(case, len(prompts)))
    condition = condition_for(case, noisy, prompts)
    condition = {name: text.to("meta") for name, text in condition.items()}
    velocity = case.family.predict(denoiser, noisy, levels, condition, 2.0)
    assert velocity.shape == noisy.shape


def sampling_of(case: Case, guided: bool) -> tuple[Any, SampleRequest, Callable[[], Any]]:
    """A pipeline for a toy, what it makes in two steps, and what makes that."""
    changes: dict[str, Any] = {"num_frames": case.frames, "num_inference_steps": 2}
    if guided:
        changes |= {"guidance": 3.0, "true_cfg_scale": 3.0, "negative_prompt": NEGATIVE}
    request = case.request(**changes)
    if request.guided is not guided:
        pytest.skip("it has no classifier-free guidance")
    negative = case.encoded(NEGATIVE, negative=True) if guided else None
    arguments = case.family.sample_arguments(request, case.encoded(PROMPT), negative)
    stock = case.stock()
    denoiser = getattr(stock, case.family.component)
    pipeline = case.family.sampling_pipeline(case.paths.model, denoiser, stock.vae)
    pipeline.set_progress_bar_config(disable=True)
    return (
        pipeline,
        request,
        partial(
            pipeline,
            **arguments,
            width=request.width,
            height=request.height,
            num_inference_steps=2,
            output_type="latent",
            generator=torch.Generator().manual_seed(request.seed),
        ),
    )


@torch.no_grad()
@pytest.mark.parametrize("guided", [False, True])
def test_masks_of_samples_mask_something(case: Case, guided: bool) -> None:
    _, _, make = sampling_of(case, guided)
    with Attention() as seen:
        make()
    assert seen.in_vain == IN_VAIN.get(case.name, (0, 0))[guided]
    if case.name in ("chroma", "hunyuanvideo", "hunyuanvideo15"):
        assert seen.masked == 0, "of tokens with tokens, in every block"


@torch.no_grad()
@pytest.mark.parametrize("guided", [False, True])
def test_samples_are_made_with_flash_attention_where_a_job_may_choose_it(
    case: Case, guided: bool
) -> None:
    """By diffusers, which refuses it with a mask; so are the forwards that other ranks wait for."""
    if kernel_conflict(case.facts, "flash", 1, samples=True):
        pytest.skip("a job may not choose it")
    pipeline, request, make = sampling_of(case, guided)
    names = (case.family.component, case.family.second_denoiser)
    denoisers = [getattr(pipeline, name) for name in names if name]
    for denoiser in denoisers:
        choose_attention(denoiser, JobSpec(attention_backend="flash"))
    made: list[None] = []
    own = case.family.forwards_of(request)
    with Forwards(denoisers, lambda: made.append(None), expected=own, total=own + 1) as forwards:
        make()
        forwards.check(pipeline)
    assert len(made) == own + 1
