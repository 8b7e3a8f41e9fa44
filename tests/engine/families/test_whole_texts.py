"""HunyuanVideo and 1.5 without masks, and with narrow ones, compute what diffusers' masks do."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from diffusers import attention_backend
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15AttnProcessor2_0,
)
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode

from engine.families.shared.hunyuanvideo15_forward import KeyMaskAttention, use_key_masks
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters.lora import add_lora, lora_parameters
from engine.model.compiled import compile_blocks
from engine.toy.components.weights import one_thread
from tests.support.engine.families import PROMPT, Case, batch_of, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SHORT: Final = "a star"
SIGN: Final = 'a red sign with "OPEN" on it'
# Texts of one length, and of several; of 1.5, with and without something in quotes.
WHOLE: Final = ((PROMPT,), (SHORT, SHORT), (SIGN, SIGN))
PADDED: Final = ((PROMPT, SHORT), (SIGN, SHORT), (SIGN, PROMPT, SHORT))
FAMILIES: Final = ("hunyuanvideo", "hunyuanvideo15")
GUIDANCE: Final = 3.0


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


def load(case: Case) -> Any:
    with quiet():
        return case.family.transformer_class().from_pretrained(
            case.paths.model, subfolder="transformer"
        )


def draw(case: Case, prompts: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Noisy latents, which want a gradient, levels, and collated prompts."""
    generator = torch.Generator().manual_seed(len(prompts))
    noisy = torch.randn(len(prompts), 16, 2, 4, 4, generator=generator).requires_grad_()
    levels = torch.linspace(0.3, 0.8, len(prompts))
    return noisy, levels, batch_of(*map(case.encoded, prompts))


def stock(case: Case, model: Any, noisy: torch.Tensor, level: torch.Tensor, texts: Any) -> Any:
    """Diffusers' own forward, with all its masks."""
    given = {"timestep": level * 1000, "encoder_hidden_states": texts["prompt_embeds"]}
    if case.name == "hunyuanvideo":
        return model(
            hidden_states=noisy,
            encoder_attention_mask=texts["prompt_attention_mask"],
            pooled_projections=texts["pooled_prompt_embeds"],
            guidance=torch.full_like(level, GUIDANCE) * 1000,
            return_dict=False,
            **given,
        )[0]
    first_frame = torch.zeros(len(noisy), 17, *noisy.shape[2:])
    return model(
        hidden_states=torch.cat([noisy, first_frame], dim=1),
        encoder_attention_mask=texts["prompt_embeds_mask"],
        encoder_hidden_states_2=texts["prompt_embeds_2"],
        encoder_attention_mask_2=texts["prompt_embeds_mask_2"],
        image_embeds=torch.zeros(len(noisy), 9, 32),
        return_dict=False,
        **given,
    )[0]


def ours(case: Case, model: Any, noisy: torch.Tensor, level: torch.Tensor, texts: Any) -> Any:
    """The forward as training makes it."""
    return case.family.predict(model, noisy, level, case.family.arrange(texts), GUIDANCE)


def learnt(velocity: torch.Tensor, model: Any, noisy: torch.Tensor) -> dict[str, torch.Tensor]:
    """A prediction, and the gradients of what it was made of and with."""
    velocity.square().mean().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert noisy.grad is not None
    return found | {"": velocity.detach(), "noisy": noisy.grad}


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Parameters that the one has no use for have zeros for gradients in the other."""
    assert len(wanted) > 20
    for name in found.keys() | wanted.keys():
        mine, theirs = found.get(name), wanted.get(name)
        if mine is None or theirs is None:
            assert not (theirs if mine is None else mine).any(), name  # type: ignore[union-attr]
            continue
        limit = 1e-6 * max(1.0, float(theirs.abs().max()))
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=limit), name


def masked(case: Case, prompts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What diffusers' model learns."""
    model, (noisy, *others) = load(case).train(), draw(case, prompts)
    return learnt(stock(case, model, noisy, *others), model, noisy)


