"""What the tests of all families share: their toys, and stock pipelines around them."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoTransformer3DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from engine import families
from engine.data.encode.texts import prompt_images
from engine.data.index.views import prompt_conditions
from engine.data.prepare import read_pictures
from engine.families.shared.collate import collate
from engine.toy import write_toy
from jobs.spec.families import FAMILIES, references
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import requests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from engine.families import Family
    from jobs.spec.families import Family as Facts
    from jobs.spec.families import References
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest

PICTURES: Final = 4
PROMPT: Final = "a red circle on a blue background"
NEGATIVE: Final = "a green star"
DEVICE: Final = torch.device("cpu")
_SMALL: Final = 64  # pixels
_FPS: Final = 8.0  # of videos that are trained on from their first frames

# Families with models of more than one layout: another flavour to test, beside the usual one.
OTHERS: Final[dict[str, tuple[str, ...]]] = {
    "flux": ("kontext",),
    "flux2": ("klein-base-4b", "klein-4b"),
    "ltxvideo": ("13b-0.9.7-dev",),
    "ltx2": ("2.5-22b", "2.3-22b"),
    "sd3": ("3-medium",),
    "wan": ("2.2-ti2v-5b", "2.2-t2v-a14b-low"),
    "sana": ("1.6b",),
    "stable_diffusion": ("2.1",),
    "hidream": ("dev",),
}


# A flow that is not video, a flow that is, and a U-Net that predicts noise: all others are slow.
# Layouts that make nothing without conditioning images.
CONDITIONED: Final = (
    *("qwen_image:edit", "qwen_image:edit-2509", "qwen_image:layered"),
    *("wan:2.2-i2v-a14b-low", "wan:2.1-vace-1.3b", "wan:2.1-flf2v-14b-720p"),
    "wan:2.2-vace-fun-a14b-low",
    *("flux:control", "flux:canny", "flux:fill"),
    "hunyuanvideo15:480p-i2v-step-distilled",
    "minimax_h3:fl2va",  # which makes videos from text as well
)

# Layouts whose jobs train with conditioning images, which some models take or leave.
PAIRED: Final = frozenset(
    {"flux:kontext", "flux2:klein-base-4b", "wan:2.2-ti2v-5b", "ltxvideo:13b-0.9.7-dev"}
    | {"ltx2:2.5-22b", *CONDITIONED}
)

FAST: Final = frozenset({"flux", "wan", "sdxl"})


def chosen(names: Iterable[str]) -> list[Any]:
    """Parameters of a test, of which those that are not fast are marked."""
    return [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in names]


def toys_root(factory: pytest.TempPathFactory) -> Path:
    """One place for the test files of all workers of a run, so that toys are written once."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "families"


def cases() -> list[str]:
    """Every layout: `family` or `family:flavour`."""
    return [
        *FAMILIES,
        *(f"{family}:{flavour}" for family, names in OTHERS.items() for flavour in names),
    ]


