"""A job that begins from a LoRA: under every name that an export has, and strictly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engine import families, run_job
from engine.diffusion.random_numbers import keyed_generator
from engine.exports.lora import _named
from engine.model.adapters import lora
from engine.model.adapters.lora_file import begin_from
from engine.model.adapters.training_adapter import read_training_adapter
from jobs.errors import UserError
from jobs.models.find_model import find_lora
from jobs.spec.job_spec import JobSpec
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.forked import on_ranks
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path

    from engine.families import Family

VARIANTS: list[dict[str, Any]] = [
    {"lora_alpha": 5},
    {"lora_variant": "rslora"},
    {"lora_variant": "dora"},
    {"lora_rank_pattern": {"to_q": 2}, "lora_alpha_pattern": {"attn.to_k": 1}},
]


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with another adapter in it."""
    with torch.no_grad():
        for number, parameter in enumerate(lora.lora_parameters(model).values()):
            parameter.copy_(torch.randn(parameter.shape, generator=keyed_generator(number)))
    return model


def products(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What each adapter adds, and DoRA's magnitudes: two files may share it out differently."""
    found = {name: p.detach() for name, p in lora.lora_parameters(model).items()}
    scales = lora.scales_of(model)
    return {
        name: scales[name]
        * found[f"{name}.lora_B.default.weight"].flatten(1)
        @ found[f"{name}.lora_A.default.weight"].flatten(1)
        for name in scales
    } | {name: value.clone() for name, value in found.items() if "magnitude" in name}


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_every_export_is_where_another_job_can_begin(
    toy: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    formats = ["diffusers", "kohya", "comfyui"]
    spec = toy_spec(toy, lora_rank=3, export_formats=formats, **values)
    model = trained_model(spec, toy / "model")
    expected = products(model)
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    assert made.warnings == ()
    files = sorted(made.path.glob("*.safetensors"))
    assert len(files) == len(formats)
    assert find_lora(str(made.path)) == made.path / "pytorch_lora_weights.safetensors"
    for file in files:
        begin_from(bare(model), file, families.load("flux"))
        for name, value in products(model).items():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (file.name, name)


class Pair(torch.nn.Module):
    """The names of a block of FLUX.1, in a model of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        block, attn = torch.nn.Module(), torch.nn.Module()
        for name in ("to_q", "to_k", "to_v"):
            setattr(attn, name, torch.nn.Linear(4, 6))
        block.attn = attn
        self.transformer_blocks = torch.nn.ModuleList([block])


def small(without: str = "", **values: Any) -> torch.nn.Module:
    model = Pair()
    spec = JobSpec(**{"lora_rank": 2, "mixed_precision": "no"} | values)
    lora.add_lora(model, spec, r".*to_[qkv]", without)
    return bare(model)


@pytest.fixture
def flux() -> Family:
    return families.load("flux")


def test_a_layer_that_is_one_elsewhere_gives_each_of_its_parts_the_whole_rank(
    tmp_path: Path, flux: Family
) -> None:
    """As other trainers' files of FLUX.1 have it: one adapter of query, key and value."""
    draw = keyed_generator(1)
    down, up = torch.randn(2, 4, generator=draw), torch.randn(18, 2, generator=draw)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
    save_file(tensors | {f"{key}.alpha": torch.tensor(1.0)}, tmp_path / "a.safetensors")
    model = small()
    begin_from(model, tmp_path / "a.safetensors", flux)
    found = products(model)
    names = [f"transformer_blocks.0.attn.to_{part}" for part in "qkv"]
    assert torch.allclose(torch.cat([found[name] for name in names]), 0.5 * up @ down)


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        "transformer." + name.replace(".default", ""): value.detach().clone()
        for name, value in lora.lora_parameters(model).items()
    }


@pytest.mark.parametrize("variant", ["lora", "lokr"])
@pytest.mark.parametrize("excluded", [None, ["to_q"], [r".*\.to_q$"]], ids=str)
def test_what_no_loss_depends_on_gets_no_adapter_and_none_of_a_file(
    tmp_path: Path, variant: str, excluded: list[str] | None
) -> None:
    """Other jobs' files, and those of before, have it; a fused part is not dropped.

    Norms beside it have no adapter in any file.
    """
    unused, values = r"\.(to|norm)_k\.", {"lora_variant": variant, "lora_exclude_modules": excluded}
    every, fewer = small(**values), small(unused, **values)
    ltx2 = families.load("ltx2")
    fewer.get_submodule("transformer_blocks.0.attn").norm_k = torch.nn.RMSNorm(4)
    layers = {name.partition(".lo")[0].rpartition(".")[2] for name in named(fewer)}
    assert layers == ({"to_v"} if excluded else {"to_q", "to_v"})
    wanted = {n: p.detach().clone() for n, p in lora.lora_parameters(every).items()}
    save_file(named(every), tmp_path / "a.safetensors")
    left_out = begin_from(fewer, tmp_path / "a.safetensors", ltx2, unused)
    assert left_out == ["transformer.transformer_blocks.0.attn.to_k"]
    for name, parameter in lora.lora_parameters(fewer).items():
        assert torch.allclose(parameter, wanted[name])
    with pytest.raises(UserError, match="to_k"):
        begin_from(fewer, tmp_path / "a.safetensors", ltx2)


Q = "transformer.transformer_blocks.0.attn.to_q"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({f"{Q}.lora_A.weight": None}, {}, f"{Q} has no down weights"),
    ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, {}, f"it does not adapt {Q}"),
    ({f"{Q}x.lora_A.weight": (2, 4), f"{Q}x.lora_B.weight": (6, 2)}, {}, f"it adapts {Q}x, and"),
    (
        {"text_encoder.q.lora_A.weight": (2, 4), "text_encoder.q.lora_B.weight": (6, 2)},
        {},
        "it also trains a text encoder",
    ),
    ({f"{Q}.diff": (6,)}, {}, f"{Q}.diff is no part of a LoRA"),
    ({}, {"lora_rank": 3}, "to_q has rank 2 there and 3 here"),
    ({}, {"lora_variant": "dora"}, "it is no DoRA"),
    ({f"{Q}.lora_B.weight": (7, 2)}, {}, f"{Q} has another size"),
    ({f"{Q}.lora_A.weight": (2, 5)}, {}, "to_q has another size"),
    ({f"{Q}.alpha": (2,)}, {}, f"the alpha of {Q} is not a finite number"),
    ({f"{Q}.lora_A.weight": (0, 4), f"{Q}.lora_B.weight": (6, 0)}, {}, f"weights of {Q} are (0, 4"),
    ({f"{Q}.lora_B.weight": (6,)}, {}, f"the up weights of {Q} are (6,)"),
    ({f"{Q}.lora_magnitude_vector": (5,)}, {"lora_variant": "dora"}, f"{Q} has another size"),
]


