"""Every family trains on what its stock pipeline samples with."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from engine import families
from engine.data.read.images import decode
from engine.diffusion.objective import build_objective
from engine.exports.lora import _folded, _named
from engine.exports.recipe import Recipe
from engine.families.shared.collate import mask_of
from engine.families.shared.references import SOUND, SOUND_NOISE, split_joint
from engine.memory.tracing.model import build, shape_of
from engine.memory.tracing.trace import batch_of as mini_batch_of
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters import lora
from engine.model.adapters.lora_file import begin_from
from engine.model.adapters.training_adapter import read_training_adapter
from engine.model.files import weights
from engine.model.kernels import choose_attention
from engine.model.precision import narrow_inputs
from engine.sample.sampler import Forwards
from engine.toy.components.weights import one_thread
from jobs.errors import UserError
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.value_types import TimestepSampling
from tests.support.engine.exports import export_alone
from tests.support.engine.families import (
    CONDITIONED,
    DEVICE,
    NEGATIVE,
    PROMPT,
    Case,
    Spied,
    batch_of,
    cases,
    chosen,
    shrink_pipelines,
    toys_root,
)
from tests.support.engine.levels import assert_levels_are_quantiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MASKED = {
    "chroma",
    "flux3",
    "hunyuanvideo",
    "hunyuanvideo15",
    "ideogram4",
    "krea2",
    "ltxvideo",
    "lumina2",
    "minimax_h3",
    "pixart_sigma",
    "qwen_image",
    "sana",
    "z_image",
}
# Its pipeline sets what is masked to zero, and the model was trained to attend to those zeros.
ATTENDS_TO_PADDING = {"auraflow"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), pytest.MonkeyPatch.context() as patched:
        shrink_pipelines(patched.setattr)
        yield


@pytest.fixture(scope="module", params=chosen(cases()))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


@torch.no_grad()
def test_a_prediction_is_what_the_pipelines_scheduler_gets(case: Case) -> None:
    # Not a square, on which width and height may be mistaken for each other.
    request = case.request(resolution=f"{case.side * 3 // 2}x{case.side}", num_frames=case.frames)
    spied = Spied(case, request)
    assert len(spied.seen) * case.family.forwards_per_step(request) == (
        case.family.forwards_of(request)
    )
    condition = batch_of(case.encoded(PROMPT))
    denoiser = getattr(spied.pipeline, case.family.component)
    low, high = case.family.sigma_range()
    whole = (low, high) == (0.0, 1.0)
    own = [entry for entry in spied.seen if whole or low <= entry[1] < high]
    assert own
    # Between latents and noise that are equal, all levels are.
    heard = [{SOUND: sound, SOUND_NOISE: sound} for sound in spied.sounds] or [{}] * len(own)
    for (noisy, level, expected), sound in zip(own, heard, strict=True):
        texts = condition | sound
        found = case.family.predict(denoiser, noisy, level, texts, request.guidance)
        if sound:
            found, _ = split_joint(found, noisy.shape)
        assert found.shape == noisy.shape
        assert expected.std() > 0.01, "the toy says something"
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_a_batch_is_its_samples(case: Case) -> None:
    """Levels are each sample's own, and texts of other lengths do not matter."""
    denoiser = getattr(case.stock(), case.family.component)
    shape = case.family.encode_pictures(*vae_and_pixels(case)).shape[1:]
    noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    levels = torch.tensor([0.3, 0.8])
    if case.family.facts.objective == "denoising":
        levels = torch.tensor([300, 800])
    texts = [case.encoded(PROMPT), case.encoded("a star")]
    together = case.family.predict(denoiser, noisy, levels, batch_of(*texts), 2.0)
    for number, text in enumerate(texts):
        part = slice(number, number + 1)
        alone = case.family.predict(denoiser, noisy[part], levels[part], batch_of(text), 2.0)
        limit = 1e-5 * float(alone.abs().max())
        assert torch.allclose(together[part], alone, rtol=1e-4, atol=limit)
    assert not torch.allclose(together[:1], together[1:], atol=1e-2)


