"""Which model and adapter a command of sd-scripts or musubi-tuner trains, and with what noise.

Numbers of noise levels are written out, also where a name here would mean the same for a model.
"""

from __future__ import annotations

import re
from typing import Any, Final

from jobs.imports.common import models, training_keys
from jobs.imports.common.draft import Draft, as_number
from jobs.imports.common.whose import MUSUBI, SD_SCRIPTS
from jobs.spec.families import FAMILIES
from jobs.spec.families.base import FLUX_LINE
from jobs.spec.values.resolutions import sides_of

_MODEL: Final = "pretrained_model_name_or_path"
_TIMESTEPS: Final = 1000
# Wan 2.2's experts meet at timestep 875 or 900; ranges that begin or end there are for one of them.
_LEAST_HIGH: Final = 800
_MOST_LOW: Final = 900
_TARGETS_WHY: Final = "the layers that the script adapts"

# Names that the authors gave to single files, whose weights are also published for diffusers.
_PUBLISHED: Final = (
    (r"flux1-(dev|schnell|krea-dev)", "flux"),
    (r"(flux1-dev-kontext|flux1-kontext-dev)", "flux"),
    (r"sd_xl_base_1\.0(_0\.9vae)?|sdxl_base|sd_xl_base", "sdxl"),
    (r"v1-5-pruned(-emaonly)?|sd-v1-5.*|v2-1_768.*|v2-1_512.*|768-v-ema", "stable_diffusion"),
    (r"sd3(\.5)?_(medium|large|large_turbo)(_incl.*)?", "sd3"),
    (r"lumina[-_]?(image[-_]?)?2.*|consolidated.*", "lumina2"),
    (r"chroma1?-(hd|base|flash).*", "chroma"),
    (r"wan_?2[._]?[12]_[-_]?(t2v|i2v|ti2v).*", "wan"),
    (r"mp_rank_00_model_states.*|hunyuan_video_(t2v|720).*", "hunyuanvideo"),
    (r"hunyuanvideo1\.5_.*", "hunyuanvideo15"),
    (r"qwen_image(_edit)?(_(2509|2511|2512|plus))?(_(bf16|fp8|fp16).*)?", "qwen_image"),
    (r"z_image(_turbo)?(_(bf16|fp8|fp16).*)?", "z_image"),
    (r"flux-?2-(dev|klein).*", "flux2"),
    (r"ideogram4(_(bf16|fp8|nvfp4).*)?", "ideogram4"),
    (r"(krea-?_?2[-_])?(raw|turbo)", "krea2"),
)
_PRECISION: Final = r"([-_.](bf16|fp16|fp8.*|e4m3.*|scaled))*$"


def model_of(draft: Draft, script: str, family: str) -> tuple[str | None, str | None]:
    """Return a script's family and flavour; None and what it is where jobs do not train it."""
    place = re.sub(r"[^a-z0-9.]+", "-", f"{draft.get('dit')} {draft.get(_MODEL)}".lower())
    task = str(draft.get("task") or "").strip().lower()
    version = str(draft.get("model_version") or "").strip().lower()
    match script:
        case "train_network" | "fine_tune" | "train_db":
            two = "2.1" if draft.on("v_parameterization") else "2.1-base"
            return family, two if draft.on("v2") else None
        case "flux_train_network" | "flux_train":
            is_chroma = str(draft.get("model_type")).strip().lower() == "chroma"
            words = ("flash",) if is_chroma else ("schnell", "krea", "kontext")
            kind = next((word for word in words if word in place), None)
            return "chroma" if is_chroma else family, kind
        case "sd3_train_network" | "sd3_train":
            kinds = [k for k in FAMILIES["sd3"].flavours if k in place]
            return family, max(kinds, key=len, default=None)
        case "flux_kontext_train_network":
            return family, "kontext"
        case "flux_2_train_network":
            return (family, version or "dev")
        case "zimage_train_network" | "zimage_train":
            turbo = "turbo" if "turbo" in place and "de-turbo" not in place else None
            return family, turbo if turbo in FAMILIES["z_image"].flavours else None
        case "krea2_train_network":
            return family, "turbo" if "turbo" in place else "raw"
        case "qwen_image_train_network" | "qwen_image_train":
            usual = "2512" if "2512" in place else "base"
            old = "edit-2509" if draft.on("edit_plus") else "edit" if draft.on("edit") else usual
            flavour = (version or old).replace("original", usual)
            has_it = flavour in FAMILIES["qwen_image"].flavours
            return (family, flavour) if has_it else (None, f"--model_version {flavour}")
        case "wan_train_network":
            return _wan(draft, task or "t2v-14b", place)
        case "hv_1_5_train_network":
            size = "720p" if "720" in place else "480p"
            if task not in ("", "t2v", "i2v"):
                return None, f"--task {task}"
            flavour = f"{size}-{task or 't2v'}{'-distilled' * ('distil' in place)}"
            has_it = flavour in FAMILIES[family].flavours and "step-distil" not in place
            return (family, flavour) if has_it else (None, f"--dit {draft.get('dit')}")
    if draft.number("dit_in_channels") not in (None, 16):
        return None, "--dit_in_channels other than 16"
    return family, None


