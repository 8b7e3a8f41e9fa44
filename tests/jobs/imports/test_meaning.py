"""Layers that imported jobs adapt, and noise levels that they draw, against the tools' own.

What a tool does is written out here, with the file that says so.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from engine import families
from engine.diffusion.objective import build_objective
from engine.model.adapters.lora import add_lora
from engine.toy import write_toy
from jobs.imports.imported import (
    import_ai_toolkit,
    import_diffusion_pipe,
    import_onetrainer,
    import_script,
    import_simpletuner,
)
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.imports.imported import Imported
    from jobs.spec.job_spec import JobSpec

DRAWS: Final = 20_000
ATTENTION: Final = ["to_k", "to_q", "to_v", "to_out.0"]
JOINT: Final = [*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
FEED_FORWARD: Final = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
FLUX: Final = [*(f"attn.{name}" for name in JOINT), *FEED_FORWARD]


def flux2(blocks: int) -> list[str]:
    singles = (f"single_transformer_blocks.{n}.attn.to_out" for n in range(blocks))
    return [*ATTENTION, "to_qkv_mlp_proj", *singles]


# `target_modules` of huggingface/diffusers' examples, of August 2026: script, family:flavour.
TARGETS: Final = [
    ("dreambooth/train_dreambooth_lora.py", "stable_diffusion", [*ATTENTION, "add_k_proj"]),
    ("text_to_image/train_text_to_image_lora.py", "stable_diffusion", ATTENTION),
    ("advanced/train_dreambooth_lora_sd15_advanced.py", "stable_diffusion", ATTENTION),
    ("dreambooth/train_dreambooth_lora_sdxl.py", "sdxl", ATTENTION),
    ("text_to_image/train_text_to_image_lora_sdxl.py", "sdxl", ATTENTION),
    ("dreambooth/train_dreambooth_lora_flux.py", "flux", FLUX),
    ("advanced/train_dreambooth_lora_flux_advanced.py", "flux", FLUX),
    ("flux-control/train_control_lora_flux.py", "flux:control", ["x_embedder", *FLUX]),
    ("dreambooth/train_dreambooth_lora_flux_kontext.py", "flux:kontext", [*FLUX, "proj_mlp"]),
    ("research/train_dreambooth_lora_flux_miniature.py", "flux", ATTENTION),
    ("dreambooth/train_dreambooth_lora_flux2.py", "flux2", flux2(48)),
    ("dreambooth/train_dreambooth_lora_flux2_img2img.py", "flux2", flux2(48)),
    ("dreambooth/train_dreambooth_lora_flux2_klein.py", "flux2:klein-base-4b", flux2(24)),
    ("dreambooth/train_dreambooth_lora_hidream.py", "hidream", [*ATTENTION[:3], "to_out"]),
    (
        "dreambooth/train_dreambooth_lora_ideogram4.py",
        "ideogram4",
        [*ATTENTION, "w1", "w2", "w3"],
    ),
    (
        "dreambooth/train_dreambooth_lora_krea2.py",
        "krea2",
        [
            *(*ATTENTION, "to_gate", "ff.up", "ff.down", "img_in", "final_layer.linear"),
            *("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"),
            *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
        ],
    ),
    ("dreambooth/train_dreambooth_lora_lumina2.py", "lumina2", ATTENTION),
    ("dreambooth/train_dreambooth_lora_qwen_image.py", "qwen_image", ATTENTION),
    ("dreambooth/train_dreambooth_lora_sana.py", "sana", ATTENTION[:3]),
    ("dreambooth/train_dreambooth_lora_sd3.py", "sd3", [f"attn.{name}" for name in JOINT]),
    ("dreambooth/train_dreambooth_lora_sd3.py", "sd3:3-medium", [f"attn.{n}" for n in JOINT]),
    ("research/train_dreambooth_lora_sd3_miniature.py", "sd3", ATTENTION),
    ("dreambooth/train_dreambooth_lora_z_image.py", "z_image", ATTENTION),
]
# `DEFAULT_LORA_TARGET` of bghira/SimpleTuner's simpletuner/helpers/models, of August 2026, and
# what flux/model.py takes for flux_lora_target: all.
SIMPLETUNER: Final = [
    ("flux", JOINT),
    ("flux2", [*(f"attn.{name}" for name in ATTENTION), "attn.to_qkv_mlp_proj"]),
    *(("auraflow", JOINT), ("hidream", ATTENTION), ("sana", ATTENTION), ("sd3", ATTENTION)),
    *(("lumina2", [*ATTENTION, "to_qkv"]), ("chroma", ATTENTION), ("z_image", ATTENTION)),
    ("krea2", ATTENTION),
    ("ideogram4", [*ATTENTION, "w1", "w2", "w3"]),  # whose names are those of the authors there
]


class Toys:
    """Toys of families, each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[str, Path] = {}

    def model(self, name: str) -> Path:
        """Return the directory of `family` or `family:flavour`."""
        if name not in self._written:
            family, _, flavour = name.partition(":")
            flavour = flavour or next(iter(FAMILIES[family].flavours))
            place = self._root / name.replace(":", "-")
            self._written[name] = write_toy(place, family, flavour=flavour, pictures=1).model
        return self._written[name]

    def denoiser(self, name: str) -> torch.nn.Module:
        facts = FAMILIES[name.partition(":")[0]]
        config = json.loads((self.model(name) / facts.component / "config.json").read_text())
        with torch.device("meta"):
            model: torch.nn.Module = getattr(diffusers, facts.transformer).from_config(config)
        return model


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def adapted(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def check_targets(toys: Toys, name: str, spec: JobSpec, targets: list[str]) -> None:
    theirs, mine = toys.denoiser(name), toys.denoiser(name)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets), theirs)
    family, _, flavour = name.partition(":")
    loaded = families.load(family, flavour or spec.model_flavour or None, toys.model(name))
    add_lora(mine, spec, loaded.lora_targets(spec))
    assert adapted(mine) == adapted(theirs) != set()


