"""Peft's configuration of an adapter, which comes with a file that others made."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.utils import CONFIG_NAME

from jobs.errors import UserError
from jobs.untrusted.files import LARGEST_JSON, read_regular

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

# What names begin with that are neither diffusers' nor peft's.
_OTHERS: Final = ("diffusion_model.", "lora_unet_", "lora_te", "lora_transformer_", "lycoris_")
_RANKS: Final = ("r", "rank_pattern")
_ALPHAS: Final = ("alpha", "lora_alpha", "alpha_pattern")


def read_adapter_config(
    file: Path, header: Mapping[str, str], modules: Collection[str], prefix: str
) -> dict[str, Any]:
    """Read what diffusers writes into a file's header, or peft beside the file.

    ComfyUI's and kohya's names have neither: a configuration beside such a file is of another one,
    and what their own readers do not look at must not scale anything here.

    Args:
        file: The file.
        header: Its header's texts.
        modules: Its modules, as it names them.
        prefix: What names of diffusers begin with.

    Returns:
        Peft's keys, without those that are null; {} where there is no configuration.

    Raises:
        UserError: It cannot be read, or has ranks or alphas that are none.
    """
    if any(name.startswith(_OTHERS) for name in modules):
        return {}
    beside = file.parent / CONFIG_NAME
    try:
        if text := header.get(LORA_ADAPTER_METADATA_KEY):
            config = {key.removeprefix(f"{prefix}."): v for key, v in json.loads(text).items()}
        elif beside.is_file():
            config = dict(json.loads(read_regular(beside, LARGEST_JSON)).items())
        else:
            return {}
        config = {key: value for key, value in config.items() if value is not None}
        _check(config)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, re.error) as error:
        raise UserError(f"its configuration cannot be read ({error})") from None
    return config


def _check(config: Mapping[str, Any]) -> None:
    """Refuse ranks and alphas that nothing can be scaled by.

    Raises:
        ValueError: A rank is not positive, or an alpha is not finite.
        TypeError: One is no number.
        AttributeError: Patterns are no mapping.
        re.error: A pattern is no regular expression.
    """
    for keys, fits in ((_RANKS, lambda number: number > 0), (_ALPHAS, math.isfinite)):
        for key in keys:
            if key not in config:
                continue
            several = config[key] if key.endswith("_pattern") else {"": config[key]}
            for pattern, number in several.items():
                re.compile(pattern)
                if not fits(number):
                    raise ValueError(f"{key}: {number} cannot scale anything")