@pytest.mark.parametrize("how", get_args(TimestepSampling))
def test_levels_of_its_validation_loss_are_quantiles_of_what_it_trains_on(
    case: Case, how: str
) -> None:
    objective = build_objective(case.spec(timestep_sampling=how), case.family, case.paths.model)
    frames = (3,) if case.facts.frame_step else ()
    assert_levels_are_quantiles(objective, torch.zeros(1, 1, *frames, 16, 24), draws=2000)


@torch.no_grad()
def test_its_attention_is_masked_as_its_facts_say(case: Case) -> None:
    """By diffusers, which refuses flash attention with a mask."""
    denoiser = getattr(case.stock(), case.family.component)
    kind = case.facts.attention
    spec = JobSpec(attention_backend="flash")
    if kind == "fixed":
        with pytest.raises(UserError, match="does not support choosing a kernel"):
            choose_attention(denoiser, spec)
        return
    choose_attention(denoiser, spec)
    shape = case.family.encode_pictures(*vae_and_pixels(case)).shape[1:]
    short, long = case.encoded("a star"), case.encoded(PROMPT * 8)
    for texts, masked in (([short], False), ([short, long], kind != "unmasked")):
        noisy, levels = torch.randn(len(texts), *shape), torch.full((len(texts),), 0.5)
        condition = case.family.arrange(batch_of(*texts))
        expected = pytest.raises(ValueError, match="mask") if masked else nullcontext()
        with expected:
            case.family.predict(denoiser, noisy, levels, condition, 2.0)


@torch.no_grad()
def test_what_is_masked_changes_nothing(case: Case) -> None:
    """Also where a sample's own text has padding, and where a batch adds it."""
    texts = batch_of(case.encoded(PROMPT), case.encoded("a star"))
    masks = [name for name in texts if "mask" in name]
    assert bool(masks) == (case.family.facts.name in MASKED | ATTENDS_TO_PADDING)
    if not masks:
        pytest.skip("its texts have no mask")
    other = dict(texts)
    for name, text in texts.items():
        if text.dim() > 2:
            hidden = ~texts[mask_of(name, texts) or ""].bool()
            assert hidden.any()
            hidden = hidden.view(*hidden.shape, *[1] * (text.dim() - 2))
            noise = torch.randn(text.shape, generator=torch.Generator().manual_seed(4))
            other[name] = torch.where(hidden, text.std() * noise, text)
    denoiser = getattr(case.stock(), case.family.component)
    shape = case.family.encode_pictures(*vae_and_pixels(case)).shape[1:]
    noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    levels = torch.tensor([0.3, 0.8])
    if case.family.facts.objective == "denoising":
        levels = torch.tensor([300, 800])
    plain, found = (
        case.family.predict(denoiser, noisy, levels, condition, 2.0) for condition in (texts, other)
    )
    arranged = case.family.predict(denoiser, noisy, levels, case.family.arrange(other), 2.0)
    limit = 1e-6 * float(plain.abs().max())
    same = case.family.facts.name not in ATTENDS_TO_PADDING
    assert torch.allclose(found, plain, rtol=1e-5, atol=limit) is same
    assert torch.allclose(arranged, plain, rtol=1e-4, atol=10 * limit) is same


