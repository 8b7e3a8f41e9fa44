"""What is known of a model family without its weights: names, classes, published flavours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.spec.families.references import References

Objective = Literal["flow", "denoising"]
Guidance = Literal["embedded", "classifier_free", "none"]
Attention = Literal["unmasked", "masked_batches", "masked_samples", "fixed"]


@dataclass(frozen=True)
class ShiftLine:
    """A shift of sigma that follows the number of tokens, on a line through two points.

    Attributes:
        few: Tokens at the first point.
        low: mu there.
        many: Tokens at the second point.
        high: mu there.
        linear: Whether mu is the shift itself (`time_shift_type: linear`), and not its logarithm.
        endless: Whether training follows it beyond its points.
    """

    few: int
    low: float
    many: int
    high: float
    linear: bool = False
    endless: bool = False

    def at(self, tokens: int, *, extrapolate: bool = False) -> float:
        """Return the shift for a number of tokens.

        Args:
            tokens: Of the denoiser, for one sample.
            extrapolate: Follow the line beyond its points, as diffusers' pipelines do. It was
                fitted between them: LTX-Video's reaches 215 at 121 frames of 1216x704.
        """
        if not extrapolate:
            tokens = min(max(tokens, self.few), self.many)
        mu = self.low + (self.high - self.low) * (tokens - self.few) / (self.many - self.few)
        return mu if self.linear else math.exp(mu)


FLUX_LINE: Final = ShiftLine(few=256, low=0.5, many=4096, high=1.15)
"""FLUX.1's (`get_lin_function` of black-forest-labs/flux), which others took over."""


@dataclass(frozen=True)
class Flavour:
    """A published model of a family.

    Attributes:
        hub_id: Where it is published in the layout of diffusers.
        component: The denoiser that is trained, where the model has several.
        folder: Where its published model has that denoiser, if not in a folder of that name, where
            exports have it.
        schedule: Settings of its scheduler, where the published model's are of another denoiser.
        defaults: Keys of a job that are otherwise for this flavour than for its family.
        note: What tells it from the others, in a few words.
        guidance: How `validation_guidance` works, where that is otherwise than in its family.
        latent_step: The family's, where it is another.
        trained_shift: The family's, where it is another.
        undistilled: The flavour that it was distilled from, to few steps or to need no guidance.
        marks: Entries of its model_index.json that tell it from the others; what is not there is
            false.
        references: How it takes conditioning images; by default as the family does.
        first_frame: Whether it makes videos from their first frame.
        needs_first_frame: Whether it makes no others. It has it in channels of its own then, for
            all frames, and not in the place of the first.
        last_frame: Whether it is given the last frame as well, in the same channels.
        sees_first_frame: Whether an image encoder reads it too, and the last one if there is one.
        gray_frames: Whether gray frames follow it in those channels. Without, the latents of all
            other frames are 0, and the image encoder sees it as large as the video.
        keyframes: Whether it is in tokens of its own instead, beside those of the whole video, and
            so is a last frame; its text encoder sees both.
        longest_text: The most tokens of a text; None for any number.
        transformer: Class of its denoiser, where it is another than the family's.
        more_blocks: Repeated block classes that only this denoiser has.
        not_routed: Why `tread` cannot be used, in words, where it can be in the family.
        widened: The layer that gets as many inputs more, for a conditioning image, as the published
            model has; empty where the model is trained as it is.
    """

    hub_id: str
    component: str | None = None
    folder: str = ""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    guidance: Guidance | None = None
    latent_step: int | None = None
    trained_shift: float | None = None
    undistilled: str | None = None
    marks: Mapping[str, Any] = field(default_factory=dict)
    references: References | None = None
    first_frame: bool = False
    needs_first_frame: bool = False
    last_frame: bool = False
    sees_first_frame: bool = False
    gray_frames: bool = True
    keyframes: bool = False
    longest_text: int | None = None
    transformer: str = ""
    more_blocks: tuple[str, ...] = ()
    not_routed: str = ""
    widened: str = ""


