"""What the model is asked, and how its answers are judged: against formulas and diffusers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, get_args

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.diffusion import rectified_flow
from engine.diffusion.denoising import Denoising
from engine.diffusion.huber import Huber, scheduled
from engine.diffusion.objective import NoiseDraw, NoisySample, build_objective, loss_of
from engine.diffusion.random_numbers import drops_caption, sample_generators
from engine.diffusion.rectified_flow import Flow
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from jobs.spec.noise_levels import SHIFTED
from jobs.spec.values.value_types import TimestepSampling
from tests.support.engine.levels import assert_levels_are_quantiles

if TYPE_CHECKING:
    from pathlib import Path

LATENTS = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))


def flow(shift: float = 1.0, **values: Any) -> Flow:
    return Flow(JobSpec(**values), lambda height, width, frames: shift)


def problem_of_draw(objective: Any, latents: torch.Tensor, generators: Any) -> NoisySample:
    problem: NoisySample = objective.add_noise(latents, objective.draw(latents, generators))
    return problem


def many_sigmas(objective: Flow) -> torch.Tensor:
    return objective.draw(torch.zeros(4096, 1, 1, 1), sample_generators(0, 0, range(4096))).level


def test_draws_do_not_depend_on_who_draws() -> None:
    whole = flow().draw(LATENTS, sample_generators(5, 7, range(4)))
    halves = [
        flow().draw(LATENTS[i : i + 2], sample_generators(5, 7, range(i, i + 2))) for i in (0, 2)
    ]
    assert torch.equal(whole.noise, torch.cat([half.noise for half in halves]))
    assert torch.equal(whole.level, torch.cat([half.level for half in halves]))
    later = flow().draw(LATENTS, sample_generators(5, 8, range(4)))
    assert not torch.equal(whole.level, later.level)


def test_flow_targets_lie_on_the_line_from_data_to_noise() -> None:
    objective = flow(timestep_sampling="uniform")
    problem = problem_of_draw(objective, LATENTS, sample_generators(0, 0, range(4)))
    sigma = problem.level.view(-1, 1, 1, 1)
    assert torch.allclose(problem.noisy - sigma * problem.target, LATENTS, atol=1e-6)


def test_uniform_sigma_is_uniform() -> None:
    sigma = many_sigmas(flow(timestep_sampling="uniform")).sort().values
    expected = torch.linspace(0, 1, len(sigma))
    assert (sigma - expected).abs().max() < 0.03


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.5, 0.7)])
def test_logit_normal_sigma_has_the_asked_moments(mean: float, std: float) -> None:
    logits = torch.logit(many_sigmas(flow(logit_mean=mean, logit_std=std)))
    assert logits.mean().item() == pytest.approx(mean, abs=0.05)
    assert logits.std().item() == pytest.approx(std, rel=0.05)


def test_shift_is_the_familys_unless_the_job_names_one() -> None:
    plain = many_sigmas(flow())
    for objective in (
        flow(3.0, timestep_sampling="shift"),
        flow(1.0, timestep_sampling="shift", flow_shift=3.0),
    ):
        assert torch.allclose(many_sigmas(objective), 3 * plain / (1 + 2 * plain))


def test_a_uniform_sigma_is_shifted_like_a_logit_normal_one() -> None:
    plain = many_sigmas(flow(timestep_sampling="uniform"))
    found = many_sigmas(flow(7.0, timestep_sampling="uniform_shift"))
    assert torch.allclose(found, 7 * plain / (1 + 6 * plain))
    own = many_sigmas(flow(7.0, timestep_sampling="uniform_shift", flow_shift=1.0))
    assert torch.allclose(own, plain)


@pytest.mark.parametrize("how", SHIFTED)
@pytest.mark.parametrize("shift", [1e-6, 1e6])
def test_the_largest_shift_leaves_numbers(how: str, shift: float) -> None:
    sigmas = many_sigmas(flow(timestep_sampling=how, flow_shift=shift))
    assert ((sigmas >= 0) & (sigmas <= 1)).all()


ONE: Final = torch.zeros(1, 1, 1, 1)


@given(
    values=st.fixed_dictionaries(
        {
            "timestep_sampling": st.sampled_from(get_args(TimestepSampling)),
            "logit_mean": st.floats(-3, 3),
            "logit_std": st.floats(0.05, 4),
            "mode_scale": st.floats(-1, 1.75),
            "flow_shift": st.none() | st.floats(0.2, 30),
        }
    ),
    shift=st.floats(0.2, 30),
    within=st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(lambda part: part[1] - part[0] > 0.2),
)
@settings(max_examples=8)
@example({"timestep_sampling": "logit_normal"}, 3.0, (0.0, 1.0))  # FLUX.1's
@example({"timestep_sampling": "mode", "mode_scale": 1.75}, 1.0, (0.0, 1.0))
@example({"timestep_sampling": "mode", "mode_scale": -1.0}, 1.0, (0.2, 0.6))
@example({"timestep_sampling": "shift", "logit_mean": 800.0}, 3.0, (0.0, 1.0))
def test_levels_of_the_validation_loss_are_quantiles_of_what_training_draws(
    values: dict[str, Any], shift: float, within: tuple[float, float]
) -> None:
    """Of every way to draw, and of every part of it that a job or a model may be limited to."""
    whole = flow(shift, **values)
    sigmas = (whole.level_at(within[0], ONE), whole.level_at(within[1], ONE))
    part = Flow(whole.spec, whole.shift_of, sigmas if within != (0.0, 1.0) else (0.0, 1.0))
    assert_levels_are_quantiles(part, ONE, draws=2000)


@pytest.mark.parametrize(
    ("mean", "sigmas"),
    [
        (0.0, (0.9, 0.95)),  # two thirds of the draws miss it ten times, most of them below it
        (0.0, (0.5, 0.52)),  # or on either side
        (-30.0, (0.9, 1.0)),  # all do
    ],
)
def test_levels_are_clipped_as_often_as_draws(
    mean: float, sigmas: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rectified_flow, "_MOST_DRAWS", 10)
    part = Flow(JobSpec(logit_mean=mean), lambda height, width, frames: 1.0, sigmas)
    assert_levels_are_quantiles(part, ONE, draws=2000)


def test_stretched_pulls_shifted_draws_to_both_ends() -> None:
    """As in Lightricks' trainer, but for its uniform tenth and what it reflects below 0.001."""
    plain = many_sigmas(flow(3.0, timestep_sampling="shift"))
    found = many_sigmas(flow(3.0, timestep_sampling="stretched"))
    ends = torch.tensor([math.log(3) - 2.5758, math.log(3) + 3.0902])
    low, high = torch.sigmoid(ends)
    assert torch.allclose(found, ((plain - low) / (high - low)).clamp(1e-3, 1), atol=1e-5)
    assert found.min() == pytest.approx(1e-3)