def test_recomputed_activations_are_those_of_the_pipeline(case: Case) -> None:
    """Training mode, with activation checkpointing, says and learns what evaluation would.

    Neither policy knows a family: every other layout has the one.
    """
    policy = ("full", "selective")[cases().index(case.name) % 2]
    denoiser = getattr(case.stock(), case.family.component)
    shape = case.family.encode_pictures(*vae_and_pixels(case)).shape[1:]
    noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    levels = torch.tensor([0.3, 0.8])
    if case.family.facts.objective == "denoising":
        levels = torch.tensor([300, 800])
    texts = batch_of(case.encoded(PROMPT), case.encoded("a star"))
    found = []
    for checkpointed in (False, True):
        denoiser.train(checkpointed).requires_grad_(True).zero_grad()
        if checkpointed:
            spec = case.spec(gradient_checkpointing=True, gradient_checkpointing_policy=policy)
            checkpoint_activations(denoiser, spec)
        velocity = case.family.predict(denoiser, noisy, levels, texts, 2.0)
        velocity.square().mean().backward()
        gradients = {n: p.grad for n, p in denoiser.named_parameters() if p.grad is not None}
        found.append((velocity.detach(), gradients))
    (plain, wanted), (again, got) = found
    assert torch.allclose(again, plain, rtol=1e-4, atol=1e-6)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        limit = 1e-5 * float(gradient.abs().max()) + 1e-9
        assert torch.allclose(got[name], gradient, rtol=1e-4, atol=limit), name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*cases(), *CONDITIONED} - {"flux:control"}))  # LoRA only