@dataclass(frozen=True)
class Family:
    """What is known of a family without its weights.

    Attributes:
        name: The `model_family` key.
        title: What people call it.
        pipelines: `_class_name`s of `model_index.json` that this family trains, the usual one
            first.
        transformer: Class of the denoiser.
        other_names: What published configs call it besides.
        blocks: Its repeated block classes, wrapped by default.
        flavours: Published models by name; the first is the usual one.
        objective: Flow matching, or denoising on a discrete schedule; what the latter predicts,
            epsilon or v, is in the model's scheduler_config.json.
        guidance: How `validation_guidance` works: as an input of the model (embedded), or by a
            second prediction for the negative prompt (classifier_free), or not at all (none).
        guided_above: Scales up to this one make no second prediction (classifier_free).
        true_cfg: Whether the pipeline also takes a negative prompt with a true_cfg_scale, where
            guidance is an input of the model.
        text_negatives: Whether a negative prompt says what guidance leads away from.
        component: Directory of the denoiser, and its name in the pipeline.
        context_parallel: Whether ranks can share its tokens (`engine.parallel.context_parallel`).
        splits_text: Whether it splits text tokens too, so that their number must divide.
        fills_up: Whether tokens are added where their number does not divide.
        experts: Whether its tokens are routed to experts.
        text_lora: The text encoders that a LoRA can be trained on, by their names in the pipeline,
            each with what its modules' names begin with in kohya's scripts; none of most families.
        told_sizes: Whether its denoiser takes images' original sizes and crops as an input.
        attention: What its denoiser calls attention with, which decides what `attention_backend`
            can be: "unmasked"; "masked_batches", with a mask where captions in a batch differ in
            length, which no flash attention supports; "masked_samples", in samples too; or "fixed",
            in diffusers classes that have no setting for the kernel.
        routed_blocks: Lists of blocks that `tread` can route tokens around, in order of forward,
            each with the entry of the denoiser's config that counts them; empty if it cannot.
        not_routed: Why it cannot, in words.
        keeps_fp32: Whether its denoiser lists parts that are to stay in fp32.
        latent_step: Sides of images are multiples of this, in pixels.
        longest_side: Of images, in pixels, by the denoiser's config; None for any, or where a
            config does not say.
        frame_step: Videos have a multiple of this many frames, plus `frame_rest`; 0 for images.
        sound: Whether its models can be trained with the sound of videos.
        rate: Frames per second that its denoiser places sound by; None where it takes `fps`.
        sound_layers: Whether layers of their own make it, which a LoRA adapts where it is trained.
        frame_rest: See `frame_step`. An image is a video of one frame with any.
        tokenizer: The tokenizer whose tokens `max_sequence_length` counts.
        overflows_fp16: Parts of it that are known to exceed what fp16 can hold, in words; empty if
            none is. T5 is not: transformers keeps its `wo` in fp32 and clamps the rest.
        unused: Components of its published models that no job reads: they are not fetched, and may
            be missing.
        supplied: Directories that the published models lack, each with what a person puts there.
        defaults: Keys of a job that have another default than usual.
        references: How its models take conditioning images; None if they take none.
        trained_shift: The shift of sigma that training draws with by default; None for the one in
            the model's scheduler. Samplers have another where they make few steps of it.
        uniform_draws: The share of `stretched` draws that are uniform instead.
        shifts_by_tokens: Whether the shift of its schedulers follows the number of tokens.
    """

    name: str
    title: str
    pipelines: tuple[str, ...]
    transformer: str
    blocks: tuple[str, ...]
    flavours: Mapping[str, Flavour] = field(default_factory=dict)
    objective: Objective = "flow"
    guidance: Guidance = "classifier_free"
    guided_above: float = 1.0
    true_cfg: bool = True
    text_negatives: bool = True
    component: str = "transformer"
    other_names: tuple[str, ...] = ()
    context_parallel: bool = False
    splits_text: bool = True
    fills_up: bool = False
    routed_blocks: Mapping[str, str] = field(default_factory=dict)
    not_routed: str = ""
    keeps_fp32: bool = False
    experts: bool = False
    text_lora: Mapping[str, str] = field(default_factory=dict)
    told_sizes: bool = False
    attention: Attention = "unmasked"
    latent_step: int = 16
    longest_side: Callable[[Mapping[str, Any]], int | None] | None = None
    frame_step: int = 0
    frame_rest: int = 1
    sound: bool = False
    rate: float | None = None
    sound_layers: bool = False
    tokenizer: str = "tokenizer"
    overflows_fp16: str = ""
    unused: tuple[str, ...] = ()
    supplied: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    references: References | None = None
    trained_shift: ShiftLine | float | None = None
    uniform_draws: float = 0.0
    shifts_by_tokens: bool = False

    @property
    def modular(self) -> bool:
        """Whether diffusers has blocks for it, and no stock pipeline."""
        return self.pipelines[0].endswith("ModularPipeline")

    def frames_of(self, most: int) -> int:
        """Return the largest number of frames of a video, at most `most`; 1 for an image."""
        if not self.frame_step or most < self.frame_rest:
            return 1
        return (most - self.frame_rest) // self.frame_step * self.frame_step + self.frame_rest

    @property
    def shortest(self) -> int:
        """Frames of its shortest video; 1 if it makes images."""
        return self.frame_rest + (self.frame_step if self.frame_rest == 1 else 0)

    @property
    def lengths(self) -> str:
        """Return the numbers of frames that its videos have, in words."""
        return f"{self.frame_step}n + {self.frame_rest}"

    @property
    def transformers(self) -> tuple[str, ...]:
        """Return the classes of its denoisers, the usual one first."""
        own = (entry.transformer for entry in self.flavours.values() if entry.transformer)
        return tuple(dict.fromkeys((self.transformer, *own)))

    def transformer_of(self, flavour: str | None) -> str:
        """Return the class of a flavor's denoiser."""
        entry = self.flavours.get(flavour or "")
        return (entry.transformer if entry else "") or self.transformer

    def blocks_of(self, flavour: str | None) -> tuple[str, ...]:
        """Return the repeated block classes of a flavor's denoiser."""
        entry = self.flavours.get(flavour or "")
        return self.blocks + (entry.more_blocks if entry else ())

    def not_routed_of(self, flavour: str | None) -> str:
        """Return why `tread` cannot be used with a flavor; empty if it can."""
        entry = self.flavours.get(flavour or "")
        return self.not_routed or (entry.not_routed if entry else "")

    def component_of(self, flavour: str | None) -> str:
        """Return the denoiser that a flavor trains."""
        entry = self.flavours.get(flavour or "")
        return (entry.component if entry else None) or self.component

    def schedule_of(self, flavour: str | None) -> Mapping[str, Any]:
        """Return the settings of a flavor's scheduler that its published model has otherwise."""
        entry = self.flavours.get(flavour or "")
        return entry.schedule if entry else {}

    def guidance_of(self, flavour: str | None) -> Guidance:
        """How `validation_guidance` works with a flavour."""
        entry = self.flavours.get(flavour or "")
        return (entry.guidance if entry else None) or self.guidance

    def true_cfg_of(self, flavour: str | None) -> bool:
        """`true_cfg` of a flavour; pipelines that are given images in channels take none."""
        takes = self.references_of(flavour)
        return self.true_cfg and (takes is None or takes.fit is not None)

    def latent_step_of(self, flavour: str | None) -> int:
        """Return the pixels of which the sides of a flavor's images are multiples."""
        entry = self.flavours.get(flavour or "")
        return (entry.latent_step if entry else None) or self.latent_step

    def trained_shift_of(self, flavour: str | None) -> ShiftLine | float | None:
        """Return the shift that training a flavor draws with; None for its scheduler's."""
        entry = self.flavours.get(flavour or "")
        return (entry.trained_shift if entry else None) or self.trained_shift

    def references_of(self, flavour: str | None) -> References | None:
        """How a flavour takes conditioning images; None if it takes none."""
        entry = self.flavours.get(flavour or "")
        return (entry.references if entry else None) or self.references

    def makes_layers(self, flavour: str | None) -> bool:
        """Whether a flavour splits an image into layers with transparency."""
        takes = self.references_of(flavour)
        return takes is not None and takes.layers

    def widened_of(self, flavour: str | None) -> str:
        """Return the layer with inputs for a conditioning image; empty if there is none."""
        entry = self.flavours.get(flavour or "")
        return entry.widened if entry else ""

    def takes_first_frame(self, flavour: str | None) -> bool:
        """Whether a flavour makes videos from their first frame."""
        entry = self.flavours.get(flavour or "")
        return entry is not None and entry.first_frame

    def needs_first_frame(self, flavour: str | None) -> bool:
        """Whether a flavour makes no other videos."""
        entry = self.flavours.get(flavour or "")
        return entry is not None and entry.needs_first_frame

    def needs_last_frame(self, flavour: str | None) -> bool:
        """Whether a flavour makes videos between their first and their last frame."""
        entry = self.flavours.get(flavour or "")
        return entry is not None and entry.last_frame

    def takes_keyframes(self, flavour: str | None) -> bool:
        """Whether a flavour takes a first and a last frame beside the video."""
        entry = self.flavours.get(flavour or "")
        return entry is not None and entry.keyframes

    def sees_images(self, flavour: str | None) -> bool:
        """Whether what a flavour is conditioned on goes through an encoder of texts or images."""
        entry, takes = self.flavours.get(flavour or ""), self.references_of(flavour)
        if entry is not None and (entry.sees_first_frame or entry.keyframes):
            return True
        return takes is not None and takes.seen is not None

    def defaults_of(self, flavour: str | None) -> dict[str, Any]:
        """Return the job keys that have another default with this family and flavor."""
        entry = self.flavours.get(flavour or "")
        return {**self.defaults, **(entry.defaults if entry else {})}
