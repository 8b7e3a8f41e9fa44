"""LoKr: its layer against peft's, its files under every name, and files that do not fit."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoKrConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine import families
from engine.model.activation_checkpointing import _KEPT
from engine.model.adapters.lokr_layer import LokrLinear
from engine.model.adapters.lora import add_lora, initialise, lora_parameters, scales_of
from engine.model.adapters.lora_file import begin_from
from engine.model.packing import Packing
from engine.model.quantized_linear import QuantizedLinear
from jobs.doctor.checks.disks import count_adapter
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from tests.support.engine.adapted_block import Block, X, error, fill
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path

SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"lora_rank": 1, "lora_alpha": 3}, {"r": 1, "alpha": 3}),
    ({"lora_rank": 1, "lokr_factor": 2}, {"r": 1, "alpha": 1, "decompose_factor": 2}),
    ({"lokr_full_matrix": True, "lora_alpha": 7}, {"r": 99, "alpha": 99}),
    # As in LyCORIS, and unlike in peft, alpha says nothing where the rank parts no matrix.
    ({"lora_rank": 8, "lora_alpha": 4}, {"r": 8, "alpha": 8}),
]
LINEAR = ["up", "down"]


def ours(**values: Any) -> torch.nn.Module:
    model = Block()
    spec = JobSpec(**{"lora_variant": "lokr", "mixed_precision": "no"} | values)
    add_lora(model, spec, r"up|down|conv")
    return model


def train(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, of the input too."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad} | {
        name: p.grad for name, p in lora_parameters(model).items() if p.grad is not None
    }


@pytest.mark.parametrize(("values", "theirs"), SHAPES, ids=str)
def test_it_computes_and_learns_what_pefts_does(
    values: dict[str, Any], theirs: dict[str, Any]
) -> None:
    targets = [*LINEAR, "conv"] if theirs["r"] == theirs["alpha"] else LINEAR
    model = fill(ours(lora_target_modules=targets, **values))
    assert isinstance(model.up, LokrLinear)
    reference = Block()
    config = LoKrConfig(target_modules=targets, **theirs)
    inject_adapter_in_model(config, reference.requires_grad_(False))
    mine, wanted = train(model, X), train(fill(reference), X)
    assert mine.keys() == wanted.keys()
    assert len(mine) == 2 + len(lora_parameters(model))
    for name, value in wanted.items():
        assert error(mine[name], value) < 2e-6, name


@pytest.mark.parametrize("factor", [-1, 1, 3, 8, 100])
@pytest.mark.parametrize(
    "values", [{"lora_rank": 2}, {"lora_rank": 16}, {"lokr_full_matrix": True}, {"lora_rank": 4096}]
)
def test_its_parameters_are_counted_from_the_shapes_of_the_weights(
    values: dict[str, Any], factor: int
) -> None:
    sides = [(96, 64), (64, 96), (7, 60), (60, 1), (8, 8)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*pair, bias=False) for pair in sides))
    spec = JobSpec(lora_variant="lokr", lokr_factor=factor, **values)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    add_lora(model, spec, r"\d")
    assert count_adapter(spec, shapes) == sum(p.numel() for p in lora_parameters(model).values())


@pytest.mark.parametrize("targets", [LINEAR, [*LINEAR, "conv"]])
def test_in_bf16_it_is_near_fp32_and_gradients_are_fp32(targets: list[str]) -> None:
    exact = train(fill(ours(lora_rank=2, lora_target_modules=targets)), X)
    model = fill(ours(lora_rank=2, lora_target_modules=targets, mixed_precision="bf16"))
    for name, parameter in model.named_parameters():
        if ".lokr_" not in name:
            parameter.data = parameter.data.bfloat16()
    half = train(model, X.bfloat16())
    assert half["out"].dtype is torch.bfloat16
    for name, value in exact.items():
        assert error(half[name], value) < 0.04, name
    assert all(parameter.dtype is torch.float32 for parameter in lora_parameters(model).values())


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_finds_what_was_computed(policy: str) -> None:
    model = fill(ours(lora_rank=1, lora_target_modules=LINEAR))
    plain = train(model, X)
    options: dict[str, Any] = {}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT))
    for parameter in model.parameters():
        parameter.grad = None
    inner = model.forward
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=False, **options)  # type: ignore[method-assign]
    again = train(model, X)
    for name, value in plain.items():
        assert torch.equal(again[name], value), name


def test_it_keeps_nothing_of_the_size_of_an_activation_but_its_input() -> None:
    """Nor does it ever make a matrix of the base's size."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    add_lora(model, JobSpec(lora_variant="lokr", lora_rank=2, mixed_precision="no"), "0")
    x, kept = torch.randn(1024, 64, requires_grad=True), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in kept}
    storages.pop(x.untyped_storage().data_ptr(), None)
    storages.pop(model[0].base_layer.weight.untyped_storage().data_ptr(), None)
    assert max(storages.values()) <= 64