@pytest.mark.parametrize("mean", [-800.0, -20.0, 20.0, 800.0])
def test_nothing_is_stretched_where_all_draws_are_alike(mean: float) -> None:
    sigmas = many_sigmas(flow(3.0, timestep_sampling="stretched", logit_mean=mean))
    assert (sigmas - (1.0 if mean > 0 else 1e-3)).abs().max() < 2e-3


@pytest.mark.parametrize("scale", [1.29, -0.5])
def test_mode_draws_as_diffusers_does(scale: float) -> None:
    """Sorted, they are theirs for evenly spaced ones; the middle has more of them, or fewer."""
    sigmas = many_sigmas(flow(timestep_sampling="mode", mode_scale=scale)).sort().values
    even = (torch.arange(len(sigmas)) + 0.5) / len(sigmas)
    theirs = 1 - even - scale * (torch.cos(torch.pi * even / 2) ** 2 - 1 + even)
    assert (sigmas - theirs.sort().values).abs().max() < 0.03
    middle = ((sigmas > 0.4) & (sigmas < 0.6)).float().mean().item()
    assert (middle > 0.23) if scale > 0 else (middle < 0.18)


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap"])
def test_losses_are_weighted_as_by_diffusers(scheme: str) -> None:
    objective = flow(timestep_sampling="uniform", loss_weighting=scheme)
    problem = problem_of_draw(objective, LATENTS, sample_generators(0, 0, range(4)))
    wanted = compute_loss_weighting_for_sd3(scheme, problem.level)
    assert problem.weight is not None
    assert torch.allclose(problem.weight, wanted)
    plain = problem_of_draw(
        flow(timestep_sampling="uniform"), LATENTS, sample_generators(0, 0, range(4))
    )
    assert plain.weight is None
    assert torch.equal(plain.level, problem.level)