def shrink_pipelines(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have pipelines, and us, make less than they do.

    Those of Qwen-Image-Edit make images of 64² pixels instead of 1024²; FLUX.3's fills texts up to
    a multiple of 4 tokens instead of 80, so that those of tests differ.

    Args:
        put: Sets an attribute.
    """
    from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import AUTO_BLOCKS

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):

        def smaller(area: int, ratio: float, own: Any = module.calculate_dimensions) -> Any:
            return own(min(area, _SMALL**2), ratio)

        put(module, "calculate_dimensions", smaller)
    put(AUTO_BLOCKS["text_encoder"], "pad_multiple", 4)
    put(references, "_QWEN_SIDE", _SMALL)
    put(references, "_SEEN_SIDE", _SMALL)


@dataclass(frozen=True)
class Case:
    """A family's toy.

    Attributes:
        name: `family` or `family:flavour`.
        root: Where toys are written.
    """

    name: str
    root: Path

    @cached_property
    def paths(self) -> Any:
        name, flavour = self._names
        place = self.root / self.name.replace(":", "-")
        return write_toy(place, name, flavour=flavour, pictures=PICTURES, size=self.side)

    @cached_property
    def family(self) -> Family:
        name, flavour = self._names
        moving = self.first_frame or (self.takes is not None and self.takes.videos)
        fps = _FPS if moving else None
        return families.load(name, flavour, self.paths.model, fps)

    @property
    def _names(self) -> tuple[str, str]:
        name, _, flavour = self.name.partition(":")
        return name, flavour or next(iter(FAMILIES[name].flavours))

    @property
    def flavour(self) -> str:
        return self._names[1]

    @property
    def facts(self) -> Facts:
        return FAMILIES[self._names[0]]

    @property
    def side(self) -> int:
        """Pixels; of families whose VAE shrinks a lot, more."""
        name, flavour = self._names
        return 64 if FAMILIES[name].latent_step_of(flavour) <= 16 else 128

    @property
    def frames(self) -> int:
        return self.facts.shortest

    def spec(self, **changes: Any) -> JobSpec:
        """A small job on the toy, in fp32 on CPU ranks."""
        return load_spec(None, self.values(**changes))

    def values(self, **changes: Any) -> dict[str, Any]:
        name, flavour = self._names
        return {
            "name": name.replace("_", "-"),
            "model_family": name,
            "model_flavour": flavour,
            "pretrained_model_name_or_path": str(self.paths.model),
            **self._data(),
            "device": "cpu",
            "resolution": self.side,
            "max_sequence_length": 64,
            "mixed_precision": "no",
            "validation_num_inference_steps": 2,
            "validation_guidance": FAMILIES[name].guided_above,
            "checkpointing_steps": 0,
            **changes,
        }

    @cached_property
    def videos(self) -> Path:
        """Each picture of the toy, moving to the side, with its caption."""
        return self._moving(self.paths.data, "videos")

    @cached_property
    def control_videos(self) -> Path:
        """The same of the pictures that condition them."""
        return self._moving(self.paths.control, "control_videos")

    def _moving(self, pictures: Path, name: str) -> Path:
        from tests.support.images.videos import record

        root = pictures.with_name(name)
        root.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        for path in sorted(pictures.glob("*.png")):
            video = root / f"{path.stem}.mp4"
            if not video.exists():
                with Image.open(path) as opened:
                    picture = np.asarray(opened.convert("RGB").resize((self.side, self.side)))
                moving = [np.roll(picture, 4 * n, axis=1) for n in range(self.frames)]
                sound = None
                if self.facts.sound and not path.stem.startswith("0002"):  # which is silent
                    sound = rng.normal(0, 0.1, (2, 16_000 * self.frames // 8))
                record(video.with_suffix(".part.mp4"), moving, sound=sound).rename(video)
                if (caption := path.with_suffix(".txt")).exists():
                    video.with_suffix(".txt").write_text(caption.read_text())
        return root

    @property
    def first_frame(self) -> bool:
        """Whether its jobs train from first frames."""
        return self.name in PAIRED and self.takes is None

    @property
    def takes(self) -> References | None:
        """How its model takes conditioning images, if its jobs have some."""
        if self.name not in PAIRED:
            return None
        return FAMILIES[self._names[0]].references_of(self._names[1])

    def _data(self) -> dict[str, Any]:
        if self.name not in PAIRED:
            return {"dataset": str(self.paths.data)}
        if self.takes is None:
            entry: dict[str, Any] = {"path": str(self.videos), "first_frame": True}
            if self.facts.takes_keyframes(self.flavour):
                entry |= {"first_frame": 0.8, "last_frame": 0.5}
            return {"datasets": [entry], "num_frames": self.frames, "fps": _FPS}
        if self.takes.videos:
            masks = write_fill_masks(self.videos, self.frames, self.side)
            places = (self.control_videos, self.paths.control, masks)
            entry = {
                "path": str(self.videos),
                "conditioning_path": [str(place) for place in places],
                "conditioning_roles": ["control", "reference", "fill_mask"],
            }
            return {"datasets": [entry], "num_frames": self.frames, "fps": _FPS}
        entry = {"path": str(self.paths.data)}
        if not self.takes.masks:  # else they are drawn
            layers = [str(path) for path in sorted(self.paths.control.iterdir()) if path.is_dir()]
            entry["conditioning_path"] = layers or str(self.paths.control)
        sized = {} if self.takes.fit is None else {"conditioning_resolution": self.side}
        return {"datasets": [entry], **sized}

    def pictures(self, request: SampleRequest) -> list[Image.Image]:
        """The conditioning images of a request, as the model takes them."""
        takes = self.facts.references_of(self._names[1])
        spec = self.spec(
            validation_prompts=[
                {
                    "prompt": request.prompt,
                    "conditioning_image": list(request.conditioning),
                    **({"conditioning_roles": list(request.roles)} if request.roles else {}),
                    **({"num_frames": request.frames} if self.facts.frame_step else {}),
                }
            ],
            **({"conditioning_resolution": self.side} if takes and takes.fit else {}),
        )
        return prompt_conditions(request, read_pictures(spec))

    def request(self, **changes: Any) -> SampleRequest:
        (request,) = requests_of(self.spec(validation_prompts=[{"prompt": PROMPT} | changes]))
        return request

    @cached_property
    def text(self) -> Any:
        """What encodes prompts, as a rank loads it."""
        with quiet():
            return self.family.load_text_pipeline(self.paths.model, torch.float32)

    def encoded(
        self, prompt: str, *, negative: bool = False, request: SampleRequest | None = None
    ) -> dict[str, torch.Tensor]:
        """An encoded prompt, without a batch dimension; with a request's images, if models do."""
        spec, images = self.spec(), []
        if request is not None:
            pictures = dict(zip(request.conditioning, self.pictures(request), strict=True))
            images = [look.read() for look in prompt_images(request, pictures, spec)]
        length = spec.max_sequence_length
        with torch.no_grad():
            if images:
                return self.family.encode_with_images(self.text, prompt, length, images)
            return self.family.encode(self.text, prompt, length, negative=negative)

    def stock(self, root: Path | None = None) -> Any:
        """The stock pipeline around the toy, or around an export of it."""
        parts = {n: p for n, p in self.text.components.items() if p is not None}
        parts.pop("scheduler", None)
        place = root or self.paths.model
        given: dict[str, Any] = dict.fromkeys(parts)
        if (place / "transformer_full").is_dir():  # as diffusers' documentation of LTX-2.5 has it
            scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
                place, subfolder="scheduler"
            )
            given["scheduler"] = scheduler.from_config(
                scheduler.config, use_dynamic_shifting=True, shift_terminal=0.1
            )
            given["transformer"] = LTX2VideoTransformer3DModel.from_pretrained(
                place, subfolder="transformer_full"
            )
        with quiet():
            pipeline = self.family.pipeline_class().from_pretrained(place, **given)
        # Afterwards: `from_pretrained` knows only classes whose packages are installed.
        pipeline.register_modules(**parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def run(self, pipeline: Any, request: SampleRequest, **options: Any) -> Any:
        """What a person would call the stock pipeline with, given texts."""
        known = inspect.signature(pipeline.__call__).parameters
        words: dict[str, Any] = {"prompt": request.prompt, "max_sequence_length": 64}
        if request.guided:
            words["negative_prompt"] = request.negative_prompt
            if "negative_prompt" not in known:  # FLUX.2 klein's takes it encoded only
                text = self.encoded(request.negative_prompt or "", negative=True)
                words["negative_prompt_embeds"] = text["prompt_embeds"].unsqueeze(0)
        others = self.family.sample_arguments(request, {}, {} if request.guided else None)
        if request.conditioning:
            others |= self.family.reference_arguments(self.pictures(request))
            others.pop("image_crf", None)  # LTX-2's pipeline knows it by its text encoder
            pipeline = self.family.pipeline_with_image(pipeline)
            pipeline.set_progress_bar_config(disable=True)
            known = inspect.signature(pipeline.__call__).parameters
            if self.facts.name == "wan":  # its pipeline cleans texts with ftfy, installed or not
                negative = request.negative_prompt if request.guided else None
                texts = {"": request.prompt, "negative_": negative}
                words = {
                    f"{kind}{name}": tensor.unsqueeze(0)
                    for kind, text in texts.items()
                    if text is not None
                    for name, tensor in self.encoded(text, request=request).items()
                    if name != "image_embeds"
                }
        with torch.no_grad(), told_image_tokens(pipeline):
            return pipeline(
                **{name: value for name, value in words.items() if name in known},
                **others,
                height=request.height,
                width=request.width,
                num_inference_steps=request.steps,
                generator=torch.Generator("cpu").manual_seed(request.seed),
                **options,
            )[0]


def write_fill_masks(
    videos: Path, frames: int, side: int, *, still: bool = False, root: Path | None = None
) -> Path:
    """Write a mask for each video, white and gray to the left and growing, or as one image each."""
    from tests.support.images.videos import record

    root = root or videos.with_name("fill_masks")
    gray = np.zeros((frames, side, side, 3), np.uint8)
    for number in range(frames):
        gray[number, :, : side // 4 + 2 * number] = 255
        gray[number, : side // 5] = 200
        gray[number, side // 5 : side // 3] = 90
    root.mkdir(exist_ok=True)
    for video in videos.glob("*.mp4"):
        if still:
            Image.fromarray(gray[0]).save(root / f"{video.stem}.png")
        elif not (root / video.name).exists():
            record(root / f"{video.stem}.part.mp4", list(gray)).rename(root / video.name)
    return root


@contextmanager
def told_image_tokens(pipeline: Any) -> Iterator[None]:
    """Have Qwen-Image-Edit's stock pipeline pass on all that its processor returns.

    So it does from diffusers' pull request 14189 on; other pipelines are left as they are.
    """
    processor, encoder = (getattr(pipeline, name, None) for name in ("processor", "text_encoder"))
    if not callable(processor) or encoder is None:
        yield
        return
    returned: list[Any] = []

    def process(*args: Any, **kwargs: Any) -> Any:
        returned.append(processor(*args, **kwargs))
        return returned[-1]

    pipeline.processor = process
    hook = encoder.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**(returned or [{}])[-1], **kwargs}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()
        pipeline.processor = processor


def batch_of(*texts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return collate(texts)


class quiet:
    """Without the libraries' advice and bars."""

    def __enter__(self) -> None:
        self._before = diffusers_logging.get_verbosity()
        diffusers_logging.set_verbosity_error()
        diffusers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        diffusers_logging.set_verbosity(self._before)
        diffusers_logging.enable_progress_bar()


class Original:
    """A function in the place of another one; where it is copied, the other one is.

    LTX-2's pipeline copies its scheduler for the sound.
    """

    def __init__(self, replacement: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._replacement, self._own = replacement, own

    def __call__(self, *words: Any, **names: Any) -> Any:
        return self._replacement(*words, **names)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._own, memo)


def without_sound(transformer: Any) -> Any:
    """Keep what LTX-2's transformer says of a video from the sound, as in training."""
    return transformer.register_forward_pre_hook(
        lambda _, args, names: (args, names | {"isolate_modalities": True}), with_kwargs=True
    )


class Spied:
    """The noisy latents that a pipeline's denoiser sees, and the prediction its scheduler gets.

    Attributes:
        sounds: The noisy rows of sound that it sees with them, where the video depends on them.
    """

    def __init__(self, case: Case, request: SampleRequest) -> None:
        self.pipeline = case.stock()
        if case.facts.name == "ltx2":
            without_sound(self.pipeline.transformer)
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.sounds: list[torch.Tensor] = []
        scheduler, fed = self.pipeline.scheduler, []
        denoiser = getattr(self.pipeline, case.family.component)

        def hear(module: Any, args: Any, names: dict[str, Any]) -> None:
            if "audio_hidden_states" in names and case.facts.name != "ltx2":
                self.sounds.append(names["audio_hidden_states"].clone())

        denoiser.register_forward_pre_hook(hear, with_kwargs=True)
        # MiniMax-H3's times and velocity go from noise to data.
        backwards = "num_train_timesteps" not in scheduler.config
        step, scale = (
            scheduler.step,
            scheduler.scale_model_input if hasattr(scheduler, "scale_model_input") else None,
        )

        def spy(output: Any, timestep: Any, sample: Any, *words: Any, **names: Any) -> Any:
            noisy = fed[-1] if fed else sample
            level = torch.as_tensor(timestep)
            if backwards:
                level = 1 - level
            elif case.family.facts.objective == "flow":  # some schedulers round timesteps
                level = level / scheduler.config.num_train_timesteps
            # With timesteps for each token, steps go the other way.
            given = -output if backwards or "per_token_timesteps" in names else output
            self.seen.append(
                (
                    self._whole(case, noisy, request),
                    level.view(1),
                    self._whole(case, given, request),
                )
            )
            return step(output, timestep, sample, *words, **names)

        def scaled(sample: Any, *words: Any) -> Any:
            assert scale is not None
            result = scale(sample, *words)
            fed.append(result[:1])
            return result

        scheduler.step = Original(spy, step)
        if scale is not None:
            scheduler.scale_model_input = scaled
        case.run(self.pipeline, request, output_type="latent")

    def _whole(self, case: Case, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        return case.family.unpack(self.pipeline, latents, request).float()
