"""Compute the shapes of the inputs of a family's `predict`: latents and encoded captions.

Both follow from the denoiser's config, except for a few sizes of other components that are the same
in all published models of a family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.families.shared.references import (
    BEGINNING,
    FIRST_FRAME,
    KEYFRAME,
    REFERENCE,
    SOUND,
    SOUND_NOISE,
    SOUND_WEIGHT,
)
from jobs.errors import UserError
from jobs.spec.families import (
    frames_beside,
    get_family,
    makes_layers,
    needs_first_frame,
    references_of,
    takes_control_videos,
    takes_keyframes,
)
from jobs.spec.keys.prompts import layers_of, requests_of
from jobs.spec.rules.buckets import sizes_of
from jobs.spec.values.quoted_text import most_quoted_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.values.datasets import Role

_LONGEST_VIDEO: Final = (
    81  # frames; the limit of `engine.data.index.data_index` without `num_frames`
)
_CLIP_TOKENS: Final = 77
_CLIP_PATCHES: Final = 257
_SIGLIP_PATCHES: Final = 729
_SEEN_CELL: Final = 28  # pixels per side of a Qwen2.5-VL token
_AROUND_SEEN: Final = 6  # tokens that delimit and number an image
_QWEN3_CELL: Final = 32  # pixels per side of a Qwen3-VL token
_LEAST_SEEN: Final = 65536  # pixels of an image in its processor's settings
_H3_SOUNDS: Final = 40  # latents of MiniMax-H3's sound per second and channel
_AROUND_KEYFRAME: Final = 8  # tokens that delimit and number a frame
_FIXED_TEXT: Final = 512  # tokens, for Anima, and for Wan's models that see the first frame
_LARGE: Final = 1024  # scale factor beyond which every rule shrinks an image
_MASKS: Final = 64  # channels of a mask of a control video
_LLAMA_LAYERS: Final = 32  # of Llama 3.1 8B, which HiDream uses


@dataclass(frozen=True)
class Cells:
    """The compression of a family's latents.

    Attributes:
        side: Pixels per latent side.
        frames: Frames per latent, except for the first; 0 for images.
        chunk: Frames that are encoded together, of which the last chunk loses some latents; 0 for
            all.
    """

    side: int = 8
    frames: int = 0
    chunk: int = 0

    def latents(self, frames: int) -> int:
        """Return the latents of a video."""
        if self.chunk and frames > 1:  # AutoencoderKLMiniMaxH3: 17n + 5 frames are 5n + 2 latents
            return frames // self.chunk * -(-self.chunk // self.frames) + 2
        return (frames - 1) // self.frames + 1


CELLS: Final = {
    "flux2": Cells(16),
    "flux3": Cells(16),
    "ideogram4": Cells(16),
    "sana": Cells(32),
    "wan": Cells(8, 4),
    "hunyuanvideo": Cells(8, 4),
    "hunyuanvideo15": Cells(16, 4),
    "ltxvideo": Cells(32, 8),
    "ltx2": Cells(32, 8),
    "minimax_h3": Cells(16, 4, chunk=17),
}
_PACKED: Final = ("flux", "chroma", "qwen_image", "krea2")  # their `in_channels` count 2×2 latents


def latents_shape(
    spec: JobKeys, config: Mapping[str, Any], size: tuple[int, int], frames: int = 1
) -> tuple[int, ...]:
    """Return `(C, h, w)` or, for families that train on videos or layers, `(C, f, h, w)`.

    Args:
        spec: The job.
        config: The denoiser's config.
        size: Width and height in pixels.
        frames: Frames of the video, or an image and its layers.
    """
    cells = CELLS.get(spec.model_family, Cells())
    if spec.model_family == "wan" and config["in_channels"] == 48:  # TI2V-5B has its own VAE
        cells = Cells(16, 4)
    width, height = (pixels // cells.side for pixels in size)
    # `in_channels` may include the channels of a conditioning image.
    beside = spec.model_family in ("wan", "flux", "hunyuanvideo15") and config.get("out_channels")
    channels = (beside or config["in_channels"]) // (4 if spec.model_family in _PACKED else 1)
    if makes_layers(spec) and frames > 1:
        return channels, frames, height, width
    if not cells.frames:
        return channels, height, width
    return channels, cells.latents(frames), height, width


def reference_shapes(
    spec: DataPlanKeys,
    config: Mapping[str, Any],
    size: tuple[int, int],
    count: int,
    frames: int = 1,
    *,
    training: bool = True,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype, by name, of the latents of conditioning images shaped like the image.

    Args:
        spec: The job.
        config: The denoiser's config.
        size: Size of the image that they condition.
        count: Number of conditioning images.
        frames: Frames of the video that they condition.
        training: Whether they belong to a training sample rather than a prompt.
    """
    if not count:
        return {}
    if needs_first_frame(spec):
        frames = frames_beside(spec, frames)
        return {BEGINNING: (latents_shape(spec, config, size, frames), torch.float32)}
    takes, frame = references_of(spec), (latents_shape(spec, config, size), torch.float32)
    if takes_keyframes(spec):
        return {f"{KEYFRAME}{number}": frame for number in range(count)}
    if takes is None:
        return {FIRST_FRAME: frame}
    if takes.videos:
        channels, *cells = latents_shape(spec, config, size, frames)
        channels = 2 * channels + (_MASKS if has_fill_mask(spec, training=training) else 0)
        control = {f"{REFERENCE}0": ((channels, *cells), torch.float32)}
        return control | {f"{REFERENCE}{number}": frame for number in range(1, count)}
    side = spec.conditioning_resolution if training or not takes.fixed else None
    if takes.fit is not None:
        size = takes.fit(size[0] * _LARGE, size[1] * _LARGE, side).size
    shape = latents_shape(spec, config, size)
    if takes.masks:  # each pixel of a latent's cell
        shape = (shape[0] + CELLS.get(spec.model_family, Cells()).side ** 2, *shape[1:])
    return {f"{REFERENCE}{number}": (shape, torch.float32) for number in range(count)}


