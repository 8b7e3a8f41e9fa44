"""One rank: weights, adapters, the family's forward, checkpoints."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from engine.data.encode.latents import to_pixels
from engine.data.index.data_index import build_index
from engine.data.index.views import View
from engine.diffusion.random_numbers import keyed_generator
from engine.families import load
from engine.model.adapters import lora
from engine.model.files import weights
from jobs.errors import UserError
from jobs.spec.keys.prompts import requests_of
from tests.support.engine.toy_jobs import build, inputs, toy_spec

if TYPE_CHECKING:
    from pathlib import Path


flux = load("flux")


@torch.no_grad()
def test_streamed_weights_give_the_forward_of_from_pretrained(toy: Path) -> None:
    mine = build(toy, toy_spec(toy, model_type="full"))
    stock = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    assert torch.equal(flux.predict(mine, **inputs(toy)), flux.predict(stock, **inputs(toy)))


@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_a_trained_one_does(toy: Path) -> None:
    model = build(toy, toy_spec(toy))
    stock = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    before = flux.predict(stock, **inputs(toy))
    assert torch.equal(flux.predict(model, **inputs(toy)), before)
    for name, parameter in lora.lora_parameters(model).items():
        if ".lora_B." in name:
            parameter.normal_(generator=keyed_generator(2))
    assert (flux.predict(model, **inputs(toy)) - before).abs().max() > 1e-3


def test_only_the_adapter_is_trained_and_it_covers_every_linear_of_the_blocks(toy: Path) -> None:
    model = build(toy, toy_spec(toy))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(lora.lora_parameters(model))
    adapted = {name.split(".lora_A.")[0] for name in trained if ".lora_A." in name}
    linears = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and ".lora_" not in name
        and "transformer_blocks." in name
        and ".norm" not in name
    }
    assert adapted == linears


def test_adapters_are_drawn_by_name_and_seed(toy: Path) -> None:
    first, again = build(toy, toy_spec(toy)), build(toy, toy_spec(toy))
    other = build(toy, toy_spec(toy, seed=1))
    pairs = zip(
        lora.lora_parameters(first).items(),
        lora.lora_parameters(again).values(),
        lora.lora_parameters(other).values(),
        strict=True,
    )
    for (name, a), b, c in pairs:
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (".lora_B." in name)


@torch.no_grad()
def test_predict_feeds_the_transformer_what_the_pipeline_feeds_it(toy: Path) -> None:
    """At one timestep, for the same latents and embeddings, in a non-square picture."""
    pipeline = FluxPipeline.from_pretrained(toy / "model")
    transformer = pipeline.transformer
    fed: list[tuple[dict[str, Any], torch.Tensor]] = []
    stock_forward = transformer.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        out = stock_forward(*args, **kwargs)
        fed.append((kwargs, out[0]))
        return out

    transformer.forward = spy
    pipeline(
        prompt="a red circle",
        height=64,
        width=96,
        num_inference_steps=2,
        guidance_scale=2.5,
        max_sequence_length=16,
        generator=keyed_generator(0),
        output_type="latent",
    )
    transformer.forward = stock_forward
    kwargs, expected = fed[1]
    noisy = FluxPipeline._unpack_latents(kwargs["hidden_states"], 64, 96, 8)
    condition = flux.encode(pipeline, "a red circle", 16)
    velocity = flux.predict(
        transformer, noisy, kwargs["timestep"], {n: t[None] for n, t in condition.items()}, 2.5
    )
    packed = FluxPipeline._pack_latents(velocity, *velocity.shape)
    assert torch.allclose(packed, expected, atol=1e-6)


@torch.no_grad()
def test_latents_decode_to_the_picture_they_came_from(toy: Path) -> None:
    vae = flux.load_vae(toy / "model", torch.float32)
    spec = toy_spec(toy)
    first = build_index(spec).samples[0]
    pixels = to_pixels(first, View((64, 64)), spec)
    assert pixels.shape == (1, 3, 64, 64)
    assert -1 <= pixels.min() < pixels.max() <= 1
    latents = flux.encode_pictures(vae, pixels)
    assert latents.shape == (1, 16, 8, 8)
    pipeline = flux.sampling_pipeline(
        toy / "model", FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer"), vae
    )
    (request,) = requests_of(toy_spec(toy, validation_prompts=["a"]))
    packed = FluxPipeline._pack_latents(latents, 1, 16, 8, 8)
    (picture,) = flux.decode(pipeline, packed, request)
    assert picture.size == (request.width, request.height) == (64, 64)


def test_missing_and_extra_tensors_are_named(toy: Path, tmp_path: Path) -> None:
    directory = tmp_path / "transformer"
    shutil.copytree(toy / "model" / "transformer", directory)
    file = directory / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["surprise"] = tensors.pop("x_embedder.weight")
    save_file(tensors, file)
    with pytest.raises(
        UserError, match=r"missing \(x_embedder.weight.*not in the model \(surprise"
    ):
        weights.build_on_meta(FluxTransformer2DModel, directory, toy_spec(toy))


def test_a_truncated_weight_file_is_one_clear_line(toy: Path, tmp_path: Path) -> None:
    directory = tmp_path / "transformer"
    shutil.copytree(toy / "model" / "transformer", directory)
    file = directory / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"safetensors.*damaged"):
        weights.stored_tensors(directory)


def test_base_weights_are_kept_in_the_precision_that_computes(toy: Path) -> None:
    model = build(toy, toy_spec(toy, mixed_precision="bf16"))
    for name, parameter in model.named_parameters():
        kept = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype is kept, name
