"""Class images: what the base model makes of a class prompt, to be trained on as regularization.

Made before the data is read, by all ranks in lockstep with the sampler of the job, one image a
rank and round. Those that are there already are kept, so a run that was cut off continues, and jobs
with the same base and prompt share them. When it returns, base and text encoders are gone from
memory: the adapter's model is built later, as in any job.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.data.encode.texts import Text, Texts, prepare_texts
from engine.data.index.captions import prompt_text
from engine.data.read import class_images
from engine.ranks.team import FileBarrier, StoppedError
from engine.sample.frozen_denoiser import frozen_denoiser
from engine.sample.sampler import Sampler
from jobs.errors import UserError
from jobs.spec.keys.prompts import class_prompts, requests_of
from jobs.spec.rules.cascade import settle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from PIL.Image import Image

    from engine.ranks.team import Team
    from engine.run_context import RunContext
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest


@dataclass(frozen=True)
class _Prompts:
    """The class prompt and its negative one, encoded."""

    spec: JobSpec
    texts: Texts
    pictures: Mapping[str, Image] = field(default_factory=dict)

    def prompt(
        self, text: str, request: SampleRequest, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        return self.texts.encoded(Text(prompt_text(text, self.spec), negative))


def add_class_images(run: RunContext) -> JobSpec:
    """Make the class images that are missing; a collective.

    Returns:
        The job with them as one more dataset; as it is if it wants none.

    Raises:
        StoppedError: A rank has seen one; raised on all of them. What was made is kept.
        UserError: They cannot be written.
    """
    spec = run.spec
    if not spec.num_class_images:
        return spec
    # Meetings of its own: preparing the data meets at places of the same names.
    token = f"{run.world.token}-class"
    barrier = FileBarrier(run.run_dir, token, run.world.rank, run.world.size)
    run = replace(run, barrier=barrier)
    folder = class_images.folder_of(spec, run.model_root)
    if missing := _agree(folder, spec.num_class_images, "missing", run):
        run.telemetry.say(
            f"making {len(missing)} class images of “{spec.class_prompt}” in {folder}"
        )
        _make(replace(run, spec=_sampled(spec, missing)), folder, missing)
        if left := _agree(folder, spec.num_class_images, "made", run):
            raise UserError(
                f"{len(left)} of {spec.num_class_images} class images could not be written to "
                f"{folder}",
                "free space, or set cache_dir to another directory",
            )
    return class_images.with_class_images(spec, folder)


def _agree(folder: Path, count: int, place: str, team: Team) -> list[int]:
    """Return the numbers of the images that are not there, as rank 0 sees it."""
    if team.world.main:
        present = class_images.numbers_in(folder)
        team.arrive(place, {"numbers": [n for n in range(count) if n not in present]})
    team.barrier.wait(place, ranks=1)
    numbers: list[int] = team.words(place)[0]["numbers"]
    return numbers


def _sampled(spec: JobSpec, numbers: Sequence[int]) -> JobSpec:
    """Return the job with nothing but these images to sample."""
    prompts = class_prompts(spec, numbers)
    return settle(spec).model_copy(update={"validation_prompts": prompts, "use_ema": False})


def _make(run: RunContext, folder: Path, numbers: Sequence[int]) -> None:
    request = requests_of(run.spec)[0]
    texts_needed = [Text(prompt_text(request.prompt, run.spec))]
    if request.guided and request.negative_prompt is not None:
        texts_needed.append(Text(prompt_text(request.negative_prompt, run.spec), negative=True))
    texts = prepare_texts(run, class_images.cache_root(run.spec), texts_needed)
    sampler = Sampler(run, _Prompts(run.spec, texts), numbers)
    with frozen_denoiser(run, run.family.component) as model:
        sampler.sample(model, folder, 0)
        del model
    texts.close()
    if any(run.world.any([run.stop_requested()])):
        raise StoppedError("class images")
