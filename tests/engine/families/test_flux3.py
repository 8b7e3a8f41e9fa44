"""What is particular to FLUX.3: windows of text, parts that stay as published, no scheduler's file.

Its predictions were compared with those of the authors' model (`JointSingleSeq` of
black-forest-labs/flux-action, without its pooled text) on the same weights and tensors, read by
diffusers' converter: equal to 1e-6.
"""

from __future__ import annotations

import inspect
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import Flux3AutoBlocks, Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import (
    Flux3TextRoPEInputsStep,
    _prepare_image_ids,
)

from engine.families import flux3, load
from engine.parallel.block_swap import place_in_forward
from engine.toy.components.weights import one_thread
from jobs.errors import SpecError
from jobs.models.model_files import check_model
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import NEGATIVE, PROMPT, Case, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("flux3", toys_root(tmp_path_factory))


def stock(case: Case, root: Path) -> Any:
    """Diffusers' own pipeline, which encodes a prompt as it is given."""
    blocks = Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    with quiet():
        pipeline = blocks.init_pipeline(str(root))
        pipeline.update_components(tokenizer=case.text.tokenizer)
        for name in ("text_encoder", "vae", "transformer"):
            pipeline.load_components(
                name, pretrained_model_name_or_path=str(root), local_files_only=True
            )
    return pipeline


def tiny(transformer_class: Any) -> Any:
    return transformer_class(
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=1,
        axes_dims_rope=(2, 2, 2, 2),
        joint_attention_dim=8,
    )


def picture(pipeline: Any, scale: float) -> Any:
    pipeline.guider.guidance_scale = scale
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 2}
    draw = torch.Generator("cpu").manual_seed(3)
    given |= {"max_sequence_length": 64}
    (image,) = pipeline(**given, height=64, width=96, generator=draw, output="images")
    return np.asarray(image, int)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_diffusers_own_pipeline_makes_of_an_export_what_ours_makes(
    kind: str, case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = case.spec(model_type=kind, lora_rank=2)
    recipe, model = recipe_of(spec, case.paths.model), trained_model(spec, case.paths.model)
    made = export_alone(model, recipe, tmp_path / "export")
    theirs = stock(case, made.path if kind == "full" else case.paths.model)
    assert type(theirs.transformer) is Flux3Transformer2DModel
    before = picture(theirs, 3.0)
    ours = case.stock(made.path if kind == "full" else None)
    if kind == "lora":
        case.family.load_lora(ours, made.path)
        theirs.load_lora_weights(made.path, weight_name="pytorch_lora_weights.safetensors")
    request = case.request(resolution="96x64", guidance=3.0, negative_prompt=NEGATIVE, seed=3)
    capsys.readouterr()
    image = np.asarray(case.run(ours, request)[0], int)
    assert "it/s" not in capsys.readouterr().err, "bars are off"
    assert np.abs(picture(theirs, 3.0) - image).max() == 0
    assert kind == "full" or np.abs(before - image).max() > 1


@pytest.mark.slow
@torch.no_grad()
def test_a_text_fills_windows_of_80_tokens(case: Case) -> None:
    """What fills them is seen by the transformer, and not by the text encoder."""
    words = len(case.text.tokenizer.tokenizer(f"{PROMPT} " * 12)["input_ids"])
    lengths = {}
    for limit in (32, 640):
        for prompt in (PROMPT, f"{PROMPT} " * 12):
            text = case.family.encode(case.text, prompt, limit)
            assert text["prompt_embeds_mask"].all()
            lengths[limit, prompt == PROMPT] = len(text["prompt_embeds"])
    assert 80 < words < 150
    assert lengths == {(32, True): 32, (32, False): 32, (640, True): 80, (640, False): 160}
    short, long = (
        case.family.encode(case.text, PROMPT, limit)["prompt_embeds"] for limit in (64, 80)
    )
    assert torch.allclose(short[:10], long[:10], atol=1e-5)


def test_positions_are_those_of_diffusers_blocks() -> None:
    ours = flux3._image_positions(3, 5, CPU)
    assert torch.equal(ours, _prepare_image_ids(3, 5, 0.5))
    text = flux3._text_positions(7, CPU)
    assert torch.equal(text, Flux3TextRoPEInputsStep._prepare_text_ids(torch.zeros(1, 7, 1)))


def test_its_blocks_shift_where_a_model_has_no_scheduler() -> None:
    family = load("flux3")
    shifts = family.shift_of(64, 64), family.sampler_shift_of(64, 64), family.shift_of(8, 8)
    assert shifts == (6.93, 6.93, 6.93)
    scheduler = Flux3AutoBlocks().init_pipeline().scheduler
    assert (scheduler.config.shift, scheduler.config.use_dynamic_shifting) == (6.93, False)


def test_parameters_are_those_of_diffusers() -> None:
    ours, theirs = tiny(load("flux3").transformer_class()), tiny(Flux3Transformer2DModel)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert ours.config == theirs.config


@pytest.mark.slow
def test_a_distilled_model_is_refused(case: Case, tmp_path: Path) -> None:
    """It takes the time that a step leads to as well, and how it is trained is not published."""
    root = tmp_path / "model"
    shutil.copytree(case.paths.model, root)
    path = root / "modular_model_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"_class_name": "Flux3DistilledModularPipeline"}))
    with pytest.raises(SpecError, match=r"Flux3DistilledModularPipeline, not a FLUX\.3 model"):
        check_model(case.spec(pretrained_model_name_or_path=str(root)))


@torch.no_grad()
def test_its_blocks_are_sorted_into_the_order_of_forward() -> None:
    """Those that are not called come first, where nothing fetches them ahead."""
    model = tiny(load("flux3").transformer_class())
    blocks = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Block")}
    called: list[str] = []
    for name, block in blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    noisy, text = torch.zeros(1, 128, 2, 2), torch.zeros(1, 3, 8)
    condition = {"prompt_embeds": text}
    load("flux3").predict(model, noisy, torch.ones(1), condition, 1.0)
    assert sorted(blocks, key=place_in_forward) == ["mode_blocks.image_cond.0", *called]


@torch.no_grad()
def test_times_are_exact_in_bf16() -> None:
    """0.963 and 0.965 are one number in bf16."""
    model = tiny(load("flux3").transformer_class()).to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(("norm_q", "norm_k")):  # as the class wants them
            module.float()
    seen: list[torch.Tensor] = []
    model.timestep_embedder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    inputs = {
        "hidden_states": torch.zeros(2, 4, 128, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.zeros(2, 3, 8, dtype=torch.bfloat16),
        "timestep": torch.tensor([0.963, 0.965]),
        "img_ids": torch.zeros(4, 4),
        "txt_ids": torch.zeros(3, 4),
    }
    model(**inputs)
    (image, text) = seen
    assert len(model.time_proj._forward_pre_hooks) == 0
    assert not torch.equal(image[0], image[1])
    assert torch.equal(text[0], text[1])
    assert torch.equal(image, model.time_proj(inputs["timestep"] * 1000).to(torch.bfloat16))
    assert inputs["timestep"].bfloat16().unique().numel() == 1


def test_diffusers_takes_no_mask_of_texts_still() -> None:
    """Once it does, `TextMaskAttention` can go (docs/upstream.md)."""
    assert not [
        name
        for name in inspect.signature(Flux3Transformer2DModel.forward).parameters
        if "mask" in name
    ]