def _wan(draft: Draft, task: str, place: str) -> tuple[str | None, str | None]:
    """Return Wan's flavour; of two experts, the one that is named, else the one for low noise."""
    least, most = draft.number("min_timestep") or 0, draft.number("max_timestep")
    high = "high" in place or (least >= _LEAST_HIGH and "low" not in place)
    high = high and not (most is not None and most <= _MOST_LOW)
    expert = "high" if high else "low"
    if "a14b" in task:
        if not re.search("high|low", place) and not least and most is None:
            draft.report.to_fill_in.append("model_flavour: nothing says which expert; check it")
        if not least and most is None and "dit_high_noise" not in draft.theirs:
            draft.report.warnings.append(
                f"model_flavour: only the noise levels of the expert for {expert} noise are drawn; "
                "there, all are without min_timestep and max_timestep"
            )
    flavours = {
        "t2v-14b": "2.1-t2v-14b",
        "t2i-14b": "2.1-t2v-14b",
        "t2v-1.3b": "2.1-t2v-1.3b",
        "i2v-14b": f"2.1-i2v-14b-{'720p' if '720' in place else '480p'}",
        "t2v-a14b": f"2.2-t2v-a14b-{expert}",
        "i2v-a14b": f"2.2-i2v-a14b-{expert}",
    }
    return ("wan", flavours[task]) if task in flavours else (None, f"--task {task}")


def base(draft: Draft, key: str, value: Any) -> None:
    """Set the model: a hub id or directory; of a file that authors published, their repository."""
    text = str(value).strip()
    if not text.lower().endswith((".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")):
        family = draft.values["model_family"]
        models.set_model(draft, key, value)
        draft.values["model_family"] = family
        return
    stem = re.split(r"[/\\]", text.lower())[-1].rpartition(".")[0]
    name, flavour = draft.values["model_family"], draft.values.get("model_flavour")
    flavours = FAMILIES[name].flavours
    published = flavours[flavour or next(iter(flavours))].hub_id
    match = any(of == name and re.fullmatch(f"({p}){_PRECISION}", stem) for p, of in _PUBLISHED)
    if match:
        draft.take(key, _MODEL, published, "the same weights in the layout of diffusers")
        return
    draft.unsupported(key, "a single file; a directory in the layout of diffusers is needed")
    draft.report.to_fill_in.append(
        f"{_MODEL}: {stem} is a single file; load it with `from_single_file`, `save_pretrained` "
        f"it, and name that directory. The published model of the family is {published}"
    )


def two_experts(draft: Draft, key: str, value: Any) -> None:
    """Train both experts, unless the timesteps are those of one; each gets a LoRA of its own."""
    least, most = draft.number("min_timestep") or 0, draft.number("max_timestep") or _TIMESTEPS
    expert = str(draft.values.get("model_flavour")).rpartition("-")[2]
    if expert not in ("high", "low"):
        draft.unsupported(key, "the model of --task has one denoiser")
    elif least >= _LEAST_HIGH or most <= _MOST_LOW:
        draft.unneeded(key, f"min_timestep and max_timestep are those of the {expert} expert")
    elif draft.take(key, "both_experts", True, "a LoRA for each; there, both experts share one"):
        draft.report.warnings.append(
            "max_train_steps: each expert trains all of them here; there, the two share them"
        )


# -- the adapter -----------------------------------------------------------------------------

