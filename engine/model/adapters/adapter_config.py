"""Read peft's configuration of an adapter, which may come with a file of any origin."""

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

# Prefixes of module names that are neither diffusers' nor peft's.
_OTHERS: Final = ("diffusion_model.", "lora_unet_", "lora_te", "lora_transformer_", "lycoris_")
_RANKS: Final = ("r", "rank_pattern")
_ALPHAS: Final = ("alpha", "lora_alpha", "alpha_pattern")


def read_adapter_config(
    file: Path, header: Mapping[str, str], modules: Collection[str], prefix: str
) -> dict[str, Any]:
    """Read the configuration from a file's header (diffusers) or from a file next to it (peft).

    Files with ComfyUI's or kohya's names have neither: a configuration next to such a file belongs
    to another one, and must not scale anything here, since their own tools ignore it.

    Args:
        file: The file.
        header: Strings of its header.
        modules: Its module names as stored.
        prefix: Prefix of diffusers' names.

    Returns:
        Peft's keys, without null values; {} if there is no configuration.

    Raises:
        UserError: It cannot be read, or has invalid ranks or alphas.
    """
    if any(name.startswith(_OTHERS) for name in modules):
        return {}
    config_file = file.parent / CONFIG_NAME
    try:
        if text := header.get(LORA_ADAPTER_METADATA_KEY):
            config = {key.removeprefix(f"{prefix}."): v for key, v in json.loads(text).items()}
        elif config_file.is_file():
            config = dict(json.loads(read_regular(config_file, LARGEST_JSON)).items())
        else:
            return {}
        config = {key: value for key, value in config.items() if value is not None}
        _check(config)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, re.error) as error:
        raise UserError(f"its configuration cannot be read ({error})") from None
    return config


def _check(config: Mapping[str, Any]) -> None:
    """Reject ranks and alphas that cannot be used as a scale.

    Raises:
        ValueError: A rank is not positive, or an alpha is not finite.
        TypeError: A value is not a number.
        AttributeError: Patterns are not a mapping.
        re.error: A pattern is not a regular expression.
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