@pytest.mark.parametrize(("script", "name", "targets"), TARGETS, ids=[r[0][6:] for r in TARGETS])
def test_a_script_without_lora_layers_adapts_the_layers_that_it_adapts_there(
    script: str, name: str, targets: list[str], toys: Toys
) -> None:
    spec = import_script([f"{script} --rank=2"]).spec
    assert spec.model_family == name.partition(":")[0]
    check_targets(toys, name, spec, targets)


@pytest.mark.parametrize(("family", "targets"), SIMPLETUNER, ids=[row[0] for row in SIMPLETUNER])
def test_simpletuners_default_adapts_the_layers_that_it_adapts_there(
    family: str, targets: list[str], toys: Toys, tmp_path: Path
) -> None:
    spec = simpletuner(tmp_path, model_family=family, lora_rank=2).spec
    check_targets(toys, family, spec, targets)


def simpletuner(folder: Path, **keys: Any) -> Imported:
    path = folder / "config.json"
    path.write_text(json.dumps({"data_backend_config": "none.json", **keys}))
    return import_simpletuner(path)


def ai_toolkit(folder: Path, arch: str, kind: str, side: int) -> Imported:
    process = {
        "type": "sd_trainer",
        "model": {"arch": arch},
        "network": {"type": "lora", "linear": 2},
        "datasets": [{"folder_path": "d", "resolution": [side]}],
        "train": {"timestep_type": kind},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps({"job": "extension", "config": {"name": "a", "process": [process]}}))
    return import_ai_toolkit(path)


# Of Nerogar/OneTrainer's modules/modelSetup: layers with one of these words in their names; and an
# expression of its presets for Z-Image.
FILTERS: Final = [
    ("FLUX_DEV_1", "flux", "attn,ff.net,proj_mlp"),
    ("FLUX_DEV_1", "flux", "attn"),
    ("FLUX_DEV_1", "flux", "transformer_block"),
    ("KREA_2", "krea2", "attn,ff"),
    ("QWEN", "qwen_image", "transformer_block"),
    ("STABLE_DIFFUSION_35", "sd3", "transformer_block"),
    ("CHROMA_1", "chroma", "attn,ff.net,proj_mlp"),
    ("QWEN", "qwen_image", "attn,img_mlp,txt_mlp"),
    ("HI_DREAM_FULL", "hidream", "attn1,ff_i"),
    ("PIXART_SIGMA", "pixart_sigma", "attn1,attn2,ff.net"),
    ("STABLE_DIFFUSION_35", "sd3", "attn"),
    ("SANA", "sana", "attn1,attn2"),
    ("STABLE_DIFFUSION_XL_10_BASE", "sdxl", "attentions"),
    ("STABLE_DIFFUSION_15", "stable_diffusion", "attn"),
    ("Z_IMAGE", "z_image", "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*"),
]


