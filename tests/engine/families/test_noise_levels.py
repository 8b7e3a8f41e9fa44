"""Which noise levels families train on by default."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from engine import families
from engine.diffusion.objective import build_objective
from engine.diffusion.random_numbers import sample_generators
from engine.families.shared.base import Family
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from tests.bench import noise
from tests.support.engine.families import FAST, Case, toys_root

if TYPE_CHECKING:
    from pathlib import Path

LTX: Final = (128, 16, 16, 24)  # of 121 frames at 768x512
# Why a default draws more than 60 % above sigma 0.9, or less than 5 % below 0.5.
REASONS: Final = {
    "flux3:image-klein-base": "what its blocks sample with; its authors train others with more",
    "wan:2.2-t2v-a14b-high": "the expert for sigmas above 0.875",
    "wan:2.2-vace-fun-a14b-high": "the expert for sigmas above 0.875",
    "wan:2.2-i2v-a14b-high": "the expert for sigmas above 0.9",
    "wan:2.2-flf2v-a14b-high": "the expert for sigmas above 0.9",
}


def test_no_default_draws_nearly_all_on_one_side_without_a_reason() -> None:
    one_sided = {
        f"{family}:{flavour}"
        for family, flavour in noise.flavours()
        for size in noise.sizes(family)
        if (shares := noise.shares_of(family, flavour, size)).high > 0.6 or shares.low < 0.05
    }
    assert one_sided == set(REASONS)


def test_the_page_is_what_the_script_makes() -> None:
    assert noise.PAGE.read_text(encoding="utf-8") == noise.page(), "run tests/bench/noise.py"


def test_lightricks_lines_go_on_beyond_their_points() -> None:
    """At the native size, 13,376 tokens; one of the two draws a tenth evenly."""
    drawn = [
        noise.peers_draw("ltxvideo", entry)
        for entry in noise.peers()
        if entry["peer"] == "Lightricks"
    ]
    assert all("215" in words for words, _ in drawn)
    (shifted, stretched) = (shares for _, shares in drawn)
    assert (shifted.high, shifted.low) == pytest.approx((0.999, 0), abs=2e-3)
    assert (stretched.high, stretched.low) == pytest.approx((0.549, 0.077), abs=5e-3)


def test_no_other_trainers_line_is_left_at_a_native_size() -> None:
    """Those that go on beyond their points and those that do not differ only there."""
    for entry in noise.peers():
        for family in entry["families"] if "line" in entry and "extrapolate" not in entry else ():
            flavour = next(iter(FAMILIES[family].flavours))
            count = noise.tokens(family, flavour, noise.sizes(family)[-1])
            assert count <= entry["line"][2], entry


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.partition(":")[0] in FAST else pytest.mark.slow)
        for name in noise.SCHEDULERS
    ],
)
def test_schedulers_of_the_page_are_the_toys(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = Case(name, toys_root(tmp_path_factory)).paths.model
    settings = json.loads((root / "scheduler" / "scheduler_config.json").read_text())
    assert settings.items() >= noise.SCHEDULERS[name].items()


@pytest.mark.parametrize(("side", "shift"), [(32, 1.878), (64, 3.158), (128, 3.158)])
def test_flux2_trains_with_the_shift_of_flux1(side: int, shift: float) -> None:
    """At 512, 1024 and 2048 pixels, whatever its pipeline samples with."""
    family = families.load("flux2")
    assert family.shift_of(side, side) == pytest.approx(shift, abs=1e-3)


def test_ltx_video_draws_from_one_end_to_the_other(tmp_path: Path) -> None:
    spec = JobSpec(model_family="ltxvideo")
    objective = build_objective(spec, families.load("ltxvideo"), tmp_path)
    latents = torch.zeros(1, *LTX).expand(3000, *LTX)
    assert objective.shift_for(latents) == pytest.approx(math.exp(2.05))  # type: ignore[attr-defined]
    small = torch.zeros(3000, 1, 16, 16, 24)  # as many tokens, and less noise to draw
    sigmas = objective.draw(small, sample_generators(0, 0, range(3000))).level
    assert (sigmas > 0.9).float().mean().item() == pytest.approx(0.29, abs=0.03)
    assert (sigmas < 0.5).float().mean().item() == pytest.approx(0.10, abs=0.02)
    assert sigmas.min().item() == pytest.approx(1e-3)
    assert sigmas.max() == 1


class _Dynamic(Family):
    """A family whose scheduler shifts by tokens."""

    encode = predict = None  # type: ignore[assignment]

    def __init__(self, **schedule: Any) -> None:
        super().__init__("flux")
        self._schedule = {
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
            "shift_terminal": 0.1,
        } | schedule


def test_a_schedulers_shift_stays_where_it_was_fitted_while_training() -> None:
    family = _Dynamic()
    sizes = [(16, 16), (32, 32), (128, 128), (256, 256)]
    trained = [family.shift_of(*size) for size in sizes]
    sampled = [family.sampler_shift_of(*size) for size in sizes]
    assert trained[0] == trained[1] == pytest.approx(math.exp(0.5))
    assert trained[2] == trained[3] == pytest.approx(math.exp(1.15))
    assert sampled[1:3] == pytest.approx(trained[1:3])
    assert sampled[0] < trained[0] < trained[3] < sampled[3]
    linear = _Dynamic(time_shift_type="linear")
    assert linear.shift_of(128, 128) == pytest.approx(1.15)
    assert _Dynamic(use_dynamic_shifting=False, shift=3.0).shift_of(64, 64) == 3.0
    assert family.terminal() == 0.1
    assert _Dynamic(shift_terminal=None).terminal() == 0


def test_a_job_may_draw_as_the_pipeline_samples(tmp_path: Path) -> None:
    spec = JobSpec(model_family="lumina2", flow_shift="sampler")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"shift": 6.0}')
    family = families.load("lumina2", None, tmp_path)
    drawn = build_objective(spec, family, tmp_path)
    assert drawn.shift_for(torch.zeros(1, 16, 128, 128)) == 6.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("share", "sigma"), [(0.01, 0.2266), (0.1, 0.4544), (0.5, 0.75), (0.9, 0.9153), (0.99, 0.9685)]
)
def test_hunyuanvideo15_draws_as_the_authors_train(
    share: float, sigma: float, tmp_path: Path
) -> None:
    """Quantiles of `TimestepSampler` and `timestep_transform` in their train.py, run once."""
    spec = JobSpec(model_family="hunyuanvideo15", model_flavour="480p-i2v")
    objective = build_objective(spec, families.load("hunyuanvideo15"), tmp_path)
    latents = torch.zeros(1, 32, 31, 30, 53)
    assert objective.level_at(share, latents) == pytest.approx(sigma, abs=1e-4)