@pytest.mark.parametrize(("change", "values", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_does_not_fit_is_refused(
    tmp_path: Path, flux: Family, change: dict[str, Any], values: dict[str, Any], why: str
) -> None:
    tensors = named(small()) | {n: torch.ones(s) if s else None for n, s in change.items()}
    file = tmp_path / "a.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(UserError) as error:
        begin_from(small(**values), file, flux)
    assert error.value.message.startswith("init_lora: cannot begin from a.safetensors: ")
    assert why in error.value.message


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"r": 0}',
        '{"lora_alpha": "a"}',
        '{"lora_alpha": NaN}',
        '{"alpha_pattern": 5}',
        '{"alpha_pattern": {"[": 1}}',
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_configuration_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, flux: Family, text: str, beside: bool
) -> None:
    if beside:
        (tmp_path / "adapter_config.json").write_text(text)
    header = None if beside else {"lora_adapter_metadata": text}
    save_file(named(small()), tmp_path / "a.safetensors", header)
    with pytest.raises(UserError, match=r"a\.safetensors: its configuration cannot be read"):
        begin_from(small(), tmp_path / "a.safetensors", flux)


def test_a_file_in_fp8_is_read(tmp_path: Path, flux: Family) -> None:
    narrow = {name: t.to(torch.float8_e4m3fn) for name, t in named(small()).items()}
    save_file(narrow, tmp_path / "a.safetensors")
    model = small()
    begin_from(model, tmp_path / "a.safetensors", flux)
    assert all(torch.equal(t, narrow[name].float()) for name, t in named(model).items())


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_each_rank_keeps_its_rows(tmp_path: Path, flux: Family, variant: str) -> None:
    tensors = {name: torch.randn(t.shape) for name, t in named(small(lora_variant=variant)).items()}
    save_file(tensors, tmp_path / "a.safetensors")

    def begin(rank: int) -> dict[str, torch.Tensor]:
        model = small(lora_variant=variant)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        begin_from(model, tmp_path / "a.safetensors", flux)
        parameters = lora.lora_parameters(model)
        assert all(len(p.to_local()) < len(p) for p in parameters.values())
        return {name: p.full_tensor().detach() for name, p in parameters.items()}

    for found in on_ranks(begin, 2, tmp_path):
        whole = {"transformer." + name.replace(".default", ""): t for name, t in found.items()}
        assert whole.keys() == tensors.keys()
        assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("place", ["a.safetensors", "export", "gone"])
