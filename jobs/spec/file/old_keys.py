"""Translate keys and words of FSDP v1 and of accelerate's files.

Nothing is translated silently: each key gets a note, or is rejected with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import Problem
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.spellings import as_bool, as_choice, as_none, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

_RESHARD: Final = "fsdp_reshard_after_forward"
_SHARDING: Final = "fsdp_sharding_strategy"
_STRATEGIES: Final[dict[str, dict[str, Any]]] = {
    "FULL_SHARD": {_RESHARD: True},
    "SHARD_GRAD_OP": {_RESHARD: False},
    "NO_SHARD": {"strategy": "ddp"},
    "HYBRID_SHARD": {"strategy": "hsdp", _RESHARD: True},
    "HYBRID_SHARD_ZERO2": {"strategy": "hsdp", _RESHARD: False},
}
_BY_NUMBER: Final = {str(n): name for n, name in enumerate(_STRATEGIES, 1)}  # by torch's numbers
_PREFETCH: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
RENAMED: Final = {
    "use_fsdp": "fsdp_enable",
    "fsdp_offload_params": "fsdp_cpu_offload",
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "gpu_ids": "gpus",
}
_NEEDLESS: Final = {
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "every rank reads its own shard of the same files",
}
_REFUSED: Final = {
    "fsdp_activation_checkpointing_offload": "activation offload is not supported; set "
    "gradient_checkpointing: true, or raise context_parallel_size to save memory",
    "fsdp_ignored_modules": "every module is sharded; choose the blocks with "
    "fsdp_transformer_layer_cls_to_wrap",
}

# Flags of other trainers, which people type from memory, and what a job says instead.
FOREIGN: Final = {
    "output_dir": "a job has its own run directory; `fsdp-tui export ID --output DIR` copies out",
    "output_name": "set name",
    "save_model_as": "set export_formats",
    "noise_offset": "not supported: noise is drawn as when the model was trained",
    "scale_lr": "not supported: set learning_rate to what it comes to, times the samples of a step",
    "v_parameterization": "not needed: the model's scheduler_config.json says what it predicts",
    "prediction_type": "not needed: the model's scheduler_config.json says what it predicts",
    "train_data_dir": "set dataset",
    "instance_data_dir": "set dataset",
    "dataset_name": "set dataset, to a folder or to the name of a dataset of the hub",
    "dataset_config": "list the folders under datasets, or `fsdp-tui import` the whole command",
    "reg_data_dir": "list the folder under datasets with regularization: true",
    "class_data_dir": "list the folder under datasets with regularization: true",
    "with_prior_preservation": "set class_prompt, and num_class_images",
    "instance_prompt": "set trigger_word, or caption under datasets",
    "validation_prompt": "set validation_prompts",
    "sample_prompts": "set validation_prompts",
    "rank": "set lora_rank",
    "network_dim": "set lora_rank",
    "network_alpha": "set lora_alpha",
    "network_module": "set model_type: lora, and lora_variant",
    "unet_lr": "set learning_rate",
    "text_encoder_lr": "set text_encoder_learning_rate",
    "optimizer_type": "set optimizer",
    "use_8bit_adam": "set optimizer: adamw_8bit",
    "max_train_epochs": "set num_train_epochs",
    "save_every_n_steps": "set checkpointing_steps",
    "blocks_to_swap": "set swap_blocks",
    "fp8_base": "set base_precision: fp8",
    "discrete_flow_shift": "set flow_shift",
    "min_snr_gamma": "set snr_gamma",
}


@dataclass
class Translation:
    """The result of translating old keys.

    Attributes:
        values: The job's values, without old keys.
        notes: How each key was interpreted, one sentence each.
        problems: Keys that cannot be translated, each with a sentence that begins with the key.
    """

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def put(self, old: str, written: Any, new: dict[str, Any], why: str = "") -> None:
        """Set what an old key means, unless the new key has a contradicting value."""
        meaning = ", ".join(f"{key}: {_shown(value)}" for key, value in new.items())
        for key, value in new.items():
            mine = self.values.get(key)
            if key != old and mine is not None and not agree(key, mine, value):
                text = (
                    f"{_shown(written)} means {meaning}, which contradicts {key}: "
                    f"{_shown(mine)}; keep only the latter"
                )
                self.problems.append(Problem(old, text, named=True))
                return
        self.values |= new
        self.notes.append(f"{old}: {_shown(written)} is read as {meaning}{why}")


def translate(values: dict[str, Any]) -> Translation:
    """Translate the old keys and words among a job's values.

    Args:
        values: By normalized key; not modified.
    """
    done = Translation(dict(values))
    for key in values:
        if key in _NEEDLESS or key in _REFUSED or key in (_SHARDING, *RENAMED):
            written = done.values.pop(key)
            if as_none(written) is not None:
                _OLD[key](done, key, written)
        elif key in _WORDS:
            _WORDS[key](done, key, values[key])
    return done


def agree(key: str, value: Any, other: Any) -> bool:
    """Return whether two spellings of a value mean the same; False if one is invalid."""
    try:
        return bool(read_value(key, value) == read_value(key, other))
    except ValidationError:
        return False


def read_value(key: str, value: Any) -> Any:
    """Parse a value as the job does.

    Raises:
        ValidationError: The value is invalid for the key.
    """
    return getattr(JobSpec.model_validate({key: value}), key)


def _renamed(done: Translation, key: str, written: Any) -> None:
    new = RENAMED[key]
    if new == "gpus" and str(written).strip().lower() == "all":
        done.notes.append("gpu_ids: all has no effect; gpus: N uses any N free GPUs")
        return
    before = len(done.notes)
    done.put(key, written, {new: written})
    if len(done.notes) > before and new in _WORDS:
        _WORDS[new](done, new, written)


def _sharding(done: Translation, key: str, written: Any) -> None:
    word = str(written).strip().lstrip("_")
    name = as_choice(_BY_NUMBER.get(word, word), tuple(_STRATEGIES))
    if name not in _STRATEGIES:
        choices = ", ".join(_STRATEGIES)
        meant = did_you_mean(word, _STRATEGIES)
        done.problems.append(
            Problem(key, f'"{written}" is not one of {choices}{meant}', named=True)
        )
        return
    why = ""
    if name == "NO_SHARD":
        why = "; fsdp_enable is ignored" if as_bool(done.values.get("fsdp_enable")) is True else ""
        done.values["fsdp_enable"] = None
    if name.startswith("HYBRID") and as_none(done.values.get("dp_replicate_size")) is None:
        why = "; set dp_replicate_size to the number of replicas, such as one per machine"
    done.put(key, name, _STRATEGIES[name], why)


def _needless(done: Translation, key: str, written: Any) -> None:
    if not isinstance(as_bool(written), bool):
        done.problems.append(Problem(key, f'"{written}" is not true or false', named=True))
    else:
        done.notes.append(f"{key}: {_shown(written)} has no effect; {_NEEDLESS[key]}")


def _refused(done: Translation, key: str, written: Any) -> None:
    if as_bool(written) is not False:
        done.problems.append(Problem(key, _REFUSED[key], named=True))


def _reshard(done: Translation, key: str, written: Any) -> None:
    """Read the sharding strategy that accelerate's FSDP v1 files store under this key."""
    names = tuple(_STRATEGIES)
    if isinstance(written, str) and as_choice(written.lstrip("_"), names) in names:
        del done.values[key]
        _sharding(done, key, written)


def _backward(done: Translation, key: str, written: Any) -> None:
    if as_choice(written, _PREFETCH) in _PREFETCH:
        done.put(key, written, {key: 0}, ", FSDP2's implicit prefetch of the next unit")


def _forward(done: Translation, key: str, written: Any) -> None:
    if not (isinstance(written, str) and written.isdecimal()) and as_bool(written) is True:
        done.put(key, written, {key: 1}, ", one unit ahead")


_OLD: Final[dict[str, Callable[[Translation, str, Any], None]]] = {
    _SHARDING: _sharding,
    **dict.fromkeys(RENAMED, _renamed),
    **dict.fromkeys(_NEEDLESS, _needless),
    **dict.fromkeys(_REFUSED, _refused),
}
# Current keys that formerly had other values.
_WORDS: Final[dict[str, Callable[[Translation, str, Any], None]]] = {
    _RESHARD: _reshard,
    "fsdp_backward_prefetch": _backward,
    "fsdp_forward_prefetch": _forward,
}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
