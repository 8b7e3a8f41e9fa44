"""sd-scripts and musubi-tuner: which model a command trains, and what becomes of its flags."""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs.errors import UserError
from jobs.imports.common.import_report import Kind
from jobs.imports.common.models import ModelMatch, by_pipeline
from jobs.imports.common.whose import MUSUBI, SD_SCRIPTS
from jobs.imports.imported import import_file, import_kohya, import_script
from jobs.imports.kohya import config
from jobs.spec.file.load import load_spec
from tests.support.jobs.kohya_commands import ANIMA, EXAMPLES, FLAGS, FLUX, SDXL, WAN, lost, of

if TYPE_CHECKING:
    from pathlib import Path

NAMES: Final = ("sdxl-lora.toml", "wan-lora.sh")


# -- the examples ----------------------------------------------------------------------------


def leaves(name: str) -> list[str]:
    """Every key of an example and of its datasets, as the report should call it."""
    files = {"sdxl-lora.toml": "dataset.toml", "wan-lora.sh": "videos.toml"}
    content = tomllib.loads((EXAMPLES / files[name]).read_text())
    keys = [f"{files[name]}: general.{key}" for key in content["general"]]
    for i, dataset in enumerate(content["datasets"]):
        place = f"{files[name]}: datasets[{i}]."
        keys += [place + key for key in dataset if key != "subsets"]
        for j, subset in enumerate(dataset.get("subsets", [])):
            keys += [f"{place}subsets[{j}].{key}" for key in subset]
    text = (EXAMPLES / name).read_text()
    if name.endswith(".toml"):
        for section in tomllib.loads(text).values():
            for key, value in section.items():
                words = value if isinstance(value, list) else []
                keys += [f"{key}.{word.partition('=')[0]}" for word in words] or [key]
        return keys
    launched = text[text.index("accelerate launch") :]
    words = re.findall(r"(?<=\s)--(\w+)", text[text.index("ARGS=") : text.index("python")])
    front = re.findall(r"--(\w+)", launched[: launched.index(".py")])
    rest = re.findall(r"(?<=\s)--(\w+)", launched[launched.index(".py") :])
    return [*keys, *words, *(f"accelerate launch --{key}" for key in front), *rest]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_ends_in_exactly_one_class(name: str) -> None:
    reported = [entry.key for entry in import_file(EXAMPLES / name).report.entries]
    assert [key for key in leaves(name) if reported.count(key) != 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_the_job_and_holds_no_secret(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported = import_file(EXAMPLES / name)
    path = tmp_path / "job.yaml"
    path.write_text(imported.to_yaml())
    assert load_spec(path, ignoring=("pretrained_model_name_or_path", "dataset", "swap_blocks"))
    told = imported.to_yaml() + json.dumps(imported.report.to_dict())
    assert "hf_AbCdEf" not in told
    assert "0123456789abcdef" not in told


def test_an_sdxl_lora() -> None:
    imported = import_file(EXAMPLES / "sdxl-lora.toml")
    job = imported.to_dict()
    assert (imported.tool, job["model_family"], job["learning_rate"]) == (SD_SCRIPTS, "sdxl", 5e-5)
    assert (job["lora_rank"], job["lora_alpha"], job["train_batch_size"]) == (32, 16.0, 4)
    assert job["lr_warmup_steps"] == 100  # of 2000 steps
    assert job["datasets"] == [
        {"path": "/data/robots", "repeats": 5},
        {"path": "/data/people", "caption": "person", "regularization": True},
    ]
    assert job["max_bucket_aspect_ratio"] == 4.0  # 1536 by 384 has the area of 768 by 768
    assert job["validation_prompts"] == [
        {
            "prompt": "a tin robot",
            "negative_prompt": "blurry, cropped",
            "resolution": "832x1216",
            "steps": 24,
            "guidance": 6.0,
            "seed": 1,
        },
        "a robot, in the rain",
    ]
    assert lost(imported) == {
        "noise_offset",
        "dataset.toml: datasets[0].subsets[1].color_aug",
        "prompts.txt: --ss",
    }
    assert [entry.key for entry in imported.report.of(Kind.UNKNOWN)] == ["owners_own_key"]


def test_a_lora_of_one_of_wan_s_experts() -> None:
    imported = import_file(EXAMPLES / "wan-lora.sh")
    job = imported.to_dict()
    assert (imported.tool, job["model_flavour"]) == (MUSUBI, "2.2-t2v-a14b-high")
    assert job["pretrained_model_name_or_path"] == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert (job["flow_shift"], job["sigma_min"], job["base_precision"]) == (
        3.0,
        0.875,
        "fp8_scaled",
    )
    assert (job["resolution"], job["num_frames"], job["bucket_step"]) == (632, 45, 16)
    assert job["checkpointing_steps"] == "1 epoch"
    assert not lost(imported)


@pytest.mark.parametrize(
    ("words", "both"),
    [
        ("", True),
        ("--timestep_boundary 875", True),
        ("--min_timestep 875", False),
        ("--max_timestep 900", False),
    ],
)
def test_both_experts_are_trained_unless_the_timesteps_are_those_of_one(
    words: str, both: bool
) -> None:
    command = (
        "wan_train_network.py --task t2v-A14B --dit wan2.2_t2v_low_noise_14B_fp16.safetensors "
        f"--dit_high_noise wan2.2_t2v_high_noise_14B_fp16.safetensors {words}"
    )
    imported = import_kohya([command], MUSUBI)
    assert imported.spec.both_experts is both
    assert "dit_high_noise" not in lost(imported)


# -- which model -----------------------------------------------------------------------------

TRAINED: Final = [
    ("train_network.py", "stable_diffusion", None, "lora"),
    ("train_network.py --v2", "stable_diffusion", "2.1-base", "lora"),
    ("train_network.py --v2 --v_parameterization", "stable_diffusion", "2.1", "lora"),
    ("fine_tune.py", "stable_diffusion", None, "full"),
    ("train_db.py", "stable_diffusion", None, "full"),
    ("sdxl_train.py", "sdxl", None, "full"),
    ("sdxl_train_network.py", "sdxl", None, "lora"),
    ("flux_train_network.py", "flux", None, "lora"),
    ("flux_train.py --model_type chroma", "chroma", None, "full"),
    (
        "flux_train.py --pretrained_model_name_or_path flux1-schnell.safetensors",
        "flux",
        "schnell",
        "full",
    ),
    (
        "sd3_train_network.py --pretrained_model_name_or_path sd3.5_large.safetensors",
        "sd3",
        "3.5-large",
        "lora",
    ),
    ("lumina_train_network.py", "lumina2", None, "lora"),
    ("anima_train_network.py", "anima", None, "lora"),
    ("anima_train.py", "anima", None, "full"),
    ("wan_train_network.py --dit a", "wan", "2.1-t2v-14b", "lora"),
    ("wan_train_network.py --task t2v-1.3B --dit a", "wan", None, "lora"),
    (
        "wan_train_network.py --task i2v-A14B --dit wan2.2_i2v_low_noise.safetensors",
        "wan",
        "2.2-i2v-a14b-low",
        "lora",
    ),
    (
        "wan_train_network.py --task t2v-A14B --dit a --min_timestep 875",
        "wan",
        "2.2-t2v-a14b-high",
        "lora",
    ),
    ("hv_train_network.py --dit a", "hunyuanvideo", None, "lora"),
    ("hv_train.py --dit a", "hunyuanvideo", None, "full"),
    (
        "hv_1_5_train_network.py --dit hunyuanvideo1.5_720p_t2v.safetensors",
        "hunyuanvideo15",
        "720p-t2v",
        "lora",
    ),
    ("hv_1_5_train_network.py --task i2v --dit a", "hunyuanvideo15", "480p-i2v", "lora"),
    (
        "hv_1_5_train_network.py --task i2v --dit 720p_i2v_cfg_distilled.safetensors",
        "hunyuanvideo15",
        "720p-i2v-distilled",
        "lora",
    ),
    ("qwen_image_train_network.py --dit a --edit_plus", "qwen_image", "edit-2509", "lora"),
    ("qwen_image_train.py --dit a --model_version edit-2511", "qwen_image", "edit-2511", "full"),
    ("qwen_image_train.py --dit qwen_image_2512_bf16.safetensors", "qwen_image", "2512", "full"),
    ("zimage_train.py --dit z_image_bf16.safetensors", "z_image", None, "full"),
    ("zimage_train_network.py --dit z_image_turbo_bf16.safetensors", "z_image", "turbo", "lora"),
    ("zimage_train_network.py --dit z_image_de_turbo.safetensors", "z_image", None, "lora"),
    (
        "flux_2_train_network.py --dit a --model_version klein-base-9b",
        "flux2",
        "klein-base-9b",
        "lora",
    ),
    ("ideogram4_train_network.py --dit a", "ideogram4", None, "lora"),
    ("krea2_train_network.py --dit raw.safetensors", "krea2", "raw", "lora"),
    ("flux_kontext_train_network.py --dit a", "flux", "kontext", "lora"),
]


@pytest.mark.parametrize(("command", "family", "flavour", "kind"), TRAINED)
def test_a_script_says_what_is_trained(
    command: str, family: str, flavour: str | None, kind: str
) -> None:
    spec = of(command).spec
    assert (spec.model_family, spec.model_type) == (family, kind)
    assert flavour is None or spec.model_flavour == flavour


# Of musubi-tuner's docs (hunyuan_video_1_5.md), with the optimizer that they recommend; and a full
# fine-tuning by the same script's sister, with Moonshot's scale.
MUONS: Final = {
    "hv_1_5_train_network.py --dit hunyuanvideo1.5_720p_t2v.safetensors --task t2v --sdpa "
    "--mixed_precision bf16 --timestep_sampling shift --weighting_scheme none "
    "--discrete_flow_shift 2.0 --optimizer_type Muon --learning_rate 1e-4 "
    "--gradient_checkpointing --network_module networks.lora_hv_1_5 --network_dim 32 "
    "--max_train_epochs 16 --save_every_n_epochs 1 --seed 42": ("hunyuanvideo15", 0.1, True),
    "hv_train.py --dit a --mixed_precision bf16 --optimizer_type torch.optim.Muon "
    "--optimizer_args adjust_lr_fn=match_rms_adamw weight_decay=0.01 --learning_rate 1e-5 "
    "--gradient_checkpointing --max_train_epochs 4": ("hunyuanvideo", 0.01, False),
}


@pytest.mark.parametrize("command", MUONS)
def test_muon_is_taken_and_a_rate_of_another_scale_is_said(command: str) -> None:
    family, decay, other_scale = MUONS[command]
    imported = of(command)
    spec = imported.spec
    assert (spec.model_family, spec.optimizer, spec.weight_decay) == (family, "muon", decay)
    said = "learning_rate: set adamw's; there, muon's updates are of another size"
    assert (said in imported.report.to_fill_in) == other_scale


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fpack_train_network.py --dit a", "fpack_train_network.py (of musubi-tuner) cannot be"),
        ("sdxl_train_textual_inversion.py", "sdxl_train_textual_inversion.py (of kohya's"),
        ("flux_train_control_net.py", "cannot be imported"),
        ("wan_train_network.py --task i2v-14B-FC --dit a", "--task i2v-14b-fc is not supported"),
        ("wan_train_network.py --task flf2v-14B --dit a", "--task flf2v-14b is not supported"),
        ("hv_1_5_train_network.py --task sr --dit a", "--task sr is not supported"),
        (
            "hv_1_5_train_network.py --task i2v --dit 480p_i2v_step_distilled",
            "--dit 480p_i2v_step_distilled is not supported",
        ),
        ("hv_train_network.py --dit a --dit_in_channels 32", "other than 16 is not supported"),
        ("qwen_image_train_network.py --model_version next --dit a", "next is not supported"),
        ("--network_dim 4 --dit a", "no script is named, and no network_module"),
        ("--network_module networks.lora_own --dit a", "which script trains networks.lora_own"),
        (f"{FLUX} $EXTRA_ARGS", "$EXTRA_ARGS may hold any flags"),
        (f'{FLUX} "${{ARGS[@]}}"', "may hold any flags"),
        (f"{FLUX} --config_file nowhere", "config_file: no such file"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(command: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        of(command)


@pytest.mark.parametrize(
    ("text", "family", "guess"),
    [
        ('network_module = "networks.lora_flux"', "flux", False),
        ('network_module = "lycoris.kohya"\nae = "a"\nt5xxl = "b"', "flux", True),
        ('network_module = "networks.lora_anima"', "anima", False),
        ('network_module = "lycoris.kohya"\nqwen3 = "a"', "anima", True),
        ('network_module = "networks.lora_sd3"', "sd3", False),
        ('network_module = "networks.lora_wan"\ndit = "a"\ndataset_config = "a"', "wan", False),
        ('network_module = "networks.lora"\nresolution = "1024,1024"', "sdxl", True),
        ('network_module = "networks.lora"\nresolution = "512,512"', "stable_diffusion", True),
        ('network_module = "networks.lora"\nresolution = "1"\nv2 = true', "stable_diffusion", True),
        (
            '[a]\npretrained_model_name_or_path="ponyXL"\nnetwork_module="networks.lora"',
            "sdxl",
            True,
        ),
    ],
)
def test_a_file_says_what_is_trained_by_its_network(
    text: str, family: str, guess: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    imported = import_file(path)
    assert imported.spec.model_family == family
    assert any("is a guess" in told for told in imported.report.to_fill_in) is guess


def test_a_network_of_kontext_has_the_name_of_flux_s(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('network_module = "networks.lora_flux"\ndit = "a"\ndataset_config = "b"\n')
    imported = import_file(path)
    assert (imported.tool, imported.spec.model_flavour) == (MUSUBI, "kontext")


@pytest.mark.parametrize(
    ("command", "shared"),
    [
        (FLUX, True),
        (f"{FLUX} --network_args split_qkv=True", False),
        (f"{FLUX} --network_args split_qkv=true", True),  # another spelling is off there
        ("sd3_train_network.py --network_module networks.lora_sd3", True),
        ("lumina_train_network.py --network_module networks.lora_lumina", True),
        ("hv_train_network.py --dit a --network_module networks.lora", True),
        (SDXL, False),
        (WAN, False),
    ],
)
def test_one_matrix_of_q_k_and_v_is_told(command: str, shared: bool) -> None:
    warnings = of(command).report.warnings
    assert any("share one A" in warning for warning in warnings) is shared


def test_datasets_in_a_configuration_are_named_as_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('network_module = "networks.lora_flux"\n[[datasets]]\nresolution = 512\n')
    assert "datasets" in lost(import_file(path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "[general]\n[[datasets]]\nresolution = 512\n", "only describes datasets"),
        ("a.toml", '[[datasets]]\nimage_directory = "a"\n', "only describes datasets"),
        ("a.json", '{"LoRA_type": "Standard", "network_dim": 8}', "graphical interface"),
        ("a.toml", 'dit = "a"\ntraining_mode = "x"\n', "graphical interface"),
        ("a.toml", "micro_batch_size_per_gpu = 1\n", "of diffusion-pipe"),
    ],
)
def test_a_file_that_is_no_training_of_these_tools(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        import_kohya([str(path)])


def test_each_tool_knows_its_own_and_the_other_s() -> None:
    with pytest.raises(UserError, match="is of musubi-tuner, not of kohya's sd-scripts"):
        import_kohya([WAN], SD_SCRIPTS)
    with pytest.raises(UserError, match=r"`fsdp-tui import kohya …` reads it"):
        import_script([FLUX])


PUBLISHED: Final = [
    (f"{FLUX} --pretrained_model_name_or_path /m/flux1-dev.safetensors", "FLUX.1-dev"),
    (f"{SDXL} --pretrained_model_name_or_path sd_xl_base_1.0_0.9vae.safetensors", "xl-base-1.0"),
    ("train_network.py --pretrained_model_name_or_path v1-5-pruned-emaonly.ckpt", "diffusion-v1-5"),
    ("qwen_image_train_network.py --dit qwen_image_fp8_e4m3fn.safetensors", "Qwen/Qwen-Image"),
    (f"{SDXL} --pretrained_model_name_or_path ponyDiffusionV6XL.safetensors", None),
    (f"{SDXL} --pretrained_model_name_or_path flux1-dev.safetensors", None),
    (f"{FLUX} --pretrained_model_name_or_path myflux1-dev-mix.safetensors", None),
]


@pytest.mark.parametrize(("command", "repository"), PUBLISHED)
def test_a_file_of_the_authors_is_their_repository_and_others_are_to_fill_in(
    command: str, repository: str | None
) -> None:
    imported = of(command)
    place = imported.spec.pretrained_model_name_or_path or ""
    assert place.endswith(repository) if repository else not place
    told = "\n".join(imported.report.to_fill_in)
    assert ("is a single file" in told) is (repository is None)


def test_a_directory_of_modular_blocks_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "AnimaModularPipeline"}')
    assert by_pipeline(tmp_path) == ModelMatch("anima")


# -- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", list(FLAGS))
def test_every_flag_of_the_tool_s_parsers_has_a_rule(tool: str) -> None:
    table = config.TABLES[tool]
    lists = {"network_args", "optimizer_args", "lr_scheduler_args"}  # each of their words has one
    secret = {"huggingface_token"}
    unknown = [key for key in FLAGS[tool].split() if key not in table.rules]
    assert {key for key in unknown if not key.startswith(tuple(table.beginnings))} == lists | secret


Lost = Kind.UNSUPPORTED
Needless = Kind.UNNEEDED
KEYS: Final[list[tuple[str, str, dict[str, Any] | Kind]]] = [
    (FLUX, "--optimizer_type AdamW8bit", {"optimizer": "adamw_8bit", "weight_decay": 0.01}),
    (FLUX, "--optimizer_type bitsandbytes.optim.PagedAdamW8bit", {"optimizer": "adamw_8bit"}),
    (FLUX, "--optimizer_type prodigyopt.Prodigy", {"optimizer": "prodigy", "weight_decay": 0.0}),
    (FLUX, "--optimizer_type Lion8bit", {"optimizer": "lion", "weight_decay": 0.0}),
    (FLUX, "--optimizer_type AdamWScheduleFree", {"optimizer": "adamw_schedule_free"}),
    (FLUX, "--optimizer_type torch.optim.Muon", {"optimizer": "muon", "weight_decay": 0.1}),
    (FLUX, "--optimizer_type DAdaptAdam", Lost),
    (FLUX, "--optimizer_type SGDNesterov", Lost),
    (FLUX, "--use_8bit_adam", {"optimizer": "adamw_8bit", "weight_decay": 0.01}),
    (FLUX, "--network_alpha 0", {"lora_alpha": None}),
    (FLUX, "--seed 1", {"lora_rank": 4, "lora_alpha": 1.0, "max_train_steps": 1600}),
    (FLUX, "--learning_rate 1", {"learning_rate": 1.0}),
    (FLUX, "--seed 2", {"learning_rate": 2e-6, "train_guidance": 3.5, "mixed_precision": "no"}),
    (FLUX, "--max_train_epochs 7 --max_train_steps 9", {"num_train_epochs": 7.0}),
    (FLUX, "--max_train_epo 7", {"num_train_epochs": 7.0}),
    (
        FLUX,
        "--lr_scheduler cosine_with_min_lr --lr_scheduler_min_lr_ratio 0.1 --unet_lr 1e-3",
        {"lr_scheduler": "cosine", "lr_end": 1e-4},
    ),
    (FLUX, "--lr_scheduler cosine --lr_warmup_steps 10%", {"lr_warmup_steps": 160}),
    (FLUX, "--lr_scheduler polynomial --lr_scheduler_power 2", {"lr_power": 2.0, "lr_end": 1e-7}),
    (FLUX, "--lr_scheduler inverse_sqrt", Lost),
    (FLUX, "--lr_scheduler_type CosineAnnealingLR", Lost),
    (FLUX, "--fp8_base", {"base_precision": "fp8"}),
    (FLUX, "--blocks_to_swap 18", {"swap_blocks": 18}),
    (FLUX, "--guidance_scale 1", {"train_guidance": 1.0}),
    (FLUX, "--model_prediction_type raw", Needless),
    (FLUX, "--model_prediction_type additive", Lost),
    (FLUX, "--max_timestep 500", Needless),
    (FLUX, "--loss_type l1", {"loss_type": "smooth_l1", "huber_c": 1e-3}),
    (FLUX, "--loss_type huber --huber_c 0.2", {"loss_type": "huber", "huber_c": 0.2}),
    (FLUX, "--log_with all", {"report_to": ["tensorboard", "wandb"]}),
    (FLUX, "--logging_dir logs", {"report_to": ["tensorboard"]}),
    (FLUX, "--apply_t5_attn_mask", Lost),
    (FLUX, "--t5xxl_max_token_length 256", {"max_sequence_length": 256}),
    (FLUX, "--network_args train_blocks=single", Needless),
    (FLUX, "--network_args loraplus_lr_ratio=4", Lost),
    (FLUX, "--save_every_n_steps 100", {"checkpointing_steps": 100}),
    (FLUX, "--save_every_n_epochs 1", {"checkpointing_steps": "1 epoch"}),
    (FLUX, "--save_every_n_steps 9 --save_every_n_epochs 1", Lost),
    (FLUX, "--validate_every_n_epochs 2", {"validation_loss_steps": "2 epochs"}),
    (FLUX, "--deepspeed", Lost),
    (FLUX, "--clip_skip 2", Needless),
    (FLUX, "--vae a", Lost),
    (SDXL, "--min_snr_gamma 5", {"snr_gamma": 5.0}),
    (SDXL, "--min_timestep 500", Lost),
    (SDXL, "--noise_offset 0.05", Lost),
    (SDXL, "--zero_terminal_snr", Lost),
    (SDXL, "--debiased_estimation_loss", Lost),
    (SDXL, "--v_parameterization", Needless),
    (SDXL, "--resolution 768,1344", {"resolution": 1016}),
    (SDXL, "--train_batch_size 4", {"train_batch_size": 4}),
    (SDXL, "--flip_aug", {"random_flip": True}),
    (SDXL, "--max_token_length 225", Lost),
    (SDXL, "--caption_prefix a", Lost),
    ("train_network.py --network_module networks.lora", "--clip_skip 2", Lost),
    ("train_network.py --network_module networks.lora", "--clip_skip 1", Needless),
    # Of library/anima_train_utils.py and networks/lora_anima.py.
    (ANIMA, "--seed 1", {"timestep_sampling": "logit_normal", "max_sequence_length": 512}),
    (ANIMA, "--timestep_sampling shift", {"timestep_sampling": "shift", "flow_shift": 1.0}),
    (ANIMA, "--qwen3_max_token_length 256", {"max_sequence_length": 256}),
    (ANIMA, "--weighting_scheme cosmap", {"loss_weighting": "cosmap"}),
    (ANIMA, "--unsloth_offload_checkpointing", {"gradient_checkpointing": True}),
    (ANIMA, "--max_timestep 500", Needless),
    (ANIMA, "--fp8_base", Needless),
    (ANIMA, "--network_args train_llm_adapter=True", Lost),
    (ANIMA, "--network_args train_llm_adapter=False", Needless),
    (ANIMA, "--llm_adapter_lr 1e-5", Needless),
    ("anima_train.py", "--llm_adapter_lr 1e-5", Lost),
    ("anima_train.py", "--llm_adapter_lr 0", Needless),
    ("anima_train.py", "--mod_lr 1e-5", Lost),
    (WAN, "--fp8_base --fp8_scaled", {"base_precision": "fp8_scaled"}),
    (WAN, "--timestep_sampling uniform --min_timestep 100", {"sigma_min": 0.1}),
    (WAN, "--timestep_sampling shift --min_timestep 100", Lost),
    (WAN, "--dit_high_noise b", Lost),
    (WAN, "--weighting_scheme cosmap", {"loss_weighting": "cosmap"}),
    (WAN, "--num_timestep_buckets 4", Lost),
    (WAN, "--dynamo_backend INDUCTOR", {"torch_compile": True}),
    (WAN, "--compile --compile_backend eager", {"torch_compile_backend": "eager"}),
    (WAN, "--cuda_allow_tf32", {"allow_tf32": True}),
]


@pytest.mark.parametrize(("command", "flags", "expected"), KEYS)
def test_a_flag(command: str, flags: str, expected: dict[str, Any] | Kind) -> None:
    imported = of(f"{command} {flags}")
    if isinstance(expected, dict):
        assert {key: getattr(imported.spec, key) for key in expected} == expected
        return
    key = flags.split("--")[-1].split()[0]
    word = flags.split()[-1].partition("=")[0]
    (entry,) = [e for e in imported.report.entries if e.key in (key, f"{key}.{word}")]
    assert entry.kind is expected, entry


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", {"network_train_unet_only", "model_prediction_type"}),
        ("--network_train_unet_only", {"model_prediction_type"}),
        ("--network_train_unet_only --model_prediction_type raw", set()),
        (
            "--network_train_unet_only --model_prediction_type raw --optimizer_type Adafactor",
            {"optimizer_args.relative_step", "optimizer_args.scale_parameter"},
        ),
        (
            "--network_train_unet_only --model_prediction_type raw --optimizer_type Prodigy",
            {"optimizer_args.use_bias_correction", "optimizer_args.safeguard_warmup"},
        ),
        (
            "--network_train_unet_only --model_prediction_type raw --optimizer_type Muon",
            {"optimizer_args.adjust_lr_fn"},
        ),
        (
            "--network_train_unet_only --model_prediction_type raw --optimizer_type Muon "
            "--optimizer_args adjust_lr_fn=match_rms_adamw momentum=0.95",
            set(),
        ),
    ],
)
def test_what_flux_does_by_default_and_a_job_does_not_is_said(flags: str, said: set[str]) -> None:
    assert lost(of(f"flux_train_network.py --network_module networks.lora_flux {flags}")) == said


@pytest.mark.parametrize(
    ("flags", "rank", "rate"),
    [
        ("--network_dim 8", 8, None),
        ("--network_dim 8 --text_encoder_lr 1e-5", 8, 1e-5),
        ("--network_dim 8 --text_encoder_lr 1e-5 2e-5", 8, 1e-5),
        ("--network_dim 8 --text_encoder_lr 0", 0, None),
        ("--network_dim 8 --network_train_unet_only", 0, None),
        ("--network_dim 8 --cache_text_encoder_outputs", 0, None),
    ],
)
def test_text_encoders_are_trained_unless_the_command_says_otherwise(
    flags: str, rank: int, rate: float | None
) -> None:
    spec = of(f"sdxl_train_network.py --network_module networks.lora {flags}").spec
    assert (spec.text_encoder_lora_rank, spec.text_encoder_learning_rate) == (rank, rate)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (
            "lycoris.kohya --network_args algo=lokr factor=8",
            {"lora_variant": "lokr", "lokr_factor": 8},
        ),
        ("lycoris.kohya --network_dim 100000 --network_args algo=lokr", {"lokr_full_matrix": True}),
        ("lycoris.kohya --network_args algo=locon dora_wd=True", {"lora_variant": "dora"}),
        ("lycoris.kohya --network_args algo=loha", None),
        ("networks.oft", None),
        ("networks.dylora", None),
    ],
)
def test_what_a_network_is_here(network: str, expected: dict[str, Any] | None) -> None:
    imported = of(f"sdxl_train_network.py --network_train_unet_only --network_module {network}")
    if expected is None:
        assert "network_module" in lost(imported)
        return
    assert {key: getattr(imported.spec, key) for key in expected} == expected


TARGETS: Final = [
    (
        FLUX,
        "transformer_blocks.0.norm1.linear single_transformer_blocks.3.norm.linear "
        "transformer_blocks.1.attn.add_k_proj single_transformer_blocks.0.proj_mlp",
        "norm_out.linear",
    ),
    (
        f"{FLUX} --network_args train_blocks=single",
        "single_transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_q",
    ),
    (
        f"{FLUX} --network_args train_blocks=double",
        "transformer_blocks.0.attn.to_q",
        "single_transformer_blocks.0.attn.to_q",
    ),
    (
        SDXL,
        "down_blocks.1.attentions.0.proj_in mid_block.attentions.0.transformer_blocks.2.ff.net.2",
        "down_blocks.0.resnets.0.conv1 time_embedding.linear_1",
    ),
    (
        "zimage_train_network.py --dit a --network_module networks.lora_zimage",
        "layers.3.attention.to_q layers.0.feed_forward.w2",
        "noise_refiner.0.attention.to_q",
    ),
]


@pytest.mark.parametrize(("command", "adapted", "others"), TARGETS)
def test_the_layers_are_those_that_the_script_adapts(
    command: str, adapted: str, others: str
) -> None:
    (pattern,) = of(command).spec.lora_target_modules or []
    assert all(re.fullmatch(pattern, name) for name in adapted.split())
    assert not any(re.fullmatch(pattern, name) for name in others.split())


@pytest.mark.parametrize(("args", "alpha"), [("conv_dim=4 conv_alpha=2", 2), ("conv_dim=4", 1)])
def test_convolutions_have_a_rank_of_their_own(args: str, alpha: int) -> None:
    """By create_modules of networks/lora.py: those of 1x1 and linear layers have the other one."""
    imported = of(f"{SDXL} --network_args {args}")
    spec = imported.spec
    (unet, between), ranks = spec.lora_target_modules or [], spec.lora_rank_pattern or {}
    (pattern,) = ranks
    assert (list(ranks.values()), spec.lora_alpha_pattern) == ([4], {pattern: alpha})
    names = {
        "down_blocks.0.resnets.0.conv1": True,
        "mid_block.resnets.1.conv2": True,
        "up_blocks.1.upsamplers.0.conv": True,
        "down_blocks.1.downsamplers.0.conv": True,
        "down_blocks.1.resnets.0.conv_shortcut": False,
        "down_blocks.1.resnets.0.time_emb_proj": False,
    }
    for name, is_large in names.items():
        assert re.fullmatch(between, name)
        assert not re.fullmatch(unet, name)
        assert (re.match(rf"(.*\.)?({pattern})$", name) is not None) is is_large
    assert not any(re.fullmatch(between, name) for name in ("conv_in", "conv_out"))
    assert not lost(imported)


@pytest.mark.parametrize(
    "command",
    [
        f"{FLUX} --network_args conv_dim=4",
        f"{SDXL.replace('networks.lora', 'lycoris.kohya')} --network_args algo=locon conv_dim=4",
    ],
)
def test_other_networks_convolutions_are_said_to_be_lost(command: str) -> None:
    imported = of(command)
    assert "network_args.conv_dim" in lost(imported)
    assert imported.spec.lora_rank_pattern is None


@pytest.mark.parametrize(
    ("flags", "fill_in", "warned"),
    [
        ("--dit a", True, True),
        ("--dit wan2.2_t2v_low_noise_14B.safetensors", False, True),
        ("--dit a --min_timestep 875", False, False),
        ("--dit wan_low.safetensors --max_timestep 875", False, False),
        ("--dit wan_low.safetensors --dit_high_noise b", False, False),
    ],
)
def test_which_expert_is_trained_is_said(flags: str, fill_in: bool, warned: bool) -> None:
    report = of(f"wan_train_network.py --task t2v-A14B {flags}").report
    assert any(text.startswith("model_flavour:") for text in report.to_fill_in) is fill_in
    assert any(text.startswith("model_flavour:") for text in report.warnings) is warned


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("ARGS=(--network_dim 8)", 8),
        ("ARGS=(\n  --network_dim 8 # eight\n)", 8),
        ("ARGS=(--seed 1)\nARGS+=(--network_dim 8)", 8),
        ('ARGS=(--seed 1)\nif [ -n "$X" ]; then\n  ARGS+=(--network_dim 8)\nfi', None),
        ('ARGS=(--seed 1)\n[ -n "$X" ] && ARGS+=(--network_dim 8)', None),
        ("if [ -f a ]; then\n  B=1\nfi\nARGS=(--network_dim 8)", 8),
        ("", None),
    ],
)
def test_arrays_of_a_shell_script_are_read_where_they_are_known(
    text: str, rank: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f'{text}\naccelerate launch {FLUX} "${{ARGS[@]}}"\n')
    if rank is not None:
        assert import_file(path).spec.lora_rank == rank
        return
    with pytest.raises(UserError, match="may hold any flags"):
        import_file(path)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("RANK=8", True),
        ('if [ "$1" = a ]; then\n  RANK=8\nfi', False),
        ('RANK=4\nif [ "$1" = a ]; then RANK=8; else RANK=16; fi', False),
        ("if [ -d a ]; then\n  cd a\nfi\nRANK=8", True),
        ("for i in 1 2; do\n  echo $i\ndone\nRANK=8", True),
    ],
)
def test_a_variable_that_a_script_sets_only_sometimes_is_not_known(
    text: str, known: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"{text}\naccelerate launch {FLUX} --network_dim $RANK --seed 1\n")
    imported = import_file(path)
    unreadable = [entry.key for entry in imported.report.of(Kind.UNREADABLE)]
    assert (imported.spec.lora_rank, unreadable) == ((8, []) if known else (16, ["network_dim"]))
