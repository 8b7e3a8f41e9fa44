"""Turn errors of the hub and of stores into one sentence with a remedy, never with a token."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from jobs.errors import UserError
from jobs.spec.values.hub_names import HubName, StoreUrl
from jobs.untrusted.secrets import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (408, 409, 412, 429)  # HTTP status codes in addition to those from 500
# The package that fsspec needs for a protocol, and how to log in to such a store.
_STORES: Final = {
    "s3": ("s3fs", "run `aws configure`, or set AWS_PROFILE, on this machine"),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "run `gcloud auth application-default login`")),
    **dict.fromkeys(
        ("az", "abfs", "abfss"),
        ("adlfs", "set AZURE_STORAGE_ACCOUNT_NAME on this machine, and run `az login`"),
    ),
    **dict.fromkeys(("http", "https"), ("aiohttp", "only public addresses can be read")),
}
_NO_LOGIN: Final = (  # classes of botocore, google.auth and azure.identity
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("ProfileNotFound", "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
    *("DefaultCredentialsError", "RefreshError", "ClientAuthenticationError"),
    "CredentialUnavailableError",
)
_WRONG: Final = (ValueError, TypeError, AttributeError, NotImplementedError, NotADirectoryError)


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
    if isinstance(error, HubError):
        return error
    if isinstance(name, StoreUrl):
        return _explain_store(error, name)
    from huggingface_hub import constants, errors, get_token

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
    if full := no_room(error, name):
        return full
    if status in (401, 403):
        return HubError(
            f"{host} refuses access to {name.repo} ({status})",
            "check the token: `hf auth whoami`, `hf auth login`",
        )
    if isinstance(status, int):
        passing = status in _PASSING or status >= 500
        return HubError(f"{host} answered with status {status}", passing=passing)
    return HubError(f"{host} cannot be reached ({_in_words(error)})", passing=True)


def cache_of(name: HubName) -> tuple[Path, str]:
    """Return where something is fetched to, and the variable that says so."""
    if isinstance(name, StoreUrl):
        return name.root, "XDG_CACHE_HOME"
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE), "HF_HOME"


def no_room(error: BaseException, name: HubName) -> HubError | None:
    """Return the error of a full disk; None for any other."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    cache, variable = cache_of(name)
    return HubError(
        f"no space left for {name.repo} in {cache}",
        f"free space, or set {variable} to a larger disk",
    )


def _explain_store(error: BaseException, url: StoreUrl) -> HubError:
    """Turn an error of fsspec, or of the libraries that it calls, into one with a remedy."""
    package, login = _STORES.get(url.protocol, ("its package", "log in to it on this machine"))
    causes = list(_causes(error))
    # HTTPFileSystem raises FileNotFoundError whatever the server said. Other causes do not count:
    # aiohttp's ContentLengthError of a cut connection claims to have status 400.
    answers = causes if isinstance(error, FileNotFoundError) else causes[:1]
    status = next((code for cause in answers if (code := _status(cause))), 0)
    if isinstance(error, ImportError):
        return HubError(
            f"{url.protocol}:// needs the package {package}, which is not installed",
            "pip install 'fsdp-tui[s3]'" if package == "s3fs" else f"pip install {package}",
        )
    if any(type(cause).__name__ in _NO_LOGIN for cause in causes):
        return HubError(f"no credentials for {url} on this machine", login)
    if isinstance(error, PermissionError) or status in (401, 403):
        return HubError(f"the store refuses access to {url}", login)
    if status in _PASSING or status >= 500:
        return HubError(f"the store of {url} answered with status {status}", passing=True)
    if isinstance(error, FileNotFoundError) or status == 404:
        return HubError(f"there is no {url}", "check the address")
    if status or isinstance(error, _WRONG):
        return HubError(f"{url} cannot be read ({_in_words(error)})")
    return HubError(f"the store of {url} cannot be reached ({_in_words(error)})", passing=True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error of any of these libraries; 0 if it has none."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    names = ("status", "status_code", "code")
    values = (getattr(source, name, 0) for source in (error, response) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def _in_words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = without_secrets(lines[0])
    return f"{type(error).__name__}{': ' if text else ''}{text}"
