"""A small block for tests of the layers that adapters put in the place of others."""

from __future__ import annotations

import torch

X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(2))


class Block(torch.nn.Module):
    """Two linear layers, one of them without a bias, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6, bias=False)
        self.conv = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return self.conv(x.unsqueeze(1)).squeeze(1)


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in every model, B too, which is zero at first."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model.train()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far a tensor is from another, as a part of its length."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