def test_compiled_it_computes_the_same() -> None:
    model = fill(ours(lora_rank=1, lora_target_modules=LINEAR))
    plain = train(model, X)
    for parameter in model.parameters():
        parameter.grad = None
    compiled = train(torch.compile(model, backend="aot_eager", fullgraph=True), X)
    for name in ("out", "x"):
        assert error(compiled[name], plain[name]) < 1e-6, name


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_scaled", "nf4"])
def test_it_adds_to_a_packed_layer_what_it_adds_to_a_dense_one(scheme: Any) -> None:
    packing = Packing(scheme)
    dense = torch.nn.Sequential(torch.nn.Linear(64, 32))
    packed = torch.nn.Sequential(QuantizedLinear(dense[0], packing, torch.float32))
    spec = JobSpec(lora_variant="lokr", mixed_precision="no", lora_rank=2)
    torch.manual_seed(0)
    with torch.no_grad():
        weight, scale = packing.pack(torch.randn(32, 64) * 0.1)
        packed[0].weight.copy_(weight)
        if scale is not None:
            packed[0].weight_scale.copy_(scale)
        base = packed[0]
        dense[0].weight.copy_(
            packing.unpack(base.weight, base.weight_scale, base.codes, torch.float32)
        )
    for model in (packed, dense):
        add_lora(model, spec, "0")
        torch.manual_seed(1)
        for parameter in lora_parameters(model).values():
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 64)
    mine, wanted = train(packed, x), train(dense, x)
    for name, value in wanted.items():
        assert error(mine[name], value) < 1e-5, name


def test_it_begins_without_any_effect_and_can_learn() -> None:
    torch.manual_seed(0)
    model = Block()
    with torch.no_grad():
        plain = model(X)
    add_lora(model, JobSpec(lora_variant="lokr", mixed_precision="no"), r"up|down|conv")
    initialise(model, 0)
    found = train(model, X)
    assert torch.equal(found["out"], plain)
    assert any(value.any() for name, value in found.items() if ".lokr_w2" in name)


# -- files ---------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {"lora_rank": 2, "lora_alpha": 5},
    {"lora_rank": 2, "lokr_factor": 4, "lora_rank_pattern": {"to_q": 1}},
    {"lokr_full_matrix": True, "lora_alpha": 3},
]