def test_all_that_is_trained_has_a_gradient(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And nothing else has: FSDP2 trains what one process leaves alone, unless it is frozen."""
    case = Case(name, toys_root(tmp_path_factory))
    for heard in {False, case.facts.sound}:
        full, lora_alone = (
            after_backward(case, model_type=kind, train_audio=heard, lora_rank=2)
            for kind in ("full", "lora")
        )
        frozen = {n for n, p in full.named_parameters() if not p.requires_grad}
        without = {n for n, p in full.named_parameters() if p.grad is None}
        # Of what has no tokens, gradients are zero.
        nothing = {n for n, p in full.named_parameters() if p.grad is not None and not p.grad.any()}
        assert without <= frozen <= without | nothing
        adapter = lora.lora_parameters(lora_alone)
        assert adapter
        assert all(parameter.requires_grad for parameter in adapter.values())
        assert not [name for name, parameter in adapter.items() if parameter.grad is None]


def after_backward(case: Case, **changes: Any) -> torch.nn.Module:
    """A job's model with random weights, after a backward to all that may have a gradient."""
    shape = shape_of(case.spec(**changes), sharded=False)
    built = build(shape)
    trained = {n for n, p in built.model.named_parameters() if p.requires_grad}
    model = built.model.to_empty(device=DEVICE).requires_grad_(True).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = mini_batch_of(built, shape, 2, values)
    level = torch.full((2,), 0.5 if case.facts.objective == "flow" else 300)
    found = case.family.predict(model, batch.latents, level, batch.condition, 2.0)
    found.square().mean().backward()
    for name, parameter in model.named_parameters():
        if name not in trained:  # keeps its gradient, unless it is whole
            parameter.requires_grad_(False)
    return model


def values(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, or masks that mask nothing."""
    return torch.randn(size).to(dtype) if dtype.is_floating_point else torch.ones(size, dtype=dtype)


def test_a_lora_in_bf16_is_trained_without_autocast(case: Case) -> None:
    """What autocast would make of it, and in bf16: nothing was computed in fp32 by mistake."""
    spec = case.spec(mixed_precision="bf16", lora_rank=4)
    transformer_class, root = case.family.transformer_class(), case.paths.model
    denoiser, stored = weights.build_on_meta(transformer_class, root / case.family.component, spec)
    lora.add_lora(denoiser, spec, case.family.LORA_TARGETS)
    weights.materialise(denoiser, DEVICE)
    weights.stream(denoiser, stored, names=lora.adapted_name(denoiser).__getitem__)
    lora.initialise(denoiser, spec.seed)
    with torch.no_grad():
        for name, parameter in lora.lora_parameters(denoiser).items():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    narrow_inputs(denoiser.train(), torch.bfloat16)
    shape = case.family.encode_pictures(*vae_and_pixels(case)).shape[1:]
    noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))
    levels = torch.tensor([0.3, 0.8])
    if case.family.facts.objective == "denoising":
        levels = torch.tensor([300, 800])
    texts = case.family.arrange(batch_of(case.encoded(PROMPT), case.encoded("a star")))
    texts = {n: t.bfloat16() if t.is_floating_point() else t for n, t in texts.items()}
    found = []
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        denoiser.zero_grad()
        with context:
            said = case.family.predict(denoiser, noisy, levels, texts, 2.0)
        said.float().square().mean().backward()
        parts = [p.grad for p in denoiser.parameters() if p.grad is not None]
        found.append((said.detach(), torch.cat([part.flatten() for part in parts])))
    (alone, learned), (cast, wanted) = found
    exact = "proj_out" in (getattr(denoiser, "_keep_in_fp32_modules", None) or ())
    assert alone.dtype is (torch.float32 if exact else torch.bfloat16)
    assert (alone.float() - cast.float()).norm() < 0.02 * cast.float().norm()
    assert (learned - wanted).norm() < 0.05 * wanted.norm()


def vae_and_pixels(case: Case) -> tuple[Any, torch.Tensor]:
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    content = next(case.paths.data.glob("*.png")).read_bytes()
    picture = decode(content).resize((case.side, case.side))
    pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32)).permute(2, 0, 1)[None]
    pixels = pixels / 127.5 - 1
    return vae, pixels[:, :, None] if case.family.facts.frame_step else pixels


@torch.no_grad()
def test_latents_are_of_unit_size_and_decode_to_what_the_vae_makes(case: Case) -> None:
    vae, pixels = vae_and_pixels(case)
    latents = case.family.encode_pictures(vae, pixels)
    assert latents.shape[-1] == latents.shape[-2]
    assert abs(float(latents.mean())) < 1
    assert 0.3 < float(latents.std()) < 3
    back = case.family.denormalise(vae, latents)
    again = case.family.normalise(vae, back)
    assert torch.allclose(again, latents, atol=1e-4)


def test_the_pipelines_pictures_are_decoded_as_by_itself(case: Case) -> None:
    pipeline = case.stock()
    width = case.side * 3 // 2
    request = case.request(resolution=f"{width}x{case.side}", num_frames=case.frames)
    latents = case.run(pipeline, request, output_type="latent")
    with torch.no_grad():
        ours = case.family.decode(pipeline, latents, request)
    stock = case.run(pipeline, request, output_type="pil")[0]
    stock = stock if isinstance(stock, list) else [stock]
    assert len(ours) == len(stock) == request.frames
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.size == theirs.size == (width, case.side)
        assert np.abs(np.asarray(mine, int) - np.asarray(theirs, int)).max() <= 1


@pytest.mark.parametrize("guided", [False, True])
def test_encoded_prompts_make_the_same_latents_as_texts(case: Case, guided: bool) -> None:
    """Also as many forwards as were planned for, with and without a negative prompt."""
    changes: dict[str, Any] = {"num_frames": case.frames, "seed": 5}
    if guided:
        changes |= {"guidance": 3.0, "true_cfg_scale": 3.0, "negative_prompt": NEGATIVE}
    request = case.request(**changes)
    if request.guided is not guided:
        pytest.skip("it has no classifier-free guidance")
    pipeline = case.stock()
    expected = case.run(pipeline, request, output_type="latent")
    negative = case.encoded(NEGATIVE, negative=True) if guided else None
    arguments = case.family.sample_arguments(request, case.encoded(PROMPT), negative)
    bare = case.family.sampling_pipeline(
        case.paths.model, getattr(pipeline, case.family.component), pipeline.vae
    )
    bare.set_progress_bar_config(disable=True)
    names = (case.family.component, case.family.second_denoiser)
    denoisers = [getattr(bare, name) for name in names if name]
    with torch.no_grad(), Forwards(denoisers, lambda: None) as forwards:
        found = bare(
            **arguments,
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            output_type="latent",
            generator=torch.Generator("cpu").manual_seed(request.seed),
        )[0]
    assert forwards.made == case.family.forwards_of(request)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_job_begins_from_the_names_of_every_tool(case: Case, tmp_path: Path) -> None:
    """What an export calls its layers is found again, bit for bit; DoRA's lengths too."""
    model = getattr(case.stock(), case.family.component)
    spec = JobSpec(lora_rank=2, lora_variant="dora", mixed_precision="no")
    lora.add_lora(model, spec, case.family.LORA_TARGETS)
    parameters = lora.lora_parameters(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.uniform_(1, 2)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    layers = get_peft_model_state_dict(model, adapter_name=lora.ADAPTER)
    for style in (case.family.KOHYA, case.family.COMFYUI):
        if style is None:
            continue
        tensors = _named(style, layers)
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "a.safetensors")
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        begin_from(model, tmp_path / "a.safetensors", case.family)
        assert all(torch.equal(before[name], p) for name, p in parameters.items())


@pytest.mark.slow
def test_a_lokr_is_exported_and_read_by_stock_code_and_by_another_job(
    case: Case, tmp_path: Path
) -> None:
    """Diffusers or peft loads it, or the export fails; what it changes comes back."""
    spec = case.spec(lora_rank=1, lora_alpha=3, export_formats=None)
    spec = spec.model_copy(update={"lora_variant": "lokr"})
    model = getattr(case.stock(), case.family.component)
    unused = case.family.without_gradient(model, spec)
    lora.add_lora(model, spec, case.family.lora_targets(spec), unused)
    parameters = lora.lora_parameters(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.uniform_(1, 2)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    recipe = Recipe(spec, case.family, case.paths.model, 4, ema=False, dtype="auto", formats=None)
    made = export_alone(model, recipe, tmp_path / "export")
    files = sorted(made.path.glob("*.safetensors"))
    fused = case.facts.name in ("hunyuanvideo", "hunyuanvideo15", "minimax_h3", "ideogram4")
    assert len(files) == 2 - (fused or case.facts.name == "sana")
    assert bool(made.warnings) == fused
    for file in files:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        begin_from(model, file, case.family)
        for name, parameter in parameters.items():
            assert torch.allclose(before[name], parameter, rtol=1e-6), (file.name, name)


@pytest.mark.slow
def test_a_training_adapter_is_read_by_the_names_of_every_tool(case: Case, tmp_path: Path) -> None:
    """Though other tools have no names for some of the model's linear layers."""
    model = getattr(case.stock(), case.family.component)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    spec = JobSpec(lora_rank=2, lora_alpha=3, mixed_precision="no")
    lora.add_lora(model, spec, case.family.LORA_TARGETS)
    lora.initialise(model, 1)
    for number, parameter in enumerate(lora.lora_parameters(model).values()):
        with torch.no_grad():
            parameter.uniform_(1, 2, generator=torch.Generator().manual_seed(number))
    layers = get_peft_model_state_dict(model, adapter_name=lora.ADAPTER)
    scales = lora.scales_of(model)
    folded = _folded(layers, scales)
    for style in (case.family.KOHYA, case.family.COMFYUI):
        if style is None:
            continue
        tensors = _named(style, folded)
        file = tmp_path / "a.safetensors"
        save_file({n: t.contiguous() for n, t in tensors.items()}, file)
        products = dict(read_training_adapter(file, linears, case.family))
        assert products.keys() == scales.keys()
        for name, (down, up) in products.items():
            product = layers[f"{name}.lora_B.weight"] @ layers[f"{name}.lora_A.weight"]
            assert torch.allclose(up @ down, scales[name] * product, rtol=1e-5), name


@pytest.mark.parametrize("name", [name for name, facts in FAMILIES.items() if facts.sound])
def test_a_lora_gets_more_layers_for_sound_where_sound_has_layers(name: str) -> None:
    family = families.load(name)
    silent = JobSpec(pretrained_model_name_or_path="m", dataset="d", model_family=name)
    heard = silent.model_copy(update={"train_audio": True})
    more = family.lora_targets(silent) != family.lora_targets(heard)
    assert more == family.facts.sound_layers
