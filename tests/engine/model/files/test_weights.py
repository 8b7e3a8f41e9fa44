"""Weights: which are accepted and refused, in what precision, buffers and shared tensors."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from torch import nn

from engine.model.files import weights
from engine.model.precision import compute_dtype, storage_dtype
from jobs.errors import UserError
from tests.support.engine.weights import (
    CPU,
    FILE,
    Tiny,
    full,
    lora,
    several_files,
    tiny_tensors,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


def load(
    directory: Path, spec: JobSpec, model_class: Any = Tiny, notes: list[str] | None = None
) -> Any:
    say = [].append if notes is None else notes.append
    model, stored = weights.build_on_meta(model_class, directory, spec, say=say)
    weights.materialise(model, CPU)
    weights.stream(model, stored)
    weights.check_precision(model, spec)
    return model


# Buffers and shared tensors


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight", None])
def test_a_shared_tensor_stays_one_whichever_name_the_file_has(
    tmp_path: Path, left_out: str | None
) -> None:
    tensors = tiny_tensors()
    written = {name: tensor for name, tensor in tensors.items() if name != left_out}
    model = load(write(tmp_path / "m", written), full(tmp_path))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name


def test_one_parameter_given_to_two_modules_stays_one(tmp_path: Path) -> None:
    class Twice(Tiny):
        def __init__(self) -> None:
            super().__init__()
            one = nn.Parameter(torch.ones(7, 4))
            self.embed.weight = one
            self.head.weight = one

    model, _ = weights.build_on_meta(Twice, write(tmp_path / "m", tiny_tensors()), full(tmp_path))
    assert model.head.weight is model.embed.weight
    assert model.head.weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta  # afterwards, parameters are real again


def test_buffers_are_filled_or_computed(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    model = load(write(tmp_path / "m", tensors), full(tmp_path))
    assert torch.equal(model.mean, tensors["mean"])
    assert model.count == 5
    assert torch.equal(model.table, torch.arange(8.0).sin())


def test_what_a_model_freezes_itself_stays_frozen(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", tiny_tensors())
    model = load(directory, full(tmp_path))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["fixed"]
    assert not any(p.requires_grad for p in load(directory, lora(tmp_path)).parameters())


@pytest.mark.parametrize("parameters_on", [None, CPU])
def test_what_is_not_sharded_computes_where_the_rank_does(
    tmp_path: Path, parameters_on: torch.device | None
) -> None:
    """Only shards may lie elsewhere: `test_replicated.py`."""
    model, _ = weights.build_on_meta(Tiny, write(tmp_path / "m", tiny_tensors()), full(tmp_path))
    weights.materialise(model, torch.device("meta"), parameters_on=parameters_on)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    weights.materialise(model, CPU, parameters_on=torch.device("meta"))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert model.head.weight is model.embed.weight


def test_every_tensor_read_is_counted(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["embed.weight"]
    model, stored = weights.build_on_meta(Tiny, write(tmp_path / "m", tensors), full(tmp_path))
    weights.materialise(model, CPU)
    counted: list[int] = []
    read = weights.stream(model, stored, progress=counted.append)
    assert counted == list(range(1, len(tensors) + 1))
    assert read == sum(tensor.nbytes for tensor in tensors.values())


# Files


def test_a_model_in_several_files(toy: Path, tmp_path: Path) -> None:
    directory = several_files(toy, tmp_path)
    model = load(directory, full(toy), FluxTransformer2DModel)
    expected = load_file(toy / "model" / "transformer" / FILE)
    assert all(torch.equal(expected[n], t) for n, t in model.state_dict().items())
    victim = min(directory.glob("*.safetensors"))
    victim.unlink()
    with pytest.raises(UserError, match=rf"{victim.name} is missing; .*index.json lists it"):
        weights.stored_tensors(directory)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", {"a": torch.ones(1)}, "part.safetensors")
    index = directory / "diffusion_pytorch_model.safetensors.index.json"
    for map_, complaint in (
        ({"b": "part.safetensors"}, "lists b in part.safetensors, but it is not there"),
        ({"a": "../m/part.safetensors"}, "not a file next to it"),
        (["a"], "is damaged"),
    ):
        index.write_text(json.dumps({"weight_map": map_}))
        with pytest.raises(UserError, match=complaint):
            weights.stored_tensors(directory)


def test_the_standard_name_is_chosen_among_variants(tmp_path: Path) -> None:
    half, name = "diffusion_pytorch_model.fp16.safetensors", {"a": torch.ones(1)}
    directory = write(tmp_path / "m", name, half)
    assert weights.stored_tensors(directory)["a"].file.name == half  # the only one
    write(directory, name)
    assert weights.stored_tensors(directory)["a"].file.name == FILE
    (directory / FILE).rename(directory / "other.safetensors")
    with pytest.raises(UserError, match=rf"several sets of weights \({half}, other.safetensors\)"):
        weights.stored_tensors(directory)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("diffusion_pytorch_model.bin", r"only pickled weights \(diffusion_pytorch_model.bin\)"),
        ("flux-Q4.gguf", "only GGUF"),
        ("notes.txt", "has no .safetensors"),
    ],
)
def test_other_kinds_of_files_are_refused(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=complaint):
        weights.stored_tensors(tmp_path)


def raw(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "damaged .*its header exceeds the file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (struct.pack("<Q", 2) + b"[]", "damaged"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "8 bytes before a"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"), "its shape"),
        (raw({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"0"), "a is .* as F4"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        weights.stored_tensors(tmp_path)


def test_names_and_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["inner.bias"], tensors["head.weight"], tensors["embed.weight"]
    tensors |= {"surprise": torch.ones(1), "mean": torch.ones(4)}
    with pytest.raises(UserError, match="does not fit") as refusal:
        load(write(tmp_path / "m", tensors), full(tmp_path))
    for part in (
        "2 tensors are missing (embed.weight, inner.bias …)",
        "1 are not in the model (surprise …)",
        "mean has shape (4,), the config says (3,)",
    ):
        assert part in str(refusal.value)


def test_extra_tensors_that_the_model_says_to_ignore_are_ignored(tmp_path: Path) -> None:
    class Tolerant(Tiny):
        _keys_to_ignore_on_load_unexpected = [r"^old\."]  # noqa: RUF012

    directory = write(tmp_path / "m", tiny_tensors() | {"old.thing": torch.ones(1)})
    load(directory, full(tmp_path), Tolerant)
    with pytest.raises(UserError, match=r"not in the model \(old.thing"):
        load(directory, full(tmp_path))


# Precision


@pytest.mark.parametrize(
    "in_file",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_every_precision_is_read_and_kept_as_said(tmp_path: Path, in_file: torch.dtype) -> None:
    tensors = {
        name: tensor.to(in_file) if tensor.is_floating_point() else tensor
        for name, tensor in tiny_tensors().items()
    }
    directory = write(tmp_path / "m", tensors)
    for spec, wanted in (
        (full(tmp_path), torch.float32),
        (lora(tmp_path, "bf16"), torch.bfloat16),
        (lora(tmp_path, "fp16"), torch.float16),
    ):
        notes: list[str] = []
        model = load(directory, spec, notes=notes)
        for name, parameter in model.named_parameters():
            kept = torch.float32 if name.startswith("norm.") else wanted
            assert parameter.dtype is kept, name
            assert torch.equal(parameter, tensors[name].to(kept)), name
        assert torch.equal(model.mean, tensors["mean"].float())
        for kept in {wanted, torch.float32} - {in_file}:  # the second: the layer norm
            assert any(f"kept in {str(kept).removeprefix('torch.')}" in note for note in notes)
        fp8 = "fp8 is not a compute precision here" in "\n".join(notes)
        assert fp8 == (in_file.itemsize == 1 and spec.model_type == "lora")


def test_what_a_model_keeps_in_fp32_is_what_from_pretrained_keeps(tmp_path: Path) -> None:
    tensors = {n: t.bfloat16() if t.dim() else t for n, t in tiny_tensors().items()}
    directory = write(tmp_path / "m", tensors)
    stock = Tiny.from_pretrained(directory, torch_dtype=torch.bfloat16)
    mine = load(directory, lora(tmp_path))
    expected = {name: parameter.dtype for name, parameter in stock.named_parameters()}
    expected.pop("head.weight")  # from_pretrained made two tensors of the shared one
    assert {name: parameter.dtype for name, parameter in mine.named_parameters()} == expected


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_base_that_computes_in_fp32_is_kept_in_fp32(tmp_path: Path, narrow: torch.dtype) -> None:
    tensors = {n: t.to(narrow) if t.dim() else t for n, t in tiny_tensors().items()}
    notes: list[str] = []
    spec = lora(tmp_path, "no")
    model = load(write(tmp_path / "m", tensors), spec, notes=notes)
    weights.check_precision(model, spec)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name].float()), name
    times = "four times" if narrow.itemsize == 1 else "twice"
    assert "kept in float32 " in "".join(notes)
    assert f"they take {times} their size on disk" in "".join(notes)


def test_the_rule_of_what_is_kept_in_which_precision(tmp_path: Path) -> None:
    half, single = torch.bfloat16, torch.float32
    for precision, kept in (("bf16", half), ("fp16", torch.float16), ("no", single)):
        spec = lora(tmp_path, precision)
        assert storage_dtype(spec, keep_fp32=False) is compute_dtype(spec) is kept
        assert storage_dtype(spec, keep_fp32=True) is single
        assert storage_dtype(full(tmp_path), keep_fp32=False) is single


def test_a_number_too_large_for_fp16_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["inner.weight"][1, 2] = 1e5
    directory = write(tmp_path / "m", tensors)
    with pytest.raises(UserError, match=r"inner.weight contains a value .*too large for float16"):
        load(directory, lora(tmp_path, "fp16"))
    load(directory, lora(tmp_path, "bf16"))


@pytest.mark.parametrize(
    "name",
    [
        "inner.scale_weight",
        "inner.weight_scale",
        "scaled_fp8",
        "inner.weight.absmax",
        "inner.weight._scale",
        "inner.qweight",
    ],
)
def test_weights_that_need_scales_are_refused(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path / "m", tiny_tensors() | {name: torch.ones(1)})
    with pytest.raises(UserError, match=rf"is quantized: it has {name}, .*use the model's bf16"):
        load(directory, lora(tmp_path))


def test_a_quantised_config_or_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    directory = write(tmp_path / "m", tensors | {"inner.weight": torch.ones(3, 4).to(torch.int8)})
    said = r"inner.weight is stored as int8; training on a quantized base is not supported; use the"
    with pytest.raises(UserError, match=said):
        load(directory, lora(tmp_path))
    for buffer, stored in (("count", torch.tensor(5.0)), ("mean", torch.ones(3).to(torch.int8))):
        write(directory, tensors | {buffer: stored})
        what = str(stored.dtype).removeprefix("torch.")
        with pytest.raises(UserError, match=rf"{buffer} is stored as {what}"):
            load(directory, lora(tmp_path))
    write(directory, tensors)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is quantized \(bitsandbytes\)"):
        load(directory, lora(tmp_path))


def test_a_widened_layer_takes_what_its_file_has_and_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny_tensors()
    published = tensors["inner.weight"][:, :2].clone()
    directory = write(tmp_path / "m", tensors | {"inner.weight": published})
    with pytest.raises(
        UserError, match=r"inner.weight has shape \(3, 2\), the config says \(3, 4\)"
    ):
        load(directory, lora(tmp_path))
    monkeypatch.setattr(weights, "widened_of", lambda spec: "inner")
    model = load(directory, full(tmp_path))
    assert torch.equal(model.inner.weight[:, :2], published)
    assert not model.inner.weight[:, 2:].any()
    write(directory, tensors | {"inner.weight": published, "inner.bias": torch.ones(2)})
    with pytest.raises(UserError, match=r"inner.bias has shape \(2,\)"):
        load(directory, full(tmp_path))


def test_what_computes_in_fp32_is_what_the_model_lists(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", tiny_tensors())
    model = load(directory, full(tmp_path))
    listed = weights.computed_in_fp32(model)
    assert {id(one) for one in listed} == {id(model.norm.weight), id(model.norm.bias)}
    model.norm.requires_grad_(False)
    assert len(weights.computed_in_fp32(model)) == len(listed), "as it computes with the others"


def test_the_check_names_what_is_in_a_wrong_precision(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", tiny_tensors())
    for spec, wrong, complaint in (
        (full(tmp_path), torch.bfloat16, "inner.weight is trained in torch.bfloat16"),
        (lora(tmp_path), torch.float32, "inner.weight is frozen and kept in torch.float32"),
    ):
        model = load(directory, spec)
        model.inner.to(wrong)
        with pytest.raises(RuntimeError, match=complaint):
            weights.check_precision(model, spec)