def test_sigma_squared_weights_the_velocitys_loss_as_the_datas() -> None:
    """Diffusers' SD3 script compares the data that the prediction implies with the data."""
    objective = flow(timestep_sampling="uniform", loss_weighting="sigma_squared")
    problem = problem_of_draw(objective, LATENTS, sample_generators(0, 0, range(4)))
    prediction = problem.target + 0.1 * LATENTS.flip(0)
    sigma = problem.level.view(-1, 1, 1, 1)
    theirs = (prediction * -sigma + problem.noisy - LATENTS).square().mean()
    assert loss_of(prediction, problem, objective.spec).item() == pytest.approx(theirs.item())


def test_hardly_any_noise_does_not_outweigh_all_else() -> None:
    objective = flow(loss_weighting="sigma_sqrt")
    level = torch.tensor([0.0, 1e-3, 2e-3])
    weight = objective.add_noise(torch.zeros(3, 1, 1, 1), NoiseDraw(level, torch.zeros(3, 1, 1, 1)))
    assert weight.weight is not None
    assert weight.weight.tolist() == pytest.approx([1e6, 1e6, 2.5e5])


def test_the_weighted_curve_has_mean_one_and_is_highest_where_noise_is_high() -> None:
    sigma = torch.linspace(0, 1, 1001)
    objective = flow(loss_weighting="weighted")
    weight = objective.add_noise(
        torch.zeros(1001, 1, 1, 1), NoiseDraw(sigma, torch.zeros(1001, 1, 1, 1))
    ).weight
    assert weight is not None
    assert weight.mean().item() == pytest.approx(1, abs=0.01)
    assert sigma[weight.argmax()].item() == pytest.approx(0.875, abs=0.002)
    # At the places that the curve goes through, and in the middle between two of them.
    at = [0, 30, 50, 75, 100, 334, 397, 482, 551, 663, 764, 823, 875, 950, 980, 1000]
    wanted = [0.45, 0.5, 0.59, 0.6525, 0.715, 0.75, 0.8, 0.9, 1.0, 1.2, 1.4, 1.5, 1.52, 1.38]
    assert weight[at].tolist() == pytest.approx([*wanted, 1.18, 0.91], abs=1e-5)


def test_a_job_trains_only_the_sigmas_between_its_bounds(tmp_path: Path) -> None:
    spec = JobSpec(sigma_min=0.3, sigma_max=0.95, timestep_sampling="uniform")
    objective = build_objective(spec, family_of("flow"), tmp_path)
    assert isinstance(objective, Flow)
    assert objective.sigmas == (0.3, 0.9), "the family has bounds too"
    sigmas = many_sigmas(objective)
    assert sigmas.min() >= 0.3
    assert sigmas.max() <= 0.9
    with pytest.raises(UserError, match="exclude this model"):
        build_objective(JobSpec(sigma_min=0.95), family_of("flow"), tmp_path)


def test_a_familys_shift_is_that_of_height_width_and_frames() -> None:
    asked: list[tuple[int, int, int]] = []

    def shift_of(height: int, width: int, frames: int) -> float:
        asked.append((height, width, frames))
        return 2.0

    objective = Flow(JobSpec(), shift_of)
    assert objective.shift_for(torch.zeros(1, 4, 6, 8)) == 2.0
    assert objective.shift_for(torch.zeros(1, 4, 5, 6, 8)) == 2.0
    assert asked == [(6, 8, 1), (6, 8, 5)]


def test_sigmas_stay_within_those_that_the_model_is_for() -> None:
    def drawn(low: float, high: float, count: int = 256, **values: Any) -> torch.Tensor:
        limited = Flow(JobSpec(**values), lambda height, width, frames: 1.0, (low, high))
        draws = sample_generators(0, 0, range(count))
        return limited.draw(torch.zeros(count, 1, 1, 1), draws).level

    within = drawn(0.4, 0.6)
    assert within.min() >= 0.4
    assert within.max() <= 0.6
    assert within.unique().numel() > 200, "drawn again, not cut off"
    kept = drawn(0.0, 1.0)
    assert torch.equal(within[(kept >= 0.4) & (kept <= 0.6)], kept[(kept >= 0.4) & (kept <= 0.6)])
    assert drawn(0.9, 1.0, 8, logit_mean=-30.0, logit_std=0.1).unique().tolist() == [
        pytest.approx(0.9)
    ], "one that lies elsewhere is cut off"


