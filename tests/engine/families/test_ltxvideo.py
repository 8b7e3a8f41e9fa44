"""LTX-Video: what differs between 0.9 and later models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from engine import families
from engine.data.encode.tensor_cache import TensorCache
from engine.data.encode.texts import Text, TextKeys
from engine.toy.components.weights import one_thread
from tests.support.engine.families import PROMPT, Case, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST, LATER = "ltxvideo", "ltxvideo:13b-0.9.7-dev"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ltxvideo")


@torch.no_grad()
@pytest.mark.parametrize("name", [FIRST, LATER])
def test_the_denoiser_knows_the_frame_rate(name: str, root: Path) -> None:
    case = Case(name, root)
    denoiser, condition = case.stock().transformer, batch_of(case.encoded(PROMPT))
    noisy = torch.randn(1, 128, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def predicted(fps: float | None, frames: int = 3) -> torch.Tensor:
        family = families.load("ltxvideo", case.name.partition(":")[2], case.paths.model, fps)
        level = torch.tensor([0.5])
        return family.predict(denoiser, noisy[:, :, :frames], level, condition, 1.0)

    assert torch.equal(predicted(None), predicted(25.0))
    assert not torch.allclose(predicted(None), predicted(12.5), atol=1e-4)
    assert torch.allclose(predicted(None, 1), predicted(12.5, 1)), "a picture has none"


def test_prompts_of_the_two_are_not_taken_for_each_other(root: Path, tmp_path: Path) -> None:
    """The same encoder, called with the mask of the text in one and without in the other."""
    first, later = Case(FIRST, root), Case(LATER, root)
    both = [case.encoded(PROMPT)["prompt_embeds"] for case in (first, later)]
    assert not torch.allclose(*both, atol=1e-3)
    cache = TensorCache(tmp_path, "text")
    keys = {
        TextKeys(case.spec(), case.family, cache, case.paths.model)(Text(PROMPT))
        for case in (first, later)
    }
    assert len(keys) == 2


def test_the_last_noise_is_left_to_the_autoencoders_that_remove_it(root: Path) -> None:
    for name, expected in ((FIRST, set()), (LATER, {"decode_timestep", "decode_noise_scale"})):
        case = Case(name, root)
        arguments = case.family.sample_arguments(case.request(), {}, None)
        assert {key for key in arguments if key.startswith("decode")} == expected


def test_the_shift_is_of_the_tokens(root: Path) -> None:
    """As `LTXPipeline` has it: one token for each cell, in all frames."""
    family = Case(FIRST, root).family
    assert family.tokens_of(16, 22, 21) == 16 * 22 * 21
    assert family.sampler_shift_of(16, 16, 4) == pytest.approx(math.exp(0.95))
    assert Case(LATER, root).family.sampler_shift_of(16, 16, 4) == 1.0