_ATTENTION: Final = r"(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
_FLUX: Final = (
    r"(single_)?transformer_blocks\.\d+\."
    rf"(attn\.{_ATTENTION}|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out|norm(1(_context)?)?\.linear)"
)
_UNET: Final = (
    r".*attentions\.\d+\.(proj_in|proj_out|transformer_blocks\.\d+\."
    r"(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)))"
)
# What a UNet's network has besides, if convolutions get an adapter (LoCon): the blocks between the
# transformers. Convolutions of 3x3 have a rank of their own.
_WITH_CONVOLUTIONS: Final = (
    r".*resnets\.\d+\.(conv1|conv2|conv_shortcut|time_emb_proj)|.*(down|up)samplers\.\d+\.conv"
)
_CONVOLUTIONS: Final = r"resnets\.\d+\.conv[12]|(down|up)samplers\.\d+\.conv"
# Layers that the tool's own networks adapt, where those are others than the family's here.
TARGETS: Final = {
    (SD_SCRIPTS, "flux"): _FLUX,
    (SD_SCRIPTS, "sdxl"): _UNET,
    (SD_SCRIPTS, "stable_diffusion"): _UNET,
    (SD_SCRIPTS, "sd3"): (
        rf"transformer_blocks\.\d+\.(attn2?\.{_ATTENTION}|ff(_context)?\.net\.(0\.proj|2)"
        r"|norm1\.linear)"
    ),
    (SD_SCRIPTS, "lumina2"): (
        r"(layers|noise_refiner|context_refiner)\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0)"
        r"|feed_forward\.linear_[123]|norm1\.linear)|norm_out\.linear_[12]"
    ),
    (MUSUBI, "z_image"): (
        r"layers\.\d+\.(attention\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.(w1|w2|w3))"
    ),
    (MUSUBI, "krea2"): (
        r".*_blocks\.\d+\.(attn\.to_(q|k|v|gate|out\.0)|ff\.(gate|up|down))|text_fusion\.projector"
        r"|img_in|(time_embed|txt_in)\.linear_[12]|time_mod_proj|final_layer\.linear"
    ),
    (MUSUBI, "hunyuanvideo15"): (
        rf"transformer_blocks\.\d+\.(attn\.{_ATTENTION}|ff(_context)?\.net\.(0\.proj|2)"
        r"|norm1(_context)?\.linear)"
    ),
}
_NETWORKS: Final = re.compile(r"(musubi_tuner\.)?networks\.lora(_\w+)?|lora(_\w+)?")
_INSTEAD: Final = "is not supported; the job trains a LoRA instead"
_OTHER_NETWORKS: Final = ("networks.lora_fa",)
# Families whose attention is one layer for q, k and v there; sd-scripts can split some of them.
_FUSED: Final = ("flux", "chroma", "sd3", "lumina2", "flux2", "hunyuanvideo", "ideogram4")
_SPLIT: Final = ("flux", "chroma", "sd3")


def network(draft: Draft, key: str, value: Any, *, tool: str) -> None:
    """Take the kind of adapter, and the layers that it is put on."""
    word = str(value).strip()
    _say_what_is_shared(draft, tool, word)
    algorithm = "lokr" if word.endswith("networks.lokr") else _algorithm(draft)
    if word == "lycoris.kohya" or word.endswith("networks.lokr"):
        if algorithm == "lokr":
            draft.take(key, "lora_variant", "lokr", "LoKr, on the family's layers")
        elif algorithm in ("lora", "locon"):
            draft.take(key, "model_type", "lora", "on the family's layers")
        else:
            draft.unsupported(key, f"{algorithm} {_INSTEAD}")
    elif not _NETWORKS.fullmatch(word) or word in _OTHER_NETWORKS:
        draft.unsupported(key, f"{word} {_INSTEAD}")
    elif targets := TARGETS.get((tool, draft.values["model_family"])):
        blocks = str(draft.theirs.get("network_args.train_blocks", "all")).strip().lower()
        single = {"single": "single_", "double": ""}.get(blocks, "(single_)?")
        targets = targets.replace("(single_)?", single)
        why = _TARGETS_WHY
        if draft.values["model_family"] == "sd3":
            why += ", but the modulation of text (context_block.adaLN_modulation)"
        draft.take(key, "lora_target_modules", [targets], why)
    else:
        draft.take(key, "model_type", "lora", _TARGETS_WHY)


