"""Check that a model is complete, of the job's family, and suitable for the job."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.models.find_model import (
    GGUF_HINT,
    denoiser_of,
    find_damage,
    find_index,
    find_model,
)
from jobs.paths import exists
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES, component_of, get_family, token_parts
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.buckets import bucket_step, widest_bucket
from jobs.spec.rules.token_routes import routes_of
from jobs.spec.values.resolutions import all_resolutions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.spec.families import Family, Flavour
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec
    from jobs.spec.keys.job import JobKeys


# -- weight variants ------------------------------------------------------------------------
# Names of weight files: hub repositories have copies in other precisions next to the plain ones.


# The stems that diffusers' and transformers' `save_pretrained` use.
_STEMS: Final = ("diffusion_pytorch_model", "model", "pytorch_model")
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}")
_USUAL: Final = ("safetensors", "bin", "index", "json")


def variant_of(name: str) -> str | None:
    """Return the variant of a weight file, `fp16` for `model.fp16.safetensors`.

    None for a plain file, and for files that are not weights. `from_pretrained` loads a variant
    only when asked to (`variant="fp16"`). Shards, and indices of shards, have it elsewhere in their
    names.
    """
    stem, *words = _SHARD.sub("", name).split(".")
    if stem not in _STEMS or not {"safetensors", "bin"} & set(words):
        return None
    return next((word for word in words if word not in _USUAL), None)


# -- model files ----------------------------------------------------------------------------


_MASKS: Final = 4  # mask channels, one for each frame of a latent


def check_model(spec: JobSpec, *, settings: bool = False) -> Path:
    """Check that the model directory holds a pipeline of the job's family, and return it.

    Args:
        spec: The job.
        settings: Whether the job's flavour and sizes must match the model, too; the form checks a
            directory alone.

    Raises:
        SpecError: It is missing, not a diffusers model, incomplete, or of another family.
    """
    root = find_model(spec.pretrained_model_name_or_path)
    index = find_index(root)
    if index is None:
        raise SpecError(
            f"{root} is not a diffusers model: it has no readable model_index.json",
            f"use the directory with model_index.json, {component_of(spec)}/ and vae/",
        )
    family = get_family(spec.model_family, spec.model_flavour)
    pipeline = str(index.get("_class_name", "?"))
    if pipeline not in family.pipelines:
        fits = [f.name for f in FAMILIES.values() if pipeline in f.pipelines]
        *others, last = family.pipelines
        named = f"{', '.join(others)} or {last}" if others else last
        raise SpecError(
            f"{root} is a {pipeline}, not a {family.title} model",
            f"set model_family: {fits[0]}" if fits else f"use a model whose pipeline is {named}",
        )
    if settings:
        _check_trained(root, family, spec.model_flavour, index)
    denoiser = denoiser_of(root, family, spec.model_flavour)
    for part in (*_denoisers(denoiser.name, family, index), "vae"):
        _check_part(root, part)
        _check_whole(root / part)
    _check_supplied(root, family)
    for part in _text_encoders(index):
        _check_code(root, part, index)
        _check_encoder(root, part)
        _check_whole(root / part)
    _check_image_inputs(root, index)
    config = read_json(denoiser / "config.json") or {}
    if settings:
        _check_flavour(spec, family, denoiser, index, config)
        check_config(spec, config)
    return root


# -- files ---------------------------------------------------------------------------------


def _denoisers(trained: str, family: Family, index: Mapping[str, Any]) -> list[str]:
    """Return the trained denoiser, and the one for the other noise levels of samples."""
    parts = [trained]
    if index.get("boundary_ratio") is not None:
        parts += [family.component_of(flavour) for flavour in family.flavours]
    return list(dict.fromkeys(parts))


def _check_trained(
    root: Path, family: Family, flavour_name: str | None, index: Mapping[str, Any]
) -> None:
    """Reject a published model without the denoiser that is trained beside a distilled one.

    Exports have that denoiser in the usual place, with its own scheduler; the published scheduler
    is the distilled one's.
    """
    flavour = family.flavours.get(flavour_name or "")
    if flavour is None or not flavour.folder or not _is_of(index, flavour):
        return
    if exists(root / flavour.folder / "config.json"):
        return
    scheduler = read_json(root / "scheduler" / "scheduler_config.json") or {}
    if any(scheduler.get(key) != value for key, value in flavour.schedule.items()):
        usual = family.component_of(flavour_name)
        raise SpecError(
            f"{root} lacks {flavour.folder}/, which is trained; its {usual}/ is distilled, "
            "according to its scheduler",
            f"run `fsdp-tui fetch {flavour.hub_id}`, or download {flavour.folder}/ into {root}",
        )


def _check_part(root: Path, part: str) -> None:
    """Check a denoiser or VAE, which is loaded from safetensors files only."""
    if read_json(root / part / "config.json") is None:
        raise SpecError(
            f"{root} is incomplete: {part}/config.json is missing or damaged", "download it again"
        )
    names = [path.name for path in (root / part).glob("*.safetensors")]
    if not names:
        hints = {
            "*.bin": "convert the .bin files to safetensors; pickled weights are not loaded",
            "*.gguf": GGUF_HINT,
        }
        fits = [hint for kind, hint in hints.items() if any((root / part).glob(kind))]
        raise SpecError(f"{root / part} has no .safetensors weights", fits[0] if fits else None)
    _check_plain(root, part, names, "diffusion_pytorch_model.safetensors")


def _text_encoders(index: Mapping[str, Any]) -> list[str]:
    """Return the text encoders that the model has; absent optional ones are null."""
    return [name for name in index if name.startswith("text_encoder") and _has(index, name)]


def _has(index: Mapping[str, Any], part: str) -> bool:
    entry = index.get(part)
    return isinstance(entry, list) and bool(entry) and all(entry)


def _check_image_inputs(root: Path, index: Mapping[str, Any]) -> None:
    """Check the encoder of conditioning images and its preprocessors."""
    if _has(index, "image_encoder"):
        _check_encoder(root, "image_encoder")
        _check_whole(root / "image_encoder")
    for part in ("image_processor", "processor"):
        if _has(index, part) and read_json(root / part / "preprocessor_config.json") is None:
            raise SpecError(
                f"{root} is incomplete: {part}/preprocessor_config.json is missing or damaged",
                "download it again",
            )


def _check_code(root: Path, part: str, index: Mapping[str, Any]) -> None:
    """Reject a component that needs the model's own code, which is never run."""
    library, name = (*map(str, index[part]), "?")[:2]
    if library not in ("diffusers", "transformers"):
        raise SpecError(
            f"the {part} of {root} is {library}.{name}, which needs code of the model's own",
            "use a model whose encoders are transformers' own; code of models is not run",
        )