@pytest.mark.parametrize(("model", "name", "words"), FILTERS)
def test_a_layer_filter_of_onetrainer_chooses_the_layers_that_it_chooses_there(
    model: str, name: str, words: str, toys: Toys, tmp_path: Path
) -> None:
    keys = {"layer_filter": words, "layer_filter_regex": words.startswith("^")}
    spec = onetrainer(tmp_path, model, **keys).spec
    parts = words.split(",")
    theirs = {
        module
        for module, layer in toys.denoiser(name).named_modules()
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))
        and any(re.search(w, module) if words.startswith("^") else w in module for w in parts)
    }
    mine = toys.denoiser(name)
    add_lora(mine, spec, "none")
    assert adapted(mine) == theirs != set()


@pytest.mark.parametrize("family", ["flux", "sd3", "qwen_image", "auraflow"])
def test_diffusion_pipe_adapts_all_linear_layers_of_the_blocks(
    family: str, toys: Toys, tmp_path: Path
) -> None:
    """As get_target_modules of its models/base.py does, by the names of the blocks' classes."""
    model, blocks = toys.denoiser(family), FAMILIES[family].blocks
    theirs = {
        f"{place}.{inner}"
        for place, block in model.named_modules()
        if type(block).__name__ in blocks
        for inner, layer in block.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    add_lora(model, diffusion_pipe(tmp_path, family).spec, "none")
    assert adapted(model) == theirs != set()


def onetrainer(folder: Path, model: str, **keys: Any) -> Imported:
    path = folder / "config.json"
    path.write_text(json.dumps({"training_method": "LORA", "model_type": model, **keys}))
    return import_onetrainer(path)


def diffusion_pipe(folder: Path, family: str, **model: Any) -> Imported:
    path, side = folder / "config.toml", model.pop("side", 1024)
    (folder / "d.toml").write_text(f"resolutions = [{side}]\n[[directory]]\npath = 'd'\n")
    lines = [f"{key} = {json.dumps(value)}" for key, value in model.items()]
    path.write_text(
        "\n".join(["dataset = 'd.toml'", "[model]", f"type = '{family}'", *lines])
        + "\n[adapter]\ntype = 'lora'\nrank = 2\n"
    )
    return import_diffusion_pipe(path)


# -- noise levels ----------------------------------------------------------------------------

RANDOM: Final = np.random.default_rng(0)


def even() -> Any:
    return RANDOM.random(DRAWS)


def logistic(mean: float = 0.0, deviation: float = 1.0) -> Any:
    return 1 / (1 + np.exp(-RANDOM.normal(mean, deviation, DRAWS)))


def shifted(shift: float, sigma: Any) -> Any:
    return shift * sigma / (1 + (shift - 1) * sigma)


def table(shift: float, u: Any) -> Any:
    """Look up sigmas as the scripts do: step `u · 1000` of FlowMatchEulerDiscreteScheduler's."""
    steps = shifted(shift, np.arange(1000, 0, -1) / 1000)
    return steps[np.minimum((u * 1000).astype(int), 999)]


def line(
    tokens: int, few: int = 256, many: int = 4096, low: float = 0.5, high: float = 1.15
) -> float:
    """The shift by tokens, as diffusers' pipelines compute it (calculate_shift)."""
    return math.exp(low + (high - low) * (tokens - few) / (many - few))


# Each script's flags, and sigma as it draws it. The scheduler's shift is that of the published
# model: 3 of SD 3, 6 of Lumina 2 (whose script calls the share of data sigma), 3 in HiDream's
# script; others shift by size, and only while sampling. Z-Image's is its toy's.
SCRIPTS: Final[list[tuple[str, str, Callable[[], Any]]]] = [
    ("flux", "", lambda: table(1, even())),
    ("flux2", "", lambda: table(1, even())),
    ("flux_kontext", "", lambda: table(1, even())),
    ("qwen_image", "", lambda: table(1, even())),
    ("sana", "", lambda: table(1, even())),
    ("krea2", "", lambda: table(1, even())),
    ("ideogram4", "", lambda: shifted(2, logistic(deviation=1.5))),
    ("hidream", "", lambda: table(3, even())),
    ("lumina2", "", lambda: 1 - table(6, even())),
    ("lumina2", "--weighting_scheme=logit_normal", lambda: 1 - table(6, logistic())),
    (
        "lumina2",
        "--weighting_scheme=logit_normal --logit_mean=0.7",
        lambda: 1 - table(6, logistic(0.7)),
    ),
    ("sd3", "", lambda: table(3, logistic())),
    ("sd3", "--logit_mean=0.7", lambda: table(3, logistic(0.7))),
    ("sd3", "--weighting_scheme=sigma_sqrt", lambda: table(3, even())),
    ("flux", "--weighting_scheme=logit_normal --logit_mean=0.7", lambda: table(1, logistic(0.7))),
]


def check_draws(toys: Toys, spec: JobSpec, side: int, drawn: Any) -> None:
    """Compare quantiles: of 20,000 draws, each lies within 1.5 % of where it should."""
    flavour = spec.model_flavour or next(iter(FAMILIES[spec.model_family].flavours))
    root = toys.model(spec.model_family)
    family = families.load(spec.model_family, flavour, root)
    cells = side // {"sana": 32, "flux2": 16, "ideogram4": 16}.get(spec.model_family, 8)
    latents = torch.empty(1, 4, cells, cells)
    objective = build_objective(spec, family, root)
    for quantile in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98):
        level = objective.level_at(quantile, latents)
        assert np.mean(drawn < level) == pytest.approx(quantile, abs=0.015), quantile


