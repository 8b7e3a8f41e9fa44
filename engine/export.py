"""Write what was trained in the formats that stock diffusers loads, and read it back."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from engine.adapters import ADAPTER, lora_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from engine.families import Family
    from engine.world import World
    from jobs.spec import JobSpec


def export(
    model: torch.nn.Module, spec: JobSpec, family: Family, target: Path, world: World
) -> Path:
    """Write `target` (a LoRA file, or a transformer directory); a collective.

    Returns:
        The directory. It is written aside, compared with what is in memory, then renamed.

    Raises:
        RuntimeError: What was written is not what is in memory.
    """
    trained = (
        {name: p.detach() for name, p in lora_parameters(model).items()}
        if spec.model_type == "lora"
        else dict(model.state_dict())
    )
    whole = {name: _gather(tensor, keep=world.main) for name, tensor in trained.items()}
    if world.main:
        aside = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if spec.model_type == "lora":
            _write_lora(model, family, whole, aside)
        else:
            _write_transformer(model, family, whole, aside / "transformer")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    world.barrier()
    return target


def _gather(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """The whole tensor on the CPU; all ranks take part, only one keeps it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().contiguous() if keep else torch.empty(0)


def _write_lora(
    model: Any, family: Family, whole: dict[str, torch.Tensor], directory: Path
) -> None:
    layers = get_peft_model_state_dict(model, state_dict=whole, adapter_name=ADAPTER)
    pipeline = family.pipeline_class()
    pipeline.save_lora_weights(
        directory,
        transformer_lora_layers=layers,
        transformer_lora_adapter_metadata=model.peft_config[ADAPTER].to_dict(),
    )
    back = pipeline.lora_state_dict(directory)
    _compare({f"transformer.{name}": tensor for name, tensor in layers.items()}, back)


def _write_transformer(
    model: Any, family: Family, whole: dict[str, torch.Tensor], directory: Path
) -> None:
    with torch.device("meta"):
        plain = family.transformer_class().from_config(model.config)
    plain.load_state_dict(whole, assign=True)
    plain.save_pretrained(directory)
    back: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        back |= load_file(file)
    _compare(whole, back)


def _compare(memory: dict[str, torch.Tensor], disk: dict[str, torch.Tensor]) -> None:
    if memory.keys() != disk.keys():
        difference = sorted(memory.keys() ^ disk.keys())
        raise RuntimeError(f"the export lacks or adds tensors: {difference[:3]}")
    for name, tensor in memory.items():
        if not torch.equal(tensor, disk[name]):
            raise RuntimeError(f"the export of {name} differs from memory")