def schedule(prediction: str) -> DDPMScheduler:
    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
    )


def test_a_prediction_that_no_training_is_tested_with_is_refused() -> None:
    with pytest.raises(UserError, match="prediction_type: sample"):
        Denoising(schedule("sample"), None)


def family_of(objective: str) -> Any:
    return SimpleNamespace(
        facts=SimpleNamespace(objective=objective, uniform_draws=0.0),
        shift_of=lambda height, width, frames: 2.5,
        sigma_range=lambda: (0.1, 0.9),
        terminal=lambda: 0.2,
        sampler_shift_of=lambda height, width, frames: 6.0,
    )


def test_a_family_of_flows_is_trained_on_its_own_shift_and_sigmas(tmp_path: Path) -> None:
    objective = build_objective(JobSpec(), family_of("flow"), tmp_path)
    assert isinstance(objective, Flow)
    assert objective.sigmas == (0.1, 0.9)
    assert objective.shift_for(LATENTS) == 2.5


@pytest.mark.parametrize(
    ("values", "shift", "terminal"),
    [
        ({"timestep_sampling": "shift"}, 2.5, 0.2),
        ({"timestep_sampling": "uniform_shift"}, 2.5, 0.2),
        ({"timestep_sampling": "stretched"}, 2.5, 0.0),
        ({"timestep_sampling": "uniform"}, 2.5, 0.0),
        ({"timestep_sampling": "shift", "flow_shift": 4.0}, 4.0, 0.0),
        ({"timestep_sampling": "shift", "flow_shift": "sampler"}, 6.0, 0.0),
    ],
)
def test_a_schedulers_terminal_belongs_to_its_shift(
    values: dict[str, Any], shift: float, terminal: float, tmp_path: Path
) -> None:
    objective = build_objective(JobSpec(**values), family_of("flow"), tmp_path)
    assert isinstance(objective, Flow)
    assert (objective.shift_for(LATENTS), objective.terminal) == (shift, terminal)


def test_draws_that_would_reach_the_data_end_at_the_terminal() -> None:
    """As diffusers' `stretch_shift_to_terminal`, of infinitely many steps."""
    plain = flow(3.0, timestep_sampling="shift")
    ended = Flow(plain.spec, plain.shift_of, terminal=0.1)
    assert torch.allclose(many_sigmas(ended), 1 - (1 - many_sigmas(plain)) * 0.9)
    assert_levels_are_quantiles(ended, ONE, draws=2000)


def test_a_model_is_trained_on_the_noise_schedule_in_its_directory(tmp_path: Path) -> None:
    schedule("v_prediction").save_pretrained(tmp_path / "scheduler")
    objective = build_objective(JobSpec(snr_gamma=5.0), family_of("denoise"), tmp_path)
    assert isinstance(objective, Denoising)
    assert torch.equal(objective.scheduler.alphas_cumprod, schedule("epsilon").alphas_cumprod)
    assert objective.scheduler.config.prediction_type == "v_prediction"
    assert objective.snr_gamma == 5.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "FlowMatchEulerDiscreteScheduler"),
        ({}, "none"),
        (None, "none"),
    ],
)
def test_a_foreign_noise_schedule_is_refused(
    tmp_path: Path, settings: dict[str, Any] | None, named: str
) -> None:
    """DDPM's own betas would be taken without a word."""
    if settings is not None:
        (tmp_path / "scheduler").mkdir()
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError) as caught:
        build_objective(JobSpec(), family_of("denoise"), tmp_path)
    assert caught.value.message.startswith(f"the model's scheduler ({named}) has a noise schedule ")


