"""A person's own function decides which modules become FSDP units: `fsdp_auto_wrap_policy`.

`python -m engine.parallel.wrap_policy PATH` checks one before a job is queued. Torch is not
imported here: what the function needs, its own module imports.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import pkgutil
import sys
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    Policy = Callable[..., Any]

KEY: Final = "fsdp_auto_wrap_policy"
_ASKED: Final = {"module": None, "recurse": False, "nonwrapped_numel": 0}


def load_policy(path: str) -> Policy:
    """Import a wrap policy and check that it takes what torch's policies take.

    Args:
        path: `pkg.mod.name` of a function `(module, recurse, nonwrapped_numel) -> bool`, or of a
            `functools.partial` of one, such as of `torch.distributed.fsdp.wrap`.

    Raises:
        UserError: It cannot be imported, or cannot be called like that.
    """
    try:
        resolved = pkgutil.resolve_name(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may do anything, exit included
        raise UserError(
            f"{KEY}: cannot import {path}: {type(error).__name__}: {error}",
            "the module must be installed for the Python that runs jobs (pip install -e .)",
        ) from None
    if not callable(resolved):
        raise UserError(f"{KEY}: {path} is a {type(resolved).__name__}, not a function")
    try:
        inspect.signature(resolved).bind(**_ASKED)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{KEY}: {path} cannot be called as a policy ({error})",
            "write def policy(module, recurse, nonwrapped_numel) -> bool",
        ) from None
    policy: Policy = resolved
    return policy


def choose_modules(
    root: torch.nn.Module, policy: Policy, ignored: Collection[torch.nn.Parameter] = ()
) -> list[torch.nn.Module]:
    """Return the modules below the root that a policy wraps, inner ones first.

    Asks as torch's FSDP does: `recurse=True`, whether to look into a module, then `recurse=False`,
    whether to wrap it with what is not wrapped yet.

    Args:
        root: The whole model.
        policy: See `load_policy`.
        ignored: Parameters that are not sharded, and not counted.

    Raises:
        UserError: The policy failed, or chose what cannot be wrapped.
    """
    chosen: dict[torch.nn.Module, None] = {}
    _visit(root, "", _Asked(policy), set(ignored), chosen)
    chosen.pop(root, None)  # always a unit, and the last one
    return list(chosen)


class _Asked:
    """A policy with its failures in words."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, module: torch.nn.Module, name: str, recurse: bool, numel: int) -> bool:
        try:
            return bool(self._policy(module=module, recurse=recurse, nonwrapped_numel=numel))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{KEY}: it failed on {name or 'the full model'}: {what}") from error


def _visit(
    module: torch.nn.Module,
    name: str,
    wants: _Asked,
    ignored: set[torch.nn.Parameter],
    chosen: dict[torch.nn.Module, None],
) -> int:
    """Choose within a module; how many of its parameters are in units then."""
    own = sum(p.numel() for p in module.parameters() if p not in ignored)
    if module in chosen:  # shared, and met before
        return own
    if not wants(module, name, True, own):
        return 0
    wrapped = 0
    for part, child in module.named_children():
        wrapped += _visit(child, f"{name}.{part}".lstrip("."), wants, ignored, chosen)
    if not wants(module, name, False, own - wrapped):
        return wrapped
    if _never_called(module) and name:
        raise UserError(
            f"{KEY}: it chose {name}, a {type(module).__name__}, which is never called",
            "choose the modules in it",
        )
    chosen[module] = None
    return own


def _never_called(module: torch.nn.Module) -> bool:
    """Whether it is a mere container, which FSDP cannot wrap."""
    return getattr(type(module).forward, "__name__", "") == "_forward_unimplemented"


def main(arguments: list[str]) -> int:
    """Check the policy of this path.

    Returns:
        0, or 2 with one line on standard error.
    """
    if len(arguments) != 1:
        print("fsdp-tui: usage: python -m engine.parallel.wrap_policy PATH", file=sys.stderr)
        return 2
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where the answer goes is not theirs
            load_policy(arguments[0])
    except UserError as error:
        print("fsdp-tui: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(json.dumps({"policy": arguments[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
