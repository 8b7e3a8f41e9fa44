"""Upload an export with its model card, in one commit."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import yaml

from jobs.errors import SpecError, UserError
from jobs.hub.card import LORA_WEIGHTS, PEFT_WEIGHTS, CardFacts, with_trigger, write_card
from jobs.hub.trouble import HubError, explain
from jobs.models.find_model import find_model
from jobs.run.checkpoint_files import find_checkpoint, read_state
from jobs.run.export_places import FACTS_FILE, export_facts
from jobs.run.samples import list_samples
from jobs.spec.families import FAMILIES
from jobs.spec.values.hub_names import HubName

if TYPE_CHECKING:
    from jobs.queue.job import Job
    from jobs.spec.job_spec import JobSpec

_PICTURES: Final = 6  # on a card
_LORAS: Final = (LORA_WEIGHTS, PEFT_WEIGHTS)
_SNAPSHOT: Final = "snapshots"


def upload(
    job: Job, spec: JobSpec, export: Path, *, repo: str | None = None, private: bool | None = None
) -> tuple[str, str]:
    """Push a directory; files that the hub already has are not sent again.

    Returns:
        The repository, and the address of the commit.

    Raises:
        HubError: The hub refuses it, or cannot be reached.
    """
    # Before the library is imported: it reads these once. A mirror need not have Xet's storage, and
    # an upload would not fall back by itself; every hub takes LFS.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if (urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname or "huggingface.co") != (
        "huggingface.co"
    ):
        os.environ["HF_HUB_DISABLE_XET"] = "1"
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters is raised

    target = repo or spec.hub_model_id or job.name
    name = HubName("model", target)
    if not get_token():
        raise HubError("no token of the hub on this machine", "log in with `hf auth login`")
    try:
        api = HfApi()
        if "/" not in target:
            name = HubName("model", f"{api.whoami()['name']}/{target}")
        hidden = spec.hub_private_repo if private is None else private
        api.create_repo(name.repo, private=hidden, exist_ok=True)
        if hidden and not api.model_info(name.repo).private:
            raise HubError(
                f"{name.repo} is public, and this is to be pushed to a private repository",
                "name another repository, or make that one private on the hub",
            )
        facts, pictures = _facts(job, spec, export, name.repo)
        files: dict[str, Path | bytes] = {
            str(path.relative_to(export)): path
            for path in sorted(export.rglob("*"))
            if path.name != FACTS_FILE and _is_own_file(path)
        }
        files |= pictures | {"README.md": write_card(spec, facts).encode()}
        done = api.create_commit(
            name.repo,
            [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message=f"Step {facts.step}",
        )
    except Exception as error:  # of a network, a server, a library
        raise explain(error, name) from error
    return name.repo, str(done.commit_url)


def _is_own_file(path: Path) -> bool:
    """Whether a file is to be pushed.

    Raises:
        HubError: It is a link: what it leads to may be anything on this machine.
    """
    if path.is_symlink():
        raise HubError(
            f"{path} is a link, and links are not pushed",
            "delete it, or replace it with a copy of what is to be published",
        )
    return path.is_file()


def _facts(
    job: Job, spec: JobSpec, export: Path, repo: str
) -> tuple[CardFacts, dict[str, Path | bytes]]:
    """What the card says, and the images that it shows."""
    exported = export_facts(export) or {}
    step = int(exported.get("step") or 0)
    state: dict[str, Any] = {}
    with suppress(UserError):  # deleted since
        state = read_state(find_checkpoint(job.run_dir, step, "").path)
    data = state.get("data") if isinstance(state.get("data"), dict) else {}
    per_epoch = (data or {}).get("steps_per_epoch") or 0
    samples = [sample for sample in list_samples(job.run_dir) if sample.step <= step]
    newest = [sample for sample in samples if sample.step == samples[-1].step][:_PICTURES]
    base, card = _base(spec)
    return CardFacts(
        repo=repo,
        step=step,
        base=base,
        base_card=card,
        samples=int((data or {}).get("samples") or 0),
        epochs=step / per_epoch if per_epoch else 0.0,
        ranks=job.ranks,
        pictures={
            f"images/{sample.number}.png": with_trigger(spec, sample.prompt) for sample in newest
        },
        weights=next((name for name in _LORAS if (export / name).is_file()), ""),
        ema=bool(exported.get("ema")),
    ), {
        f"images/{sample.number}.png": sample.picture
        for sample in newest
        if _is_own_file(sample.picture)
    }


def _base(spec: JobSpec) -> tuple[str, dict[str, Any]]:
    """The base model's hub id, as far as it has one, and the head of its own card."""
    text = spec.pretrained_model_name_or_path
    try:
        root = find_model(text)
    except SpecError:  # gone since
        return "", {}
    named = HubName.read("model", text)
    base = named.repo if named is not None and not Path(text).expanduser().is_dir() else ""
    if not base and root.parent.name == _SNAPSHOT:
        base = root.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    flavours = FAMILIES[spec.model_family].flavours
    if not base and (flavour := flavours.get(spec.model_flavour or "")) is not None:
        base = flavour.hub_id
    try:
        text = (root / "README.md").read_text(encoding="utf-8", errors="replace")
        _, head, _ = text.split("---\n", 2)
        card = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError):
        card = None
    return base, card if isinstance(card, dict) else {}