def convolutions(draft: Draft, key: str, value: Any) -> None:
    """Take the rank and the alpha of a UNet's convolutions."""
    rank, alpha = as_number(value), draft.number("network_args.conv_alpha")
    of_unet = _UNET in draft.values.get("lora_target_modules", [])
    if not of_unet or draft.values["model_type"] != "lora" or not rank or rank < 1:
        why = "only its own network of Stable Diffusion 1, 2 and XL is read with convolutions"
        draft.unsupported(key, f"convolutions get no adapter; {why}")
        return
    draft.values["lora_target_modules"] = [_UNET, _WITH_CONVOLUTIONS]
    draft.values["lora_alpha_pattern"] = {_CONVOLUTIONS: 1.0 if alpha is None else alpha}
    draft.take(key, "lora_rank_pattern", {_CONVOLUTIONS: int(rank)}, "of convolutions of 3x3")


def _say_what_is_shared(draft: Draft, tool: str, word: str) -> None:
    """Warn where q, k and v have one adapter there, and so one A."""
    family = draft.values["model_family"]
    asked = str(draft.theirs.get("network_args.split_qkv")) == "True"  # in this spelling alone
    split = asked and tool == SD_SCRIPTS and family in _SPLIT and word.startswith("networks.")
    if family in _FUSED and not split:
        instead = " without split_qkv" if tool == SD_SCRIPTS and family in _SPLIT else ""
        draft.report.warnings.append(
            f"lora_rank: there, fused layers for q, k and v share one A of this rank{instead}; "
            "here, each has its own, so the adapter has more weights"
        )


def _algorithm(draft: Draft) -> str:
    return str(draft.theirs.get("network_args.algo", "lora")).strip().lower()


def trains_text(draft: Draft, key: str = "") -> bool:
    """Whether a network of sd-scripts also has the text encoders."""
    if draft.on("network_train_unet_only") or draft.values["model_type"] == "full":
        return False
    cached = draft.on("cache_text_encoder_outputs") and draft.values["model_family"] == "sdxl"
    rates = draft.theirs.get("text_encoder_lr")
    rates = rates if isinstance(rates, list) else [rates]
    return not cached and not all(as_number(rate) == 0 for rate in rates)


def unet_only(draft: Draft, key: str, value: Any) -> None:
    """Take text encoders that are trained, too, unless this is on."""
    family = models.family_of(draft)
    if not family.text_lora or draft.values.get("lora_variant", "lora") != "lora":
        draft.unsupported(key, f"{training_keys.NO_TEXT_ENCODERS}; there, both are")
    else:
        rank = int(draft.number("network_dim") or 4)
        why = "attention of the text encoders; there, also their feed-forward layers"
        draft.take(key, "text_encoder_lora_rank", rank, why)


def text_rate(draft: Draft, key: str, value: Any) -> None:
    given = value if isinstance(value, list) else [value]
    if not trains_text(draft) or not models.family_of(draft).text_lora:
        draft.unneeded(key, training_keys.NO_TEXT_ENCODERS)
    elif str(draft.values.get("optimizer")) in ("prodigy", "adamw_schedule_free"):
        draft.unneeded(key, "the optimizer has one rate")
    else:
        why = "the first of them" if len(set(map(str, given))) > 1 else "the equivalent key"
        draft.take(key, "text_encoder_learning_rate", given[0], why)


# -- noise levels ------------------------------------------------------------------------------

# Words for a shift that follows the number of tokens.
_LINES: Final = {
    **dict.fromkeys(("flux_shift", "flux2_shift", "nextdit_shift"), FLUX_LINE),
    "qwen_shift": training_keys.QWEN_LINE,
    "krea2_shift": training_keys.KREA_LINE,
}
_STEPS: Final = 1000
_EVENLY: Final = ("none", "uniform", "sigma_sqrt", "cosmap")


def sampling(draft: Draft, key: str, value: Any) -> None:
    """Set how sigma is drawn; all keys for it are read here."""
    word = str(value).strip().lower()
    if word == "sigma":
        _of_schedule(draft, key, draft.number("discrete_flow_shift") or 1.0)
    elif word == "uniform":
        draft.take(key, "timestep_sampling", "uniform")
    elif word == "sigmoid":
        _scaled(draft, key, "logit_normal")
    elif word == "shift":
        _scaled(draft, key, "shift", draft.number("discrete_flow_shift") or 1.0)
    elif word == "ideogram4_shift":
        draft.take(key, "timestep_sampling", "shift", "by resolution, as here")
    elif word in _LINES:
        _scaled(
            draft, key, "uniform_shift" if word == "nextdit_shift" else "shift", _at(draft, word)
        )
    elif word == "logsnr":
        mean, deviation = draft.number("logit_mean") or 0.0, draft.number("logit_std") or 1.0
        why = "the logarithm of the signal-to-noise ratio is twice the logit"
        if draft.take(key, "timestep_sampling", "logit_normal", why):
            draft.values |= {"logit_mean": -mean / 2 or 0.0, "logit_std": deviation / 2}
    else:
        draft.unsupported(key, "set timestep_sampling and flow_shift")


