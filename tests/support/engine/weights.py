"""Small models whose weights lie in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import ConfigMixin, FluxTransformer2DModel, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors.torch import save_file
from torch import nn

from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


CPU = torch.device("cpu")


FILE = "diffusion_pytorch_model.safetensors"


class Tiny(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """One of each: odd rows, a shared weight, buffers of both kinds, a layer that needs fp32."""

    _keep_in_fp32_modules = ["absent", "norm"]  # noqa: RUF012 - diffusers' own shape

    @register_to_config
    def __init__(self, rows: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.arange(8.0).sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens) + self.table[:4])
        return self.head(hidden) + self.inner(hidden + self.mean[0]).sum() * self.count


def tiny_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = Tiny().state_dict()
    tensors = {n: torch.randn_like(t) for n, t in state.items() if t.is_floating_point()}
    tensors["head.weight"] = tensors["embed.weight"].clone()
    return tensors | {"count": torch.tensor(5)}


def write(directory: Path, tensors: dict[str, torch.Tensor], name: str = FILE) -> Path:
    """A model directory of `Tiny`."""
    directory.mkdir(exist_ok=True)
    Tiny().save_config(directory)
    save_file(tensors, directory / name)
    return directory


def full(path: Path, **changes: Any) -> JobSpec:
    return toy_spec(path, model_type="full", **changes)


def lora(path: Path, precision: str = "bf16") -> JobSpec:
    return toy_spec(path).model_copy(update={"mixed_precision": precision})


def several_files(toy: Path, tmp_path: Path) -> Path:
    stock = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    stock.save_pretrained(tmp_path / "several", max_shard_size="2MB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    return tmp_path / "several"