def test_levels_of_timesteps_are_quantiles_of_those_that_are_drawn() -> None:
    assert_levels_are_quantiles(Denoising(schedule("epsilon"), None), ONE, draws=2000)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noise_can_be_told_from_what_denoising_asks_for(prediction: Any) -> None:
    scheduler = schedule(prediction)
    objective = Denoising(scheduler, None)
    problem = problem_of_draw(objective, LATENTS, sample_generators(1, 2, range(4)))
    alpha = scheduler.alphas_cumprod[problem.level].sqrt().view(-1, 1, 1, 1)
    sigma = (1 - alpha**2).sqrt()
    noise = (problem.noisy - alpha * LATENTS) / sigma
    expected = noise if prediction == "epsilon" else alpha * noise - sigma * LATENTS
    assert torch.allclose(problem.target, expected, atol=1e-4)
    assert problem.weight is None


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weights(prediction: Any) -> None:
    scheduler = schedule(prediction)
    objective = Denoising(scheduler, snr_gamma=5.0)
    latents = torch.zeros(64, 1, 1, 1)
    problem = problem_of_draw(objective, latents, sample_generators(0, 0, range(64)))
    snr = compute_snr(scheduler, problem.level)
    expected = snr.clamp(max=5.0) / (snr if prediction == "epsilon" else snr + 1)
    assert problem.weight is not None
    assert torch.allclose(problem.weight, expected, rtol=1e-4)
    assert problem.weight.min() < problem.weight.max()


def test_a_step_without_any_signal_has_a_finite_weight() -> None:
    for prediction, expected in (("epsilon", 1.0), ("v_prediction", 0.0)):
        scheduler = DDPMScheduler(rescale_betas_zero_snr=True, prediction_type=prediction)
        objective = Denoising(scheduler, snr_gamma=5.0)
        weight = objective._weight(torch.tensor([999]))
        assert weight is not None
        assert weight.item() == pytest.approx(expected, abs=1e-6)


def problem_of(target: torch.Tensor, weight: torch.Tensor | None = None) -> NoisySample:
    return NoisySample(target, torch.zeros(len(target)), target, weight)


def test_losses_by_hand() -> None:
    prediction = torch.tensor([[0.1, 3.0], [0.0, -1.0]]).view(2, 1, 1, 2)
    problem = problem_of(torch.zeros(2, 1, 1, 2))
    mse = (0.01 + 9 + 0 + 1) / 4
    assert loss_of(prediction, problem, JobSpec()).item() == pytest.approx(mse)
    smooth = 2 * sum(math.hypot(error, 0.5) - 0.5 for error in (0.1, 3, 0, 1)) / 4
    for kind, wanted in (("smooth_l1", smooth), ("huber", 0.5 * smooth)):
        spec = JobSpec(loss_type=kind, huber_c=0.5)
        assert loss_of(prediction, problem, spec).item() == pytest.approx(wanted)