def unmasked(case: Case, model: Any, prompts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What the same model learns here."""
    noisy, *others = draw(case, prompts)
    model.train().zero_grad()
    return learnt(ours(case, model, noisy, *others), model, noisy)


@pytest.mark.parametrize("prompts", [*WHOLE, *PADDED])
def test_a_forward_and_its_gradients_are_those_of_diffusers(
    case: Case, prompts: tuple[str, ...]
) -> None:
    assert_equal(unmasked(case, load(case), prompts), masked(case, prompts))


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("prompts", [WHOLE[0], PADDED[1]])
def test_what_is_recomputed_is_the_same(case: Case, prompts: tuple[str, ...], policy: str) -> None:
    model = load(case)
    spec = case.spec(gradient_checkpointing=True, gradient_checkpointing_policy=policy)
    checkpoint_activations(model, spec)
    assert_equal(unmasked(case, model, prompts), masked(case, prompts))


def test_what_is_recomputed_after_another_forward_is_the_same(case: Case) -> None:
    """Whether there is a mask is decided in the forward, and kept for its backward."""
    model = load(case).train()
    checkpoint_activations(model, case.spec(gradient_checkpointing=True))
    noisy, *others = draw(case, WHOLE[0])
    velocity = ours(case, model, noisy, *others)
    with torch.no_grad():
        ours(case, model, *draw(case, PADDED[0]))
    assert_equal(learnt(velocity, model, noisy), masked(case, WHOLE[0]))


@pytest.mark.slow
def test_compiled_blocks_take_masks_and_none(case: Case) -> None:
    """Dynamo is what decides by a mask; `test_compiled.py` has Inductor compute the same."""
    model = load(case)
    compile_blocks(model, case.spec(torch_compile=True, torch_compile_backend="eager"))
    for prompts in (WHOLE[0], PADDED[0], WHOLE[1]):
        assert_equal(unmasked(case, model, prompts), masked(case, prompts))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_blocks_are_outside_of_what_is_intercepted(case: Case) -> None:
    """In the first forward, which compiles them, and in the next."""
    modes: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            modes.append(torch._C._len_torch_function_stack())
            return graph(*inputs)

        return run

    model = load(case)
    model.compile_repeated_blocks(backend=backend)
    for _ in range(2):
        modes.clear()
        ours(case, model, *draw(case, WHOLE[0]))
        assert len(modes) > 2
        assert set(modes) == {0}


@pytest.mark.parametrize("prompts", [WHOLE[0], PADDED[1]])
def test_a_lora_learns_the_same(case: Case, prompts: tuple[str, ...]) -> None:
    found = []
    for forward in (ours, stock):
        model, (noisy, *others) = load(case).requires_grad_(False).train(), draw(case, prompts)
        add_lora(model, case.spec(lora_rank=4), case.family.LORA_TARGETS)
        drawn = torch.Generator().manual_seed(1)
        for parameter in lora_parameters(model).values():
            torch.nn.init.normal_(parameter, std=0.1, generator=drawn)
        found.append(learnt(forward(case, model, noisy, *others), model, noisy))
    assert_equal(*found)


def test_shards_learn_the_same(case: Case, tmp_path: Path) -> None:
    """FSDP2's hooks are on the blocks whose forward ends what is intercepted."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        model = load(case)
        for name in ("transformer_blocks", "single_transformer_blocks"):
            for block in getattr(model, name, ()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for prompts in (WHOLE[0], PADDED[1]):
            found = unmasked(case, model, prompts)
            whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in found.items()}
            assert_equal(whole, masked(case, prompts))
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def test_nothing_of_it_stays_in_a_model(case: Case) -> None:
    """Its tensors are called as before, a copy computes the same, diffusers' forward is its own."""
    model, (noisy, *others) = load(case), draw(case, WHOLE[0])
    before, hooks = list(model.state_dict()), _hooks(model)
    found = ours(case, model, noisy, *others)
    assert list(model.state_dict()) == before
    assert _hooks(model) == hooks
    again = ours(case, copy.deepcopy(model), noisy, *others)
    assert torch.allclose(found, again, rtol=1e-5, atol=1e-6)
    for prompts in (WHOLE[0], PADDED[0]):
        given = draw(case, prompts)
        assert torch.allclose(
            stock(case, model, *given), stock(case, load(case), *given), rtol=1e-5, atol=1e-6
        )


def _hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_forward_that_fails_leaves_nothing_behind(case: Case) -> None:
    model, (noisy, level, texts) = load(case), draw(case, WHOLE[0])
    hooks = _hooks(model)
    broken = model.transformer_blocks[0].register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="broken"):
        ours(case, model, noisy, level, texts)
    broken.remove()
    assert _hooks(model) == hooks
    seen = torch.ones(1, 2, 3, dtype=torch.bool)
    assert seen.unsqueeze(1) is not None, "functions are torch's own again"


def _fail(*_: Any) -> None:
    raise RuntimeError("broken")