def _check_encoder(root: Path, part: str) -> None:
    """Check an encoder, which is loaded from safetensors files only, too."""
    if read_json(root / part / "config.json") is None:
        raise SpecError(
            f"{root} is incomplete: {part}/config.json is missing or damaged", "download it again"
        )
    names = [path.name for path in (root / part).glob("*.safetensors")]
    pickled = sorted(path.name for path in (root / part).glob("*.bin"))
    if pickled and not names:
        raise SpecError(
            f"{root / part} has only pickled weights ({pickled[0]}), and unpickling runs any code "
            "in the file",
            "convert them: load with from_pretrained, then save_pretrained",
        )
    if not names:
        raise SpecError(f"{root / part} has no weights", f"download {part}/model.safetensors")
    _check_plain(root, part, names, "model.safetensors")


def _check_plain(root: Path, part: str, names: list[str], usual: str) -> None:
    """Reject weights of which only a variant exists, since `from_pretrained` ignores variants."""
    variants = {variant_of(name) for name in names}
    if None not in variants:
        variant = min(map(str, variants))
        raise SpecError(
            f"{root / part} has only the {variant} variant of its weights, which is not loaded",
            f'download the files without ".{variant}" in their names too: {part}/{usual}, or its '
            "shards and their index",
        )


def _check_whole(folder: Path) -> None:
    """Reject weights that are incomplete or not weights at all."""
    for path in sorted(folder.glob("*.safetensors")):
        if variant_of(path.name) is None and (damage := find_damage(path)):
            raise SpecError(f"{path} is damaged: {damage}", "download it again")