@pytest.mark.parametrize(
    ("script", "flags", "draw"), SCRIPTS, ids=[f"{s}{f}" for s, f, _ in SCRIPTS]
)
def test_a_script_draws_the_noise_levels_that_it_draws_there(
    script: str, flags: str, draw: Callable[[], Any], toys: Toys
) -> None:
    spec = import_script([f"train_dreambooth_lora_{script}.py --rank=2 {flags}"]).spec
    check_draws(toys, spec, 1024, draw())


def test_z_images_script_draws_with_its_models_scheduler(toys: Toys) -> None:
    config = json.loads((toys.model("z_image") / "scheduler/scheduler_config.json").read_text())
    assert config["shift"] != 1
    spec = import_script(["train_dreambooth_lora_z_image.py --rank=2"]).spec
    check_draws(toys, spec, 1024, table(config["shift"], even()))


# ostris/ai-toolkit, toolkit/samplers/custom_flowmatch_sampler.py: sigma is one of 1,000 shifted
# steps. Its schedulers are in toolkit/sampler.py and extensions_built_in/diffusion_models; tokens
# are 2x2 latents of 8 pixels, but single ones of Chroma and Kontext, which have no patch size.
AI_TOOLKIT: Final = [
    ("zimage", 1024, 3.0),
    ("flux2", 1024, line(64 * 64)),
    ("flux2", 512, line(32 * 32)),
    ("flux", 1024, line(64 * 64)),
    ("flux", 1536, line(96 * 96)),
    ("flux2", 1536, line(96 * 96)),
    ("flux_kontext", 1024, line(128 * 128)),
    ("chroma", 512, line(64 * 64)),
    ("chroma", 1024, line(128 * 128)),
    ("lumina2", 1024, 6.0),
    ("hidream", 1024, 3.0),
    ("sd3", 1024, 3.0),
    ("auraflow", 1024, 3.0),
    ("wan21", 512, 3.0),
]


@pytest.mark.parametrize(("arch", "side", "shift"), AI_TOOLKIT)
def test_shift_of_ai_toolkit_draws_as_it_does_there(
    arch: str, side: int, shift: float, toys: Toys, tmp_path: Path
) -> None:
    spec = ai_toolkit(tmp_path, arch, "shift", side).spec
    check_draws(toys, spec, side, shifted(shift, even()))


# bghira/SimpleTuner, simpletuner/helpers/training/custom_schedule.py: a shift of 3 unless set, or
# by 2x2 latents, which are of 16 pixels in FLUX.2; Sana's own sampler draws evenly.
SHIFTS: Final[list[tuple[str, dict[str, Any], Callable[[], Any]]]] = [
    (
        "flux",
        {"flow_schedule_auto_shift": True, "resolution": 1536},
        lambda: shifted(line(96 * 96), logistic()),
    ),
    ("flux2", {}, lambda: shifted(3, logistic())),
    ("flux", {}, lambda: shifted(3, logistic())),
    ("sana", {}, even),
    ("ideogram", {}, lambda: shifted(2, logistic(deviation=1.5))),
    (
        "ideogram",
        {"ideogram_schedule_mu": 0.5, "ideogram_schedule_std": 1, "flow_schedule_shift": 7},
        lambda: shifted(2, logistic(0.5)),
    ),
    ("flux", {"flow_schedule_auto_shift": True}, lambda: shifted(line(64 * 64), logistic())),
    ("flux2", {"flow_schedule_auto_shift": True}, lambda: shifted(line(32 * 32), logistic())),
    ("sd3", {"flow_schedule_auto_shift": True}, lambda: shifted(line(64 * 64), logistic())),
    ("lumina2", {"flow_schedule_auto_shift": True}, lambda: shifted(line(64 * 64), logistic())),
    (
        "qwen_image",
        {"flow_schedule_auto_shift": True, "flow_use_uniform_schedule": True},
        lambda: shifted(line(64 * 64, many=8192, high=0.9), even()),
    ),
]


