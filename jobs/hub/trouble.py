"""Turn errors of the hub into one sentence with a remedy, never containing a token."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from jobs.errors import UserError
from jobs.untrusted.secrets import without_secrets

if TYPE_CHECKING:
    from jobs.spec.values.hub_names import HubName

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (408, 409, 412, 429)  # HTTP status codes in addition to those from 500


class HubError(UserError):
    """The hub refused a request, or is unreachable.

    Attributes:
        passing: Whether the problem is temporary, so that a retry may succeed.
    """

    def __init__(self, message: str, hint: str | None = None, *, passing: bool = False) -> None:
        super().__init__(message, hint)
        self.passing = passing


def explain(error: BaseException, name: HubName) -> HubError:
    """Turn an error of `huggingface_hub` into one that tells the user what to do."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, HubError):
        return error
    host = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    page = f"https://{host}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"
    caused = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    error = caused or error
    if isinstance(error, errors.GatedRepoError):
        login = "" if get_token() else ", log in with `hf auth login`,"
        return HubError(
            f"{name.repo} is gated, and its license has not been accepted",
            f"accept it on {page}{login} and try again",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{name.repo} has no revision {name.revision or 'main'}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError):
        login = "its token may not read it" if get_token() else "log in with `hf auth login`"
        return HubError(
            f"{host} has no {name.kind} {name.repo} that may be read here",
            f"check the name; if it is private, {login}",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubError("the hub is turned off by HF_HUB_OFFLINE", "unset it")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return HubError(
            f"no space left for {name.repo} in {constants.HF_HUB_CACHE}",
            "free space, or set HF_HOME to a larger disk",
        )
    if status in (401, 403):
        return HubError(
            f"{host} refuses access to {name.repo} ({status})",
            "check the token: `hf auth whoami`, `hf auth login`",
        )
    if isinstance(status, int):
        passing = status in _PASSING or status >= 500
        return HubError(f"{host} answered with status {status}", passing=passing)
    text = without_secrets(str(error).strip().splitlines()[0] if str(error).strip() else "")
    return HubError(
        f"{host} cannot be reached ({type(error).__name__}{': ' if text else ''}{text})",
        passing=True,
    )