def _scaled(draft: Draft, key: str, how: str, shift: float | None = None) -> None:
    """Take a sigma that is the sigmoid of a normal draw, or drawn evenly, and its shift."""
    ours: dict[str, Any] = {} if shift is None else {"flow_shift": round(shift, 4)}
    scale = draft.number("sigmoid_scale")
    scale = 1.0 if scale is None else scale
    if how != "uniform_shift" and scale != training_keys.deviation_of(draft):
        ours["logit_std"] = scale
    draft.values |= ours
    draft.take(key, "timestep_sampling", how, ", ".join(f"{k}: {v:g}" for k, v in ours.items()))


def _at(draft: Draft, word: str) -> float:
    """Return the shift of a line, which is by tokens there, at the job's resolution."""
    sides = sides_of(draft.values.get("resolution", 1024))
    if len(sides) > 1:
        draft.report.warnings.append(
            f"flow_shift: that of {sides[-1]}x{sides[-1]}; there, each size has its own"
        )
    tokens = round((sides[-1] / training_keys.FLUX_TOKEN) ** 2)
    return _LINES[word].at(tokens, extrapolate=True)


def _of_schedule(draft: Draft, key: str, shift: float, *, turned: bool = True) -> None:
    """Set sigma as it is drawn among the steps of a schedule.

    Args:
        draft: The job.
        key: What is reported.
        shift: Of the schedule.
        turned: Whether the first step is the one with most noise.
    """
    word = str(draft.get("weighting_scheme") or "none").strip().lower()
    shifted = shift != 1
    if word == "mode":
        draft.take(key, "timestep_sampling", "mode", "with weighting_scheme: mode")
        draft.values["mode_scale"] = draft.number("mode_scale") or 1.29
        if shifted:
            draft.unsupported("weighting_scheme", f"mode is not shifted here, by {shift:g} there")
        return
    if word == "logit_normal":
        mean, deviation = draft.number("logit_mean") or 0.0, draft.number("logit_std") or 1.0
        draft.values |= {"logit_mean": (-mean if turned else mean) or 0.0, "logit_std": deviation}
        how = "shift" if shifted else "logit_normal"
    elif word in _EVENLY:
        how = "uniform_shift" if shifted else "uniform"
    else:
        draft.unsupported(key, "set timestep_sampling")
        return
    draft.values |= {"flow_shift": shift} if shifted else {}
    draft.take(key, "timestep_sampling", how, f"drawn as there, with a shift of {shift:g}")


def weighting(draft: Draft, key: str, value: Any) -> None:
    """Set how SD3's sigma is drawn, and its loss weighted."""
    word = str(value).strip().lower()
    _of_schedule(draft, key, draft.number("training_shift") or 1.0, turned=False)
    weight = "none" if word == "sigma_sqrt" else "sigma_squared"  # which that on the data has
    draft.values["loss_weighting"] = weight
    if word == "cosmap":
        draft.unsupported(key, "cosmap is used alone, not times sigma squared")
    else:
        draft.assume("target", "the loss is on the data", loss_weighting=weight)


def timestep(draft: Draft, key: str, value: Any) -> None:
    """Take one end of the range that sigma is drawn from."""
    number, family = as_number(value), models.family_of(draft)
    ours, neutral = ("sigma_min", 0) if key == "min_timestep" else ("sigma_max", _STEPS)
    how = str(draft.get("timestep_sampling") or "").strip().lower()
    shift = draft.number("training_shift")
    evenly = how == "uniform" or (shift == 1 and draft.get("weighting_scheme") in _EVENLY)
    if number is None or not 0 <= number <= _STEPS:
        draft.unreadable(key, "not a timestep")
    elif number == neutral:
        draft.unneeded(key, "all noise levels are the default")
    elif family.objective != "flow":
        draft.unsupported(key, "all noise levels are trained")
    elif draft.on("preserve_distribution_shape") or evenly:
        draft.take(key, ours, number / _STEPS, "as a sigma")
    elif how == "sigma":
        draft.unsupported(key, "there, it counts from the noisy end of the schedule")
    else:
        draft.values[ours] = number / _STEPS
        draft.unsupported(
            key, f"all draws are squeezed into the range there; {ours} drops those outside of it"
        )