@given(
    kind=st.sampled_from(["huber", "smooth_l1"]),
    how=st.sampled_from(["snr", "exponential", "constant"]),
    c=st.floats(1e-6, 1e3),
    sigmas=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    scale=st.floats(1e-2, 100),
)
@settings(max_examples=40)
def test_losses_and_gradients_are_sd_scripts(
    kind: str, how: str, c: float, sigmas: list[float], scale: float
) -> None:
    """`conditional_loss` and `get_huber_threshold_if_needed`, in fp64."""
    spec = JobSpec(loss_type=kind, huber_c=c, huber_schedule=how)
    level, data = torch.tensor(sigmas), LATENTS[:2]
    problem = Flow(spec, lambda *_: 1.0).add_noise(data, NoiseDraw(level, LATENTS[2:]))
    prediction = (problem.target + scale * LATENTS[1:3]).requires_grad_()
    loss = loss_of(prediction, problem, spec)
    loss.backward()  # type: ignore[no-untyped-call]

    exact = prediction.detach().double().requires_grad_()
    sigma = level.double()
    ratio = sigma / (1 - sigma)  # of noise to data; infinite in pure noise
    thresholds = {
        "snr": (1 - c) / (1 + ratio) ** 2 + c,
        "exponential": torch.exp(math.log(c) * sigma),
        "constant": torch.full_like(sigma, c),
    }
    threshold = thresholds[how].view(-1, 1, 1, 1)
    error = exact - problem.target.double()
    each = 2 * (torch.sqrt(error**2 + threshold**2) - threshold)
    wanted = (each * threshold if kind == "huber" else each).mean()
    wanted.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert prediction.grad is not None
    assert torch.allclose(prediction.grad.double(), exact.grad, rtol=1e-4, atol=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("c", [1e-6, 100.0, 1000.0])
def test_a_huber_loss_loses_no_digits_to_its_threshold(c: float) -> None:
    error = torch.tensor([0.0, 1e-3, 1.0]).view(3, 1, 1, 1)
    spec = JobSpec(loss_type="huber", huber_c=c, huber_schedule="constant")
    prediction = error.clone().requires_grad_()
    loss = loss_of(prediction, problem_of(torch.zeros_like(error)), spec)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = sum(2 * c * d**2 / (math.hypot(d, c) + c) for d in (1e-3, 1.0)) / 3
    slopes = [2 * c * d / math.hypot(d, c) / 3 for d in (0.0, 1e-3, 1.0)]
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert prediction.grad is not None
    assert prediction.grad.flatten().tolist() == pytest.approx(slopes, rel=1e-5)


@pytest.mark.parametrize("how", ["snr", "exponential"])
def test_thresholds_go_from_one_to_huber_c(how: Any) -> None:
    sigma = torch.tensor([0.0, 0.5, 1.0])
    middle = 0.1 + 0.9 / 4 if how == "snr" else math.sqrt(0.1)
    assert Huber(0.1, how).thresholds(sigma, 1 - sigma).tolist() == pytest.approx([1, middle, 0.1])
    assert scheduled(JobSpec(loss_type="huber", huber_schedule=how)) == Huber(0.1, how)
    assert scheduled(JobSpec(loss_type="huber", huber_schedule="constant")) is None
    assert scheduled(JobSpec(huber_schedule=how)) is None


@pytest.mark.parametrize("how", ["snr", "exponential"])
def test_thresholds_of_timesteps_follow_the_models_noise(how: Any, tmp_path: Path) -> None:
    scheduler = schedule("epsilon")
    scheduler.save_pretrained(tmp_path / "scheduler")
    spec = JobSpec(loss_type="huber", huber_schedule=how, huber_c=0.2)
    objective = build_objective(spec, family_of("denoise"), tmp_path)
    problem = problem_of_draw(objective, LATENTS, sample_generators(0, 0, range(4)))
    alphas = scheduler.alphas_cumprod[problem.level]
    snr = 0.8 / (1 + ((1 - alphas) / alphas).sqrt()) ** 2 + 0.2
    wanted = snr if how == "snr" else 0.2 ** (problem.level / 1000)
    assert problem.threshold is not None
    assert torch.allclose(problem.threshold, wanted)
    plain = build_objective(JobSpec(), family_of("denoise"), tmp_path)
    assert problem_of_draw(plain, LATENTS, sample_generators(0, 0, range(4))).threshold is None


def test_a_weight_belongs_to_a_sample() -> None:
    prediction = torch.tensor([[1.0, 1.0], [2.0, 2.0]]).view(2, 1, 1, 2)
    problem = problem_of(torch.zeros(2, 1, 1, 2), torch.tensor([0.5, 0.25]))
    assert loss_of(prediction, problem, JobSpec()).item() == pytest.approx((0.5 + 1.0) / 2)
    both = loss_of(prediction, problem, JobSpec(), torch.tensor([3.0, 2.0]))
    assert both.item() == pytest.approx((0.5 * 3 + 1.0 * 2) / 2)


@pytest.mark.parametrize("more", [(), (1,)])  # an image's cells, a video's
def test_a_mask_belongs_to_the_cells(more: tuple[int, ...]) -> None:
    prediction = torch.tensor([[1.0, 3.0], [2.0, 2.0]]).view(2, 1, *more, 1, 2)
    mask = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).view(2, 1, *more, 1, 2)
    problem = problem_of(torch.zeros_like(prediction))
    loss = loss_of(prediction, problem, JobSpec(), mask)
    assert loss.item() == pytest.approx(((1 + 0) / 2 + (2 + 2) / 2) / 2)


def test_the_loss_is_computed_in_fp32() -> None:
    prediction = torch.full((1, 1, 1, 1), 300.0, dtype=torch.bfloat16)
    assert loss_of(prediction, problem_of(torch.zeros(1, 1, 1, 1)), JobSpec()).item() == 90000.0


def test_captions_are_dropped_at_the_asked_rate_and_always_alike() -> None:
    drops = [drops_caption(3, step, position, 0.2) for step in range(50) for position in range(20)]
    assert sum(drops) / len(drops) == pytest.approx(0.2, abs=0.04)
    assert drops == [drops_caption(3, s, p, 0.2) for s in range(50) for p in range(20)]
    assert not any(drops_caption(3, 0, position, 0.0) for position in range(20))
    assert all(drops_caption(3, 0, position, 1.0) for position in range(20))