def test_a_job_begins_from_what_is_there(tmp_path: Path, flux: Family, place: str) -> None:
    """It may be gone when the job resumes."""
    said: list[str] = []
    (tmp_path / "export").mkdir()
    for name in ("a.safetensors", "export/pytorch_lora_weights.safetensors"):
        save_file(named(small()), tmp_path / name)
    telemetry = SimpleNamespace(say=said.append)
    spec = JobSpec(lora_rank=2, mixed_precision="no", init_lora=str(tmp_path / place))
    model = small()
    with torch.no_grad():
        for parameter in lora.lora_parameters(model).values():
            parameter.zero_()
    run = SimpleNamespace(spec=spec, family=flux, telemetry=telemetry)
    begun = run_job.begin_from_lora(run, model)  # type: ignore[arg-type]
    assert begun == bool(said) == (place != "gone")
    wanted = named(small())
    assert begun == all(torch.equal(tensor, wanted[n]) for n, tensor in named(model).items())


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, flux: Family) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"{}")
    with pytest.raises(UserError, match="cannot be read"):
        begin_from(small(), tmp_path / "a.safetensors", flux)


def test_dora_of_a_part_of_a_layer_has_no_name_elsewhere(flux: Family) -> None:
    """The length of a row of query, key and value is one number, and two thirds have none."""
    model = small(lora_variant="dora", lora_exclude_modules=["to_v"])
    layers = {n.removeprefix("transformer."): t for n, t in named(model).items()}
    assert flux.KOHYA is not None
    with pytest.raises(UserError, match="DoRA needs all parts"):
        _named(flux.KOHYA, layers)
    whole = small(lora_variant="dora")
    layers = {n.removeprefix("transformer."): t for n, t in named(whole).items()}
    found = _named(flux.KOHYA, layers)
    lengths = [t.flatten() for n, t in layers.items() if "magnitude" in n]
    assert torch.equal(
        found["lora_unet_double_blocks_0_img_attn_qkv.dora_scale"], torch.cat(lengths)[:, None]
    )


def test_an_export_beside_another_configuration_is_not_scaled_again(
    toy: Path, tmp_path: Path
) -> None:
    """Diffusers' file has a configuration of its own; other tools' names never have one."""
    formats = ["diffusers", "kohya", "comfyui"]
    spec = toy_spec(toy, lora_rank=4, lora_alpha=8, export_formats=formats)
    model = trained_model(spec, toy / "model")
    expected = products(model)
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    (made.path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 400}')
    linears = {n: m.base_layer for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    for file in sorted(made.path.glob("*.safetensors")):
        tensors = {n: t for n, t in load_file(file).items() if not n.endswith(".alpha")}
        with safe_open(file, framework="pt") as opened:
            save_file(tensors, file, opened.metadata())
        begin_from(bare(model), file, families.load("flux"))
        read = dict(read_training_adapter(file, linears, families.load("flux")))
        for name, value in products(model).items():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (file.name, name)
            down, up = read[name]
            assert torch.allclose(up @ down, value, rtol=1e-5, atol=1e-5), (file.name, name)