@pytest.mark.parametrize(("family", "keys", "draw"), SHIFTS)
def test_simpletuner_draws_as_it_does_there(
    family: str, keys: dict[str, Any], draw: Callable[[], Any], toys: Toys, tmp_path: Path
) -> None:
    spec = simpletuner(tmp_path, **{"model_family": family, "resolution": 1024} | keys).spec
    check_draws(toys, spec, keys.get("resolution", 1024), draw())


# Nerogar/OneTrainer, modules/modelSetup/mixin/ModelSetupNoiseMixin.py, and calculate_timestep_shift
# of its models: tokens are 2x2 latents of 8 pixels.
ONETRAINER: Final[list[tuple[str, dict[str, Any], Callable[[], Any]]]] = [
    ("FLUX_DEV_1", {}, even),
    ("CHROMA_1", {"dynamic_timestep_shifting": True}, even),
    ("FLUX_DEV_1", {"timestep_shift": 3}, lambda: shifted(3, even())),
    ("SANA", {"timestep_distribution": "LOGIT_NORMAL"}, logistic),
    (
        "Z_IMAGE",
        {"timestep_distribution": "LOGIT_NORMAL", "noising_bias": 0.7},
        lambda: logistic(0.7),
    ),
    (
        "FLUX_2",
        {"timestep_distribution": "LOGIT_NORMAL", "dynamic_timestep_shifting": True},
        lambda: shifted(line(64 * 64), logistic()),
    ),
    (
        "QWEN",
        {"dynamic_timestep_shifting": True},
        lambda: shifted(line(64 * 64, many=8192, high=0.9), even()),
    ),
    (
        "STABLE_DIFFUSION_35",
        {"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.0},
        lambda: (lambda u: 1 - u - (np.cos(np.pi / 2 * u) ** 2 - 1 + u))(even()),
    ),
    ("HI_DREAM_FULL", {"min_noising_strength": 0.2}, lambda: 0.2 + 0.8 * even()),
]


@pytest.mark.parametrize(("model", "keys", "draw"), ONETRAINER)
def test_onetrainer_draws_as_it_does_there(
    model: str, keys: dict[str, Any], draw: Callable[[], Any], toys: Toys, tmp_path: Path
) -> None:
    spec = onetrainer(tmp_path, model, resolution="1024", **keys).spec
    check_draws(toys, spec, 1024, draw())


# tdrussell/diffusion-pipe, prepare_inputs of its models.
PIPE: Final[list[tuple[str, dict[str, Any], Callable[[], Any]]]] = [
    ("flux", {}, logistic),
    ("sd3", {"timestep_sample_method": "uniform"}, even),
    ("flux2", {"shift": 3}, lambda: shifted(3, logistic())),
    ("flux", {"flux_shift": True, "side": 512}, lambda: shifted(line(32 * 32), logistic())),
    ("flux", {"flux_shift": True, "side": 1536}, lambda: shifted(line(96 * 96), logistic())),
    ("chroma", {"flux_shift": True}, lambda: shifted(line(64 * 64), logistic())),
    ("flux2", {"flux_shift": True}, lambda: shifted(line(32 * 32), logistic())),
    ("lumina_2", {"flux_shift": True}, logistic),
    ("lumina_2", {"lumina_shift": True}, lambda: shifted(line(64 * 64), logistic())),
    ("hidream", {"sigmoid_scale": 2.0}, lambda: 1 / (1 + np.exp(-2 * RANDOM.normal(0, 1, DRAWS)))),
]


@pytest.mark.parametrize(("family", "keys", "draw"), PIPE)
def test_diffusion_pipe_draws_as_it_does_there(
    family: str, keys: dict[str, Any], draw: Callable[[], Any], toys: Toys, tmp_path: Path
) -> None:
    spec = diffusion_pipe(tmp_path, family, **keys).spec
    check_draws(toys, spec, keys.get("side", 1024), draw())


def test_a_prediction_that_overrides_the_models_file_is_said() -> None:
    line = "train_text_to_image_lora.py --rank=2 --prediction_type=v_prediction"
    (entry,) = (e for e in import_script([line]).report.entries if e.key == "prediction_type")
    assert re.search("scheduler_config.json", entry.why)
    assert entry.kind == "not_supported"