def _check_supplied(root: Path, family: Family) -> None:
    """Check the components that a family is published without and the user must add."""
    missing = [part for part in family.supplied if not any((root / part).glob("*.json"))]
    if missing:
        raise SpecError(
            f"{root} lacks {' and '.join(missing)}, not part of the published {family.title}",
            "; ".join(f"put {family.supplied[part]} into {root / part}" for part in missing),
        )


# -- job and model -------------------------------------------------------------------------


def _check_flavour(
    spec: JobKeys,
    family: Family,
    denoiser: Path,
    index: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Check the flavour against the model's own files; the default is the family's first one."""
    root = denoiser.parent
    flavour_name = spec.model_flavour or next(iter(family.flavours), "")
    fits = [name for name, flavour in family.flavours.items() if _is_of(index, flavour)]
    step = _latent_step(family, root, denoiser)
    if step is not None:
        fits = [
            name
            for name in fits
            # The step of a model that makes layers is its pipeline's, not its tokens'.
            if family.latent_step_of(name) == step or family.makes_layers(name)
        ]
    alike = [name for name in fits if not _other_frames(family, name, config)]
    advice = f"set model_flavour: {' or '.join(alike or fits)}"
    if flavour_name in fits or not fits:
        if differs := _other_frames(family, flavour_name, config):
            raise SpecError(
                f"{root} is not {family.title} {flavour_name}: in {denoiser.name}/config.json, "
                f"{differs}",
                advice if alike else "use another model; no flavour of the family is like this one",
            )
        return
    named = (
        f"model_flavour: {flavour_name}"
        if spec.model_flavour
        else f"the default {family.title}, {flavour_name}"
    )
    raise SpecError(
        f"{root} is not {named}, according to its files",
        advice,
    )


def _other_frames(family: Family, flavour_name: str, config: Mapping[str, Any]) -> str:
    """Return how the denoiser takes first and last frames otherwise than a flavour; "" if it does.

    They may be concatenated with the video in the channels, encoded as images, or both.
    """
    flavour = family.flavours.get(flavour_name)
    if flavour is None or not any(other.needs_first_frame for other in family.flavours.values()):
        return ""
    if not flavour.gray_frames or config.get("image_embed_dim") is not None:
        return ""  # HunyuanVideo 1.5 has the same channels for text alone
    seen = flavour.sees_first_frame and flavour.last_frame  # two images, told apart by positions
    inputs, outputs = config.get("in_channels"), config.get("out_channels")
    # In addition to the video: the channels of the first frame's latents and of its mask.
    expected = outputs and (2 * outputs + _MASKS if flavour.needs_first_frame else outputs)
    if inputs is not None and expected is not None and inputs != expected:
        return f"in_channels is {inputs}, not {expected}"
    if "image_dim" in config and (config["image_dim"] is not None) != flavour.sees_first_frame:
        return f"image_dim is {json.dumps(config['image_dim'])}"
    if (config.get("pos_embed_seq_len") is not None) != seen:
        return f"pos_embed_seq_len is {json.dumps(config.get('pos_embed_seq_len'))}"
    return ""


def _is_of(index: Mapping[str, Any], flavour: Flavour) -> bool:
    """Return whether a model's index has all entries of a flavour."""
    return all(_is_marked(index, key, value) for key, value in flavour.marks.items())


def _is_marked(index: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether an entry has the flavour's value, or one of its values."""
    entry = index.get(key) or False
    return entry in value if isinstance(value, tuple) else entry == value


def _latent_step(family: Family, root: Path, denoiser: Path) -> int | None:
    """Return the pixels per side of a token; None if unknown or the same for all flavours."""
    if len({family.latent_step_of(flavour) for flavour in family.flavours}) < 2:
        return None
    shrinks = _vae_scale(read_json(root / "vae" / "config.json") or {})
    patch = (read_json(denoiser / "config.json") or {}).get("patch_size")
    side = patch[-1] if isinstance(patch, list) and patch else patch
    return shrinks * side if shrinks is not None and isinstance(side, int) else None


def _vae_scale(vae: Mapping[str, Any]) -> int | None:
    """Return the pixels per side of a latent, from a VAE's config; None if it does not say."""
    for key in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(vae.get(key), int):
            return int(vae[key])
    for key in ("block_out_channels", "encoder_block_out_channels"):
        if isinstance(vae.get(key), list):
            return int(2 ** (len(vae[key]) - 1))
    if isinstance(vae.get("dim_mult"), list):  # older files of Wan lack the factor
        return int(2 ** (len(vae["dim_mult"]) - 1) * (vae.get("patch_size") or 1))
    return None


def check_config(spec: JobSpec, config: Mapping[str, Any]) -> None:
    """Check a job against the denoiser's config alone.

    Raises:
        SpecError: Its heads cannot be divided among ranks, a side is too long for its positions, or
            it has not the blocks that tokens are routed around.
    """
    family = get_family(spec.model_family, spec.model_flavour)
    _check_heads(spec, config)
    _check_sizes(spec, family, config)
    counts = [config.get(entry) for entry in family.routed_blocks.values()]
    if spec.tread and all(isinstance(count, int) for count in counts):
        routes_of(spec.tread, sum(count for count in counts if isinstance(count, int)))


def _check_heads(spec: JobSpec, config: Mapping[str, Any]) -> None:
    """Check that Ulysses can divide the attention heads among ranks."""
    if token_parts(spec) == 1 or spec.context_parallel_comm_strategy != "alltoall":
        return
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % spec.context_parallel_size:
        raise SpecError(
            f"context_parallel_size {spec.context_parallel_size} does not divide the {heads} "
            "attention heads of the model",
            "choose a divisor, or context_parallel_comm_strategy: allgather",
        )


def _check_sizes(spec: DataPlanKeys, family: Family, config: Mapping[str, Any]) -> None:
    """Check sizes against denoisers that have positions only up to some side."""
    limit = family.longest_side(config) if family.longest_side is not None else None
    if limit is None:
        return
    ends = f"which has positions up to {limit} pixels a side"
    step = family.latent_step_of(spec.model_flavour)
    resolution = all_resolutions(spec)[-1]
    longest = longest_bucket_side(resolution, spec)
    if longest > limit:
        sides = range(resolution // step * step, 0, -step)
        able = next((s for s in sides if longest_bucket_side(s, spec) <= limit), None)
        raise SpecError(
            f"resolution: {resolution} has buckets of {longest} pixels a side, too large for "
            f"this {family.title}, {ends}",
            f"set resolution: {able}" if able else None,
        )
    for request in requests_of(spec):
        if max(request.width, request.height) > limit:
            raise SpecError(
                f"samples of {request.width}x{request.height} are too large for this "
                f"{family.title}, {ends}",
                "lower the resolution of validation_prompts, or validation_resolution",
            )


def longest_bucket_side(resolution: int, spec: InputKeys) -> int:
    """Return the longest side of a resolution's buckets, as made by `jobs.spec.rules.buckets`."""
    step, widest = bucket_step(resolution, spec), widest_bucket(spec)
    area = max(resolution, step) ** 2
    long = int(math.sqrt(area * widest)) // step * step
    while long > widest * max(step, int(area / long) // step * step):
        long -= step
    return long