def changes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What each adapter adds to its layer's weight."""
    return {
        name: model.get_submodule(name).get_delta_weight("default").detach()
        for name in scales_of(model)
    }


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_every_export_is_where_another_job_can_begin(
    toy: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    spec = toy_spec(toy, lora_variant="lokr", **values)
    model = trained_model(spec, toy / "model")
    expected = changes(model)
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    assert made.warnings == ()
    names = {"pytorch_lora_weights.safetensors", "t-comfyui.safetensors"}
    files = {path.name: path for path in made.path.glob("*.safetensors")}
    assert files.keys() == names
    for file in files.values():
        again = trained_model(spec, toy / "model", seed=9)
        begin_from(again, file, families.load("flux"))
        for name, value in changes(again).items():
            assert error(value, expected[name]) < 1e-6, (file.name, name)
    stock = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    stock.load_lora_adapter(made.path, weight_name="pytorch_lora_weights.safetensors")
    for name, value in expected.items():
        (adapter,) = stock.peft_config
        assert error(stock.get_submodule(name).get_delta_weight(adapter), value) < 1e-6, name


def test_comfyui_reads_lycoris_names_and_alphas(toy: Path, tmp_path: Path) -> None:
    """In its words: the product of the matrices times alpha over the rank, if one is parted.

    LyCORIS multiplies by that once while training, and twice when it merges; so it is 1.
    """
    spec = toy_spec(toy, lora_variant="lokr", lora_rank=2, lora_alpha=5)
    model = trained_model(spec, toy / "model")
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    file = made.path / "t-comfyui.safetensors"
    tensors = load_file(file)
    for name, value in changes(model).items():
        key = "lycoris_" + name.replace(".", "_")
        right, scale = tensors.get(f"{key}.lokr_w2"), 1.0
        if right is None:
            down = tensors[f"{key}.lokr_w2_b"]
            right = tensors[f"{key}.lokr_w2_a"] @ down
            scale = tensors[f"{key}.alpha"].item() / len(down)
            assert scale == 1
        assert error(scale * torch.kron(tensors[f"{key}.lokr_w1"], right), value) < 1e-6
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    assert header["ss_network_module"] == "lycoris.kohya"
    assert float(header["ss_network_alpha"]) == float(header["ss_network_dim"]) == 2
    assert json.loads(header["ss_network_args"]) == {"algo": "lokr", "factor": "-1"}


def test_kohyas_names_where_layers_are_the_same_there(toy: Path, tmp_path: Path) -> None:
    """Query, key and value are one layer there, whose change is no Kronecker product."""
    formats = ["diffusers", "kohya"]
    for targets, expected in (
        (["transformer_blocks.0.attn.to_out.0"], "lora_unet_double_blocks_0_img_attn_proj"),
        (["transformer_blocks.0.attn.to_q"], ""),
    ):
        spec = toy_spec(
            toy, lora_variant="lokr", lora_target_modules=targets, export_formats=formats
        )
        model = trained_model(spec, toy / "model")
        made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / expected / "export")
        file = made.path / "t-kohya.safetensors"
        assert file.exists() == bool(expected)
        if expected:
            assert made.warnings == ()
            assert {key.partition(".")[0] for key in load_file(file)} == {expected}
        else:
            (warning,) = made.warnings
            assert warning.startswith("no file for kohya: ")


@pytest.mark.parametrize(
    ("file_of", "job", "message"),
    [
        ({"lora_variant": "lora"}, {}, "it is a LoRA; set lora_variant: lora"),
        ({}, {"lora_variant": "lora"}, "it is a LoKr; set lora_variant: lokr"),
        ({}, {"lora_rank": 1}, "there and"),
        ({}, {"lokr_factor": 2}, "there and"),
        ({}, {"lokr_full_matrix": True}, "here; set lora_rank, lokr_factor and lokr_full_matrix"),
        ({}, {"lora_target_modules": ["to_q"]}, "and the job does not; set lora_target_modules"),
        ({"lora_target_modules": ["to_q"]}, {}, "and the job does; set lora_target_modules"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(
    toy: Path, tmp_path: Path, file_of: dict[str, Any], job: dict[str, Any], message: str
) -> None:
    common = {"lora_variant": "lokr", "lora_rank": 2}
    written = toy_spec(toy, **common | file_of)
    model = trained_model(written, toy / "model")
    made = export_alone(model, recipe_of(written, toy / "model"), tmp_path / "export")
    file = made.path / "pytorch_lora_weights.safetensors"
    with pytest.raises(UserError, match="init_lora: cannot begin from") as refused:
        begin_from(
            trained_model(toy_spec(toy, **common | job), toy / "model"),
            file,
            families.load("flux"),
        )
    assert message in str(refused.value)


def test_a_first_matrix_in_two_parts_is_read_as_one(toy: Path, tmp_path: Path) -> None:
    """LyCORIS's `decompose_both`, in a file without a header."""
    to_q = r"transformer_blocks\.0\.attn\.to_q"
    spec = toy_spec(toy, lora_variant="lokr", lora_rank=2, lora_target_modules=[to_q])
    model = trained_model(spec, toy / "model")
    parts = {name.rsplit(".", 2)[1]: p.detach() for name, p in lora_parameters(model).items()}
    left = parts["lokr_w1"]
    key = "lycoris_transformer_blocks_0_attn_to_q"
    save_file(
        {
            f"{key}.lokr_w1_a": left.clone(),
            f"{key}.lokr_w1_b": torch.eye(left.shape[1]),
            f"{key}.lokr_w2_a": parts["lokr_w2_a"].clone(),
            f"{key}.lokr_w2_b": parts["lokr_w2_b"].clone(),
            f"{key}.alpha": torch.tensor(6.0),
        },
        tmp_path / "a.safetensors",
    )
    before = changes(model)
    begin_from(model, tmp_path / "a.safetensors", families.load("flux"))
    for name, value in changes(model).items():
        assert error(value, 3 * before[name]) < 1e-6