def sound_shapes(
    spec: InputKeys, config: Mapping[str, Any], frames: int, *, training: bool = True
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype, by name, of what a denoiser is given of a video's sound.

    Args:
        spec: The job.
        config: The denoiser's config.
        frames: Of the video.
        training: Whether it is a training sample. Samples of models that make sound have some,
            whether it is trained or not, and as many rows of it as the pipeline counts.
    """
    if training and not spec.train_audio:
        return {}
    if spec.model_family == "minimax_h3":  # both channels, one after the other
        length = 2 * round(frames / spec.fps * _H3_SOUNDS)
    else:
        samples = round(frames / spec.fps * config["audio_sampling_rate"])
        hop, step = config["audio_hop_length"], config["audio_scale_factor"]
        length = samples // hop // step + 1 if training else round(samples / hop / step)
    rows = (length, config["audio_in_channels"])
    return {
        SOUND: (rows, torch.float32),
        SOUND_NOISE: (rows, torch.float32),
        SOUND_WEIGHT: ((), torch.float32),
    }


def references(spec: DataPlanKeys, *, training: bool) -> int:
    """Return the highest number of conditioning images of any training sample or prompt."""
    takes = references_of(spec)
    single = takes is not None and (takes.masks or takes.layers)
    if single or needs_first_frame(spec):
        return 1
    if takes_control_videos(spec):  # a control video, which is gray where there is none
        return 1 + frames_before(spec, training=training)
    if training:
        return max(
            (
                dataset.references or bool(dataset.first_frame) + bool(dataset.last_frame)
                for dataset in spec.datasets or []
            ),
            default=0,
        )
    return max((len(request.conditioning) for request in requests_of(spec)), default=0)


def frames_before(spec: DataPlanKeys, *, training: bool) -> int:
    """Return the most reference images that are frames before a video's own."""
    if not takes_control_videos(spec):
        return 0
    return max((roles.count("reference") for roles in _roles(spec, training=training)), default=0)


def has_fill_mask(spec: DataPlanKeys, *, training: bool) -> bool:
    """Return whether any training sample or prompt has a mask of what the model fills in."""
    given = any("fill_mask" in roles for roles in _roles(spec, training=training))
    return given and takes_control_videos(spec)


def _roles(spec: DataPlanKeys, *, training: bool) -> list[tuple[Role, ...]]:
    parts = (spec.datasets or []) if training else spec.validation_prompts
    return [entry.roles for entry in parts]


def _seen_tokens(spec: InputKeys, size: tuple[int, int], count: int, *, training: bool) -> int:
    """Return the text tokens that conditioning images add if the encoder sees images."""
    takes = references_of(spec)
    if takes_keyframes(spec):
        return count * (_qwen3_tokens(size) + _AROUND_KEYFRAME)
    if takes is None or takes.seen is None:
        return 0
    side = spec.conditioning_resolution if training else None
    seen = takes.seen(size[0] * _LARGE, size[1] * _LARGE, side).size
    patches = [max(1, round(pixels / _SEEN_CELL)) for pixels in seen]
    return count * (patches[0] * patches[1] + _AROUND_SEEN)


def _qwen3_tokens(size: tuple[int, int]) -> int:
    """Return the tokens of an image in Qwen3-VL, which enlarges small ones."""
    scale = max(1.0, (_LEAST_SEEN / (size[0] * size[1])) ** 0.5)
    across, down = (-(-round(side * scale) // _QWEN3_CELL) for side in size)
    return across * down


def caption_shapes(
    spec: DataPlanKeys,
    config: Mapping[str, Any],
    size: tuple[int, int] = (0, 0),
    count: int = 0,
    *,
    training: bool = True,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the largest shape, and the dtype, of each output of `Family.encode`, without a batch.

    Args:
        spec: The job.
        config: The denoiser's config.
        size: Size of the image.
        count: Number of its conditioning images.
        training: Whether it is a training sample rather than a prompt.
    """
    from engine.model.precision import compute_dtype

    dtype = compute_dtype(spec)
    length = spec.max_sequence_length + _seen_tokens(spec, size, count, training=training)
    mask = {"prompt_attention_mask": ((length,), torch.int64)}

    def text(width: str, tokens: int = length) -> dict[str, Any]:
        return {"prompt_embeds": ((tokens, config[width]), dtype)}

    def pooled(width: int) -> dict[str, Any]:
        return {"pooled_prompt_embeds": ((width,), dtype)}

    match spec.model_family:
        case "flux":
            return text("joint_attention_dim") | pooled(config["pooled_projection_dim"])
        case "flux2":
            return text("joint_attention_dim")
        case "qwen_image":
            masked = {"prompt_embeds_mask": ((length,), torch.bool)}
            return text("joint_attention_dim") | masked
        case "z_image":
            return text("cap_feat_dim") | {"prompt_embeds_mask": ((length,), torch.bool)}
        case "sd3":
            tokens = _CLIP_TOKENS + length
            return text("joint_attention_dim", tokens) | pooled(config["pooled_projection_dim"])
        case "sdxl":
            beside = 6 * config["addition_time_embed_dim"]
            width = config["projection_class_embeddings_input_dim"] - beside
            return text("cross_attention_dim", _CLIP_TOKENS) | pooled(width)
        case "stable_diffusion":
            return text("cross_attention_dim", _CLIP_TOKENS)
        case "chroma":
            return text("joint_attention_dim") | {"prompt_attention_mask": ((length,), torch.bool)}
        case "lumina2":
            return text("cap_feat_dim") | mask
        case "flux3":
            return text("joint_attention_dim") | {"prompt_embeds_mask": ((length,), torch.bool)}
        case "ideogram4":
            return text("llm_features_dim") | {"prompt_embeds_mask": ((length,), torch.bool)}
        case "krea2":
            layers = (config["num_text_layers"], config["text_hidden_dim"])
            return {
                "prompt_embeds": ((length, *layers), dtype),
                "prompt_embeds_mask": ((length,), torch.bool),
            }
        case "anima":
            return text("text_embed_dim", _FIXED_TEXT)
        case "auraflow":
            return text("joint_attention_dim") | mask
        case "minimax_h3":
            tags = {"text_token_tags": ((length, 1), torch.int64)} if count else {}
            return text("text_dim") | tags | {"prompt_embeds_mask": ((length,), torch.bool)}
        case "sana" | "pixart_sigma" | "ltxvideo":
            return text("caption_channels") | mask
        case "ltx2":  # for the video, and for the sound
            widths = ("cross_attention_dim", "audio_cross_attention_dim")
            if config["use_prompt_embeddings"]:
                widths = ("caption_channels", "caption_channels")
            width = sum(config[name] for name in widths)
            return {"prompt_embeds": ((length, width), dtype)}
        case "wan":
            if not config.get("image_dim"):
                return text("text_dim")
            patches = config.get("pos_embed_seq_len") or _CLIP_PATCHES  # of two images together
            seen = {"image_embeds": ((patches, config["image_dim"]), torch.float32)}
            return text("text_dim", _FIXED_TEXT) | seen
        case "hunyuanvideo":
            return text("text_embed_dim") | pooled(config["pooled_projection_dim"]) | mask
        case "hunyuanvideo15":
            seen = {"image_embeds": ((_SIGLIP_PATCHES, config["image_embed_dim"]), torch.float32)}
            glyphs = most_quoted_tokens(spec, training=training)  # none: `arrange` drops them
            return (seen if needs_first_frame(spec) else {}) | {
                **text("text_embed_dim"),
                "prompt_embeds_mask": ((length,), torch.bool),
                "prompt_embeds_2": ((glyphs, config["text_embed_2_dim"]), dtype),
                "prompt_embeds_mask_2": ((glyphs,), torch.bool),
            }
        case "hidream":
            t5, llama = config["caption_channels"]
            return {
                "prompt_embeds_t5": ((length, t5), dtype),
                "prompt_embeds_llama3": ((_LLAMA_LAYERS, length, llama), dtype),
            } | pooled(config["text_emb_dim"])
    raise UserError(f"the memory prediction does not support {spec.model_family}")


def training_size(spec: JobSpec) -> tuple[int, int]:
    """Return width and height of the bucket with the most pixels; the squarest if several do."""
    sizes = sizes_of(spec)
    return max(sizes, key=lambda size: (size[0] * size[1], -abs(size[0] - size[1])))


def largest_encoded(spec: JobSpec) -> tuple[int, int]:
    """Return width and height of the largest image to encode: a bucket or a conditioning image."""
    size, takes = training_size(spec), references_of(spec)
    if takes is None or takes.fit is None or not references(spec, training=True):
        return size
    beside = takes.fit(size[0] * _LARGE, size[1] * _LARGE, spec.conditioning_resolution).size
    return max(size, beside, key=lambda pixels: pixels[0] * pixels[1])


def training_frames(spec: InputKeys) -> int:
    """Return the frames of a sample, or the maximum if the job sets no number.

    Of models that make layers, an image and its layers.
    """
    if layers := layers_of(spec):
        return 1 + layers
    return get_family(spec.model_family).frames_of(spec.num_frames or _LONGEST_VIDEO)


def sampled(spec: DataPlanKeys) -> tuple[tuple[int, int], int] | None:
    """Return size and frames of the largest sample that the job makes; None if it makes none."""
    requests = requests_of(spec)
    if not requests:
        return None
    # Where videos have more frames at least, an image is the first one of the shortest.
    least = get_family(spec.model_family).frame_rest
    most = max(requests, key=lambda r: r.width * r.height * max(r.frames, least))
    return (most.width, most.height), max(most.frames, least) + most.layers