@torch.no_grad()
@pytest.mark.parametrize("guided", [False, True])
def test_samples_are_those_of_the_stock_pipeline_given_masks(case: Case, guided: bool) -> None:
    changes: dict[str, Any] = {"prompt": SIGN, "num_frames": 5, "seed": 2}
    if guided:
        changes |= {"guidance": GUIDANCE, "true_cfg_scale": 3.0, "negative_prompt": SHORT}
    else:
        changes |= {"guidance": 1.0}
    request = case.request(**changes)
    texts = {"": case.encoded(SIGN)} | ({"negative_": case.encoded(SHORT)} if guided else {})
    names = {f"{kind}{n}": t.unsqueeze(0) for kind, own in texts.items() for n, t in own.items()}
    negative = texts.get("negative_")
    given = case.family.sample_arguments(request, texts[""], negative)
    assert not any("mask" in name for name in given)
    found = []
    for arguments in (given, given | names):
        parts = case.stock()
        model = parts.transformer
        pipeline = case.family.sampling_pipeline(case.paths.model, model, parts.vae)
        pipeline.set_progress_bar_config(disable=True)
        with _Masks(model) as masks:
            found.append(
                pipeline(
                    **arguments,
                    width=64,
                    height=64,
                    num_inference_steps=2,
                    output_type="latent",
                    generator=torch.Generator().manual_seed(2),
                )[0]
            )
        assert bool(masks.seen) is (arguments is not given)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_prompt_that_is_given_as_text_keeps_its_mask(case: Case) -> None:
    """The pipeline fills it up; so it does a negative prompt beside an encoded one."""
    parts = case.stock()
    model = parts.transformer
    pipeline = case.family.sampling_pipeline(case.paths.model, model, parts.vae, **_encoders(parts))
    pipeline.set_progress_bar_config(disable=True)
    given = {name: text.unsqueeze(0) for name, text in case.encoded(SHORT).items()}
    given = {name: text for name, text in given.items() if "mask" not in name}
    scale = "true_cfg_scale" if case.name == "hunyuanvideo" else "guidance_scale"
    how = {"num_frames": 1, "width": 64, "height": 64, "num_inference_steps": 1}
    how |= {"output_type": "latent", scale: 3.0}
    for words, names in (((), given), ((), {"prompt": SHORT}), ((SHORT,), {})):
        with _Masks(model) as masks:
            pipeline(*words, **names, negative_prompt=PROMPT, **how)
        assert masks.seen


def _encoders(pipeline: Any) -> dict[str, Any]:
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return {name: getattr(pipeline, name) for name in names}


class _Masks(TorchFunctionMode):
    """Collects the masks of a denoiser's attention.

    Args:
        model: The denoiser; encoders have masks of their own.

    Attributes:
        seen: Their shapes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model, self._within = model, False
        self.seen: list[torch.Size] = []

    def __enter__(self) -> _Masks:
        def within(*_: Any) -> None:
            self._within = not self._within

        self._hooks = [
            self._model.register_forward_pre_hook(within),
            self._model.register_forward_hook(within),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and self._within:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None:
                self.seen.append(mask.shape)
        return func(*args, **kwargs)


def joint_masks(case: Case, model: Any, forward: Any, prompts: tuple[str, ...]) -> list[torch.Size]:
    """The masks of attention over more than a text."""
    given = draw(case, prompts)
    with torch.no_grad(), _Masks(model) as masks:
        forward(case, model, *given)
    return [shape for shape in masks.seen if shape[-1] > given[2]["prompt_embeds"].shape[1]]


def test_a_mask_of_a_batch_is_as_wide_as_its_tokens(case: Case) -> None:
    """Of tokens times tokens, one is 2.5 GB for a video of 1.5."""
    model = load(case)
    found = joint_masks(case, model, ours, PADDED[0])
    blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]
    assert len(found) == len(blocks)
    assert {shape[-2] for shape in found} == {1}


def test_diffusers_masks_texts_without_padding_still(case: Case) -> None:
    """Once it does not, what leaves masks out here can go (docs/upstream.md)."""
    found = joint_masks(case, load(case), stock, WHOLE[1])
    assert found, "attention of all tokens has a mask"
    assert {shape[-2] > 1 for shape in found} == {case.name == "hunyuanvideo15"}


def test_the_kernel_that_was_chosen_stays(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load(Case("hunyuanvideo15", toys_root(tmp_path_factory)))
    for name in ("_native_math", "native"):
        with attention_backend(name):
            model.set_attention_backend(name)
        use_key_masks(model)
        processors = [block.attn.processor for block in model.transformer_blocks]
        assert {type(processor) for processor in processors} == {KeyMaskAttention}
        assert {vars(processor)["_attention_backend"].value for processor in processors} == {name}
    assert not isinstance(processors[0], HunyuanVideo15AttnProcessor2_0)
