"""Random jobs that can run, for properties that hold of all of them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from jobs.spec.job_spec import FOLLOWS, JobSpec, field_choices
from jobs.spec.values.spellings import as_none

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)
_MODULE = _TEXT.map(re.escape)  # a part of a name, or a regular expression
_SIZE = st.none() | st.integers(16, 4096) | st.from_regex(r"\A(16|768|8192)x(32|511)\Z")
_EPOCHS = st.integers(1, 999_999).map(
    lambda parts: f"{parts / 1000:g} epoch{'s' * (parts != 1000)}"
)
_PROMPT = st.fixed_dictionaries(
    {"prompt": _TEXT | st.sampled_from(["", "{prompt: a}", "{", '{"prompt": 1}'])},
    optional={
        "negative_prompt": st.just("") | _TEXT,
        "resolution": _SIZE,
        "seed": st.integers(0, 2**63 - 1),
        "steps": st.integers(1, 99),
        "guidance": st.floats(0, 99),
        "true_cfg_scale": st.floats(0, 99),
    },
)
_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"),
    "model_family": st.sampled_from(["flux", "chroma", "qwen_image"]),
    "model_flavour": st.none(),
    # Neither a path that exists nor one that is made absolute.
    # The form takes no path that ends with a blank.
    "pretrained_model_name_or_path": st.from_regex(r"\Ano/such[a-z0-9 :#'\"&*%@`]{1,20}\Z").filter(
        lambda path: path == path.strip()
    ),
    "dataset": st.from_regex(r"\Ano/such[\w \-:#'\"{}\[\]]{1,20}\Z").filter(
        lambda path: path == path.strip()
    ),
    "cache_dir": st.sampled_from([None, "/no/such place"]),
    "validation_prompts": st.lists(_TEXT | _PROMPT, max_size=3),
    "lora_target_modules": st.none() | st.lists(_MODULE, max_size=3),
    "lora_exclude_modules": st.none() | st.lists(_MODULE, max_size=3),
    "lora_rank_pattern": st.none() | st.dictionaries(_MODULE, st.integers(1, 64), max_size=2),
    "lora_alpha_pattern": st.none() | st.dictionaries(_MODULE, st.floats(0.1, 64), max_size=2),
    "init_lora": st.sampled_from([None, "no/such lora.safetensors"]),
    "training_adapter": st.sampled_from([None, "no/such lora.safetensors"]),
    "lora_variant": st.sampled_from(["lora", "rslora"]),
    "lokr_factor": st.just(-1) | st.integers(1, 64),
    "fsdp_transformer_layer_cls_to_wrap": st.none() | st.lists(_TEXT, max_size=2),
    "fsdp_auto_wrap_policy": st.just("TRANSFORMER_BASED_WRAP"),
    "fsdp_version": st.integers(1, 2),
    "fsdp_reshard_after_forward": st.booleans(),
    "fsdp_forward_prefetch": st.integers(0, 16),
    "dp_replicate_size": st.none(),
    "context_parallel_size": st.just(1),
    "context_parallel_comm_strategy": st.sampled_from(["allgather", "alltoall"]),
    "deepspeed_config": st.none(),
    "accelerate_config": st.none()
    | st.fixed_dictionaries(
        {},
        optional={
            "rdzv_backend": st.just("static"),
            "debug": st.booleans(),
            "main_training_function": _TEXT,
            "tpu_env": st.lists(_TEXT, max_size=2),
        },
    ),
    "accelerate_extra_args": st.none()
    | st.lists(st.sampled_from(["--debug", "--tee=3", "--enable_cpu_affinity"]), unique=True),
    "num_machines": st.just(1),
    "machine_rank": st.just(0),
    "launcher": st.just("local"),
    **dict.fromkeys(
        ("slurm_partition", "slurm_account", "slurm_qos"),
        st.none() | st.from_regex(r"\A[a-z][a-z0-9_-]{0,9}\Z").filter(lambda w: as_none(w) == w),
    ),
    "slurm_signal_seconds": st.none() | st.integers(10, 65535),
    "slurm_time": st.sampled_from([None, "90", "1:30:00", "2-00", "2-00:00:00"]),
    "slurm_extra_args": st.none() | st.lists(st.sampled_from(["--exclude=n3", "-x n3"])),
    "slurm_setup": st.none() | st.lists(st.sampled_from(["module load cuda", "a=b; c, 'd'"])),
    "slurm_srun_args": st.none() | st.lists(st.sampled_from(["--container-image=a b.sqsh"])),
    "main_process_ip": st.none() | st.sampled_from(["10.0.0.1", "host.example"]),
    "main_process_port": st.none() | st.integers(0, 65535),
    "gradient_checkpointing": st.just(True),
    "torch_compile_backend": st.sampled_from(["inductor", "eager"]),
    "attention_backend": st.sampled_from(["auto", "math"]),
    "ema_device": st.just("accelerator"),
    "snr_gamma": st.none(),
    "flow_shift": st.none(),
    "sigma_min": st.floats(0, 0.4),
    "lr_end": st.just(0.0),
    "sigma_max": st.floats(0.6, 1),
    "logit_mean": st.floats(-3, 3),
    "optimizer": st.sampled_from(["adamw", "sgd", "lion", "adamw_8bit"]),
    "fsdp_cpu_offload": st.just(False),
    "fsdp_state_dict_type": st.just("SHARDED_STATE_DICT"),
    "fsdp_enable": st.sampled_from([None, True]),
    "gpus": st.none(),
    "device": st.sampled_from(["auto", "cpu"]),
    "num_processes": st.integers(2, 8),
    "strategy": st.sampled_from(["auto", "fsdp2"]),
    "cache_text_embeddings": st.none() | st.booleans(),
    "unload_text_encoder": st.none() | st.booleans(),
    "shard_text_encoders": st.none() | st.booleans(),
    "datasets": st.none(),
    "resolution": st.integers(16, 8192)
    | st.lists(st.integers(16, 8192), min_size=2, max_size=4, unique=True),
    "resolution_mode": st.just("each"),
    "prior_loss_weight": st.just(1.0),
    "class_prompt": st.none(),
    "regularization_target": st.just("images"),
    "preservation": st.just("none"),
    "preservation_class": st.none(),
    "preservation_weight": st.just(1.0),
    "num_class_images": st.just(0),
    "unmasked_weight": st.just(0.0),
    "trigger_word": st.none() | st.text(min_size=1, max_size=8).filter(lambda t: as_none(t)),
    "crop": st.just("random"),
    "bucket_step": st.sampled_from([None, 0]),
    "shuffle_captions": st.just(True),
    "num_frames": st.none(),
    "conditioning_resolution": st.none(),
    "lr_warmup_steps": st.just(0),
    "global_batch_size": st.integers(1, 100),  # times what one forward takes
    "gradient_accumulation_steps": st.integers(1, 100),
    "max_train_steps": st.integers(1, 10**9),
    "num_train_epochs": st.floats(0, 10**6, exclude_min=True),
    "keep_in_full_precision": st.none() | st.lists(_MODULE, max_size=2),
    "base_matmul": st.sampled_from(["auto", "dequantize"]),
    "swap_blocks": st.just(0),
    "batch_shares": st.just(1),
    "tread": st.none()
    | st.dictionaries(
        st.sampled_from(["2..-2", "0..0", "-1..-1"]),
        st.floats(0, 1, exclude_min=True, exclude_max=True),
        max_size=2,
    ).map(lambda routes: routes or None),
    "text_encoder_lora_rank": st.just(0),
    "text_encoder_learning_rate": st.none() | st.floats(1e-6, 10),
    "lora_alpha": st.none() | st.floats(1e-6, 1e6),
    "checkpointing_steps": st.integers(0, 10**6) | _EPOCHS,
    "validation_steps": st.integers(0, 10**6) | _EPOCHS,
    "checkpoints_total_limit": st.none() | st.integers(1, 99),
    "sweep": st.none() | st.sampled_from(["cats", "cats-2"]),
    "stop_worse_than_median_after": st.none() | st.integers(1, 9999),
    "checkpoints_keep_best": st.booleans() | st.integers(2, 9),
    "checkpointing_async": st.sampled_from([None, False]),
    "both_experts": st.just(False),  # most models have one
    "other_expert": st.none() | st.sampled_from(["3", "runs/3-a"]),
    "resume_from_checkpoint": st.none() | st.sampled_from(["3", "3:100", "runs/3-a"]),
    "validation_resolution": _SIZE,
    "export_formats": st.none()
    | st.lists(st.sampled_from(["diffusers", "kohya", "comfyui"]), min_size=1, unique=True),
    "validation_seed": st.none() | st.integers(0, 2**63 - 1),
    "validation_num_frames": st.none() | st.integers(1, 4096),
    "validation_negative_prompt": st.none() | st.just("") | _TEXT,
    "report_to": st.just(["tensorboard"]) | st.just(["wandb", "mlflow"]),
    "tracker_project_name": _TEXT.filter(lambda text: text == text.strip()),
    "tracker_run_name": st.none() | st.just("a run"),
    "logging_dir": st.sampled_from([None, "/no/such place"]),
    "hub_model_id": st.none() | st.sampled_from(["a/b", "b"]),
    "validation_loss_steps": st.none() | st.integers(1, 10**6) | _EPOCHS,
    "validation_scores": st.sampled_from([[], ["clip_t"]]),  # others need validation_fraction
    "validation_clip_model": st.sampled_from(["a/b", "/no/such place"]),
    "validation_dino_model": st.sampled_from(["a/b", "c/d@v1"]),
    "checkpoints_best_by": st.just("validation_loss"),
}


def _strategy_of(name: str) -> st.SearchStrategy[Any]:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if choices := field_choices(name):
        return st.sampled_from(choices)
    field = JobSpec.model_fields[name]
    limits = {type(m).__name__: m for m in field.metadata}
    low = getattr(limits.get("Ge"), "ge", getattr(limits.get("Gt"), "gt", 0))
    high = getattr(limits.get("Le"), "le", getattr(limits.get("Lt"), "lt", 10**6))
    if field.annotation is bool:
        return st.booleans()
    if field.annotation is int:
        return st.integers(low, high)
    assert field.annotation is float, f"no strategy for {name}"
    return st.floats(low, high, exclude_min="Gt" in limits, exclude_max="Lt" in limits)


def _consistent(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys that follow from others; a global batch is a multiple of one forward."""
    if "global_batch_size" in values:
        ranks = values.get("num_processes", REQUIRED["num_processes"])
        values["global_batch_size"] *= ranks * values.get("train_batch_size", 1)
    return {key: v for key, v in values.items() if FOLLOWS.get(key) not in values}


VALUES = st.fixed_dictionaries({}, optional={n: _strategy_of(n) for n in JobSpec.model_fields}).map(
    _consistent
)

# What the strategies above count on.
REQUIRED: dict[str, Any] = {
    "pretrained_model_name_or_path": "no/such",
    "dataset": "no/such",
    "num_processes": 2,
    "gradient_checkpointing": True,
    "crop": "random",
    "shuffle_captions": True,
    "report_to": ["tensorboard"],
    "push_to_hub": True,
}
