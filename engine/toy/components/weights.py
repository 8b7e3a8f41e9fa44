"""Fill weights that depend only on the seed and the parameter's name, not on the process."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@torch.no_grad()
def fill_random(
    module: torch.nn.Module,
    seed: int,
    *,
    gain: Callable[[str], float] = lambda name: 1.0,
    bias: float = 0.05,
) -> None:
    """Fill every parameter of `module`, in place and in its own dtype.

    Matrices and convolutions are normal with standard deviation gain / sqrt(fan in), so that
    activations keep their size through the layers; vectors called `weight` (of norms) are 1; biases
    are normal with standard deviation `bias`. Each parameter has its own generator, so that neither
    a library's initialization nor the order of layers matters.

    Args:
        module: In any dtype, on any device except meta.
        seed: Seed of the model.
        gain: Maps a parameter's name to its factor.
        bias: Standard deviation of the biases.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
            continue
        scale = gain(name) / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else bias
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(scale))


def gains(*rules: tuple[float, *tuple[str, ...]]) -> Callable[[str], float]:
    """Return a parameter's factor by the first rule with a pattern of its name, 1 without one.

    Args:
        rules: Factors, each with patterns in which `*` stands for any characters.
    """
    return lambda name: next(
        (factor for factor, *patterns in rules if any(fnmatchcase(name, p) for p in patterns)), 1.0
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, since their number changes the order of sums and so the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
