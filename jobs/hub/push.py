"""`python -m jobs.hub.push JOB`: push a job's exports to the hub, in parallel with its supervisor.

It is a separate process, so that nothing waits for it and network failures delay no step. Its
progress is in `hub/push.json` of the run directory, so that another process can resume.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import yaml

from jobs.errors import NotFoundError, SpecError, UserError
from jobs.export import export_checkpoint
from jobs.hub.pushes import Push
from jobs.hub.trouble import HubError, explain
from jobs.machine import file_lock
from jobs.machine.engine_tools import ToolError
from jobs.models.find_model import find_model
from jobs.queue.states import State
from jobs.queue.store import SERVICE, Store
from jobs.run.checkpoint_files import find_checkpoint, list_checkpoints, read_state
from jobs.run.export_places import FACTS_FILE, export_facts
from jobs.run.samples import list_samples
from jobs.spec.families import FAMILIES, component_of, get_family
from jobs.spec.file.load import load_spec
from jobs.spec.rules.steps import accumulation_steps
from jobs.spec.values.datasets import TRIGGER
from jobs.spec.values.hub_names import HubName
from jobs.untrusted.secrets import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs.queue.job import Job
    from jobs.spec.job_spec import InputKeys, JobSpec, RecipeKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.job import JobKeys


# -- upload ---------------------------------------------------------------------------------
# Upload an export with its model card, in one commit.


_PICTURES: Final = 6  # images on a card
LORA_WEIGHTS: Final = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"  # for pipelines without a LoRA loader
_LORAS: Final = (LORA_WEIGHTS, PEFT_WEIGHTS)
_SNAPSHOT: Final = "snapshots"


def upload(
    job: Job, spec: JobSpec, export: Path, *, repo: str | None = None, private: bool | None = None
) -> tuple[str, str]:
    """Push a directory; files that the hub already has are not sent again.

    Returns:
        The repository, and the URL of the commit.

    Raises:
        HubError: The hub refuses, or is unreachable.
    """
    # Set these before importing the library, which reads them once. A mirror may lack Xet storage,
    # and uploads do not fall back automatically; every hub supports LFS.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if (urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname or "huggingface.co") != (
        "huggingface.co"
    ):
        os.environ["HF_HUB_DISABLE_XET"] = "1"
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # errors that matter are raised

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
    except Exception as error:  # from the network, the server or the library
        raise explain(error, name) from error
    return name.repo, str(done.commit_url)


def _is_own_file(path: Path) -> bool:
    """Return whether a path is a file to push.

    Raises:
        HubError: It is a link, whose target may be any file on this machine.
    """
    if path.is_symlink():
        raise HubError(
            f"{path} is a link, and links are not pushed",
            "delete it, or replace it with a copy of what is to be published",
        )
    return path.is_file()


def _facts(
    job: Job, spec: InputKeys, export: Path, repo: str
) -> tuple[CardFacts, dict[str, Path | bytes]]:
    """Collect the facts and the images for the card."""
    exported = export_facts(export) or {}
    step = int(exported.get("step") or 0)
    state: dict[str, Any] = {}
    with suppress(UserError):  # deleted in the meantime
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


def _base(spec: JobKeys) -> tuple[str, dict[str, Any]]:
    """Return the base model's hub id, or "", and the metadata of its card."""
    text = spec.pretrained_model_name_or_path
    try:
        root = find_model(text)
    except SpecError:  # deleted in the meantime
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


# -- card --------------------------------------------------------------------------------


_LICENSE: Final = ("license", "license_name", "license_link")
# These are in other sections of the card.
_ELSEWHERE: Final = ("name", "model_family", "model_flavour", "trigger_word")
_ALWAYS: Final = (
    *("resolution", "learning_rate", "optimizer", "lr_scheduler", "train_batch_size"),
    *("gradient_accumulation_steps", "mixed_precision", "seed"),
)


@dataclass(frozen=True)
class CardFacts:
    """Facts on a card in addition to the job's settings.

    Attributes:
        repo: The target repository, `ORG/NAME`.
        step: Optimizer steps trained.
        base: Hub id of the base model; "" if it has none.
        base_card: The metadata of the base model's card.
        samples: Number of training images and videos; 0 if unknown.
        epochs: How often each was used; 0 if unknown.
        ranks: Number of ranks that trained it.
        pictures: Path in the repository → prompt of the image.
        weights: Name of the LoRA file, `LORA_WEIGHTS` or `PEFT_WEIGHTS`; "" for a full model.
        ema: Whether the weights are averaged.
    """

    repo: str
    step: int
    base: str = ""
    base_card: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 0
    epochs: float = 0.0
    ranks: int = 1
    pictures: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    ema: bool = False


def write_card(spec: JobSpec, facts: CardFacts) -> str:
    """Return the text of README.md. Deterministic: equal facts give equal text."""
    family, lora = get_family(spec.model_family, spec.model_flavour), spec.model_type == "lora"
    video, trigger = family.frame_step > 0, trigger_of(spec)
    pipeline = "text-to-video" if video else "text-to-image"
    head: dict[str, Any] = {key: facts.base_card[key] for key in _LICENSE if key in facts.base_card}
    library = "peft" if facts.weights == PEFT_WEIGHTS else "diffusers"
    head |= {"library_name": library, "pipeline_tag": pipeline}
    if facts.base:
        head |= {"base_model": facts.base}
        head |= {"base_model_relation": "adapter" if lora else "finetune"}
    head["tags"] = [pipeline, "diffusers", *(["lora"] if lora else []), family.name, "fsdp-tui"]
    if trigger:
        head["instance_prompt"] = trigger
    if facts.pictures:
        head["widget"] = [
            {"text": prompt or " ", "output": {"url": path}}
            for path, prompt in facts.pictures.items()
        ]
    adapter = "LoKr" if spec.lora_variant == "lokr" else "LoRA"
    what = adapter if lora else "fine-tuned model"
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else family.title
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {facts.repo.rpartition('/')[2]}",
        f"A {what} of {base}, trained for {facts.step:,} steps with fsdp-tui.",
        *(["<Gallery />"] if facts.pictures else []),
        *([f"## Trigger word\n\nUse `{trigger}` in the prompt."] if trigger else []),
        f"## Use\n\n```python\n{_usage(spec, facts)}\n```",
        f"## Training data\n\n{_data(spec, facts)}",
        f"## Settings\n\n{_table(_settings(spec, facts))}",
    ]
    return "\n\n".join(parts) + "\n"


def trigger_of(spec: DataKeys) -> str:
    """Return the job's trigger word, or those of its datasets."""
    words = [dataset.trigger_word for dataset in spec.datasets or []]
    return spec.trigger_word or ", ".join(dict.fromkeys(filter(None, words)))


def with_trigger(spec: DataKeys, prompt: str) -> str:
    """Return a prompt with its trigger word filled in."""
    return prompt.replace(TRIGGER, trigger_of(spec)).strip()


def _usage(spec: RecipeKeys, facts: CardFacts) -> str:
    modular = get_family(spec.model_family).modular
    loader, dtype = "ModularPipeline" if modular else "DiffusionPipeline", "torch.bfloat16"
    lines = ["import torch", f"from diffusers import {loader}"]
    by_peft = facts.weights == PEFT_WEIGHTS
    lines += ["from peft import PeftModel", ""] if by_peft else [""]
    loaded = (facts.base or "path/to/the/base/model") if facts.weights else facts.repo
    if modular:
        lines.append(f'pipeline = {loader}.from_pretrained("{loaded}")')
        lines.append(f"pipeline.load_components(torch_dtype={dtype})")
    else:
        lines.append(f'pipeline = {loader}.from_pretrained("{loaded}", torch_dtype={dtype})')
    if by_peft:
        component = f"pipeline.{component_of(spec)}"
        lines.append(f'{component} = PeftModel.from_pretrained({component}, "{facts.repo}")')
    # few pipelines can load LoKr, but all models can
    elif facts.weights and spec.lora_variant == "lokr":
        component = component_of(spec)
        prefix = component if component == "unet" else "transformer"
        lines.append(
            f'pipeline.{component}.load_lora_adapter("{facts.repo}", prefix="{prefix}", '
            f'weight_name="{facts.weights}")'
        )
    elif facts.weights:
        lines.append(f'pipeline.load_lora_weights("{facts.repo}", weight_name="{facts.weights}")')
    return "\n".join(lines)


def _data(spec: JobKeys, facts: CardFacts) -> str:
    what = "images or videos" if get_family(spec.model_family).frame_step else "images"
    if not facts.samples:
        return "Not published."
    often = f", each seen about {facts.epochs:.3g} times" if facts.epochs >= 1 else ""
    return f"{facts.samples:,} {what} with captions{often}. Neither is published here."


def _settings(spec: JobSpec, facts: CardFacts) -> dict[str, Any]:
    """Return public settings that differ from the defaults, plus those readers always expect."""
    values = {key: getattr(spec, key) for key in _ALWAYS} | spec.public_values()
    values["gradient_accumulation_steps"] = accumulation_steps(spec, facts.ranks)
    shown = {"steps": facts.step, "ranks": facts.ranks} | ({"ema": True} if facts.ema else {})
    for key, value in values.items():
        if key not in _ELSEWHERE and value not in (None, [], ""):
            shown.setdefault(key, value)
    return shown


def _table(rows: Mapping[str, Any]) -> str:
    lines: Sequence[str] = [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(["| setting | value |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value).replace("|", "\\|")


# -- push -----------------------------------------------------------------------------------


POLL_INTERVAL: Final = 5.0  # seconds
_NICE: Final = 10
_FIRST_PAUSE: Final = 5.0  # seconds after a temporary failure; the pause doubles each time
_LONGEST_PAUSE: Final = 600.0
_GIVES_UP: Final = 40  # consecutive failures, about five hours


def follow(store: Store, job_id: int, pause: Callable[[float], None] = time.sleep) -> int:
    """Push a job's exports as they appear, until it has ended; return the exit status.

    An intermediate checkpoint that cannot be pushed is skipped, because the final export follows.
    """
    failures, skipped = 0, set[int]()
    while True:
        try:
            job = store.get(job_id)
        except NotFoundError:  # the job was removed
            return 0
        spec = load_spec(job.run_dir.job_file)
        if not spec.push_to_hub:
            return 0
        final, steps = _pending(job, checkpoints=spec.push_checkpoints_to_hub)
        steps = [step for step in steps if step == final or step not in skipped]
        if not steps and (job.state.ended or job.state is State.QUEUED):
            return 1 if skipped else 0
        if not steps:
            pause(POLL_INTERVAL)
            continue
        step = steps[0]
        try:
            push_step(job, step)
        except (UserError, ToolError, OSError) as error:
            if step != final and step not in _saved(job):
                # deleted while it was read, for example because of checkpoints_total_limit
                continue
            failures += 1
            problem = without_secrets(str(error))
            replace(Push.read(job.run_dir), problem=problem).keep(job.run_dir)
            print(time.strftime("%Y-%m-%d %H:%M:%S"), f"step {step}: {problem}", flush=True)
            if getattr(error, "passing", False) and failures <= _GIVES_UP:
                pause(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1)))
            elif step == final:
                return 1
            else:
                skipped.add(step)
                failures = 0
        else:
            failures = 0


def push_step(
    job: Job,
    step: int | None = None,
    *,
    repo: str | None = None,
    private: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Push:
    """Push an export, creating it first if necessary.

    Args:
        job: The job.
        step: Step of the checkpoint; by default that of the job's export, or the newest one.
        repo: The target repository; by default the job's.
        private: Whether a new repository is private; by default as the job says.
        progress: Called with the export's progress in percent, and 100.

    Raises:
        HubError: The hub refuses, or is unreachable.
        UserError: There is nothing to export.
        ToolError: The export failed.
    """
    spec = load_spec(job.run_dir.job_file)
    export, made = job.run_dir.export, None
    ready = (export_facts(export) or {}).get("step")
    if step is None:
        newest = _saved(job)[-1:]
        step = ready if ready is not None else next(iter(newest), None)
    if ready is None or ready != step:
        made = job.run_dir.root / "hub" / f"step-{step}"
        shutil.rmtree(made, ignore_errors=True)  # left by a killed attempt
        made.parent.mkdir(mode=0o700, exist_ok=True)
        export = export_checkpoint(job, step, output=made, progress=progress).path
    try:
        name, url = upload(job, spec, export, repo=repo, private=private)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    if repo is not None:  # a manual push to another repository
        return Push(name, [step] if step is not None else [], url)
    before = Push.read(job.run_dir)
    done = [*before.pushed, *([step] if step is not None and step not in before.pushed else [])]
    pushed = Push(name, done, url)
    try:
        return pushed.keep(job.run_dir)
    except OSError as error:
        raise UserError(
            f"step {step} is pushed to {url}, which cannot be noted in {job.run_dir.root} "
            f"({error.strerror})"
        ) from error


def _pending(job: Job, *, checkpoints: bool) -> tuple[int | None, list[int]]:
    """Return the final step if training has completed, and the steps to push, ascending."""
    before = Push.read(job.run_dir).pushed
    steps = _saved(job) if checkpoints else []
    final = (export_facts(job.run_dir.export) or {}).get("step")
    if not isinstance(final, int) or job.state is not State.COMPLETED:
        final = None
    else:
        steps = [*(step for step in steps if step < final), final]
    newest = max(before, default=0)
    return final, [step for step in steps if step > newest]


def _saved(job: Job) -> list[int]:
    return [saved.step for saved in list_checkpoints(job.run_dir)]


def main() -> int:
    """Push the exports of a job, unless another process does; return the exit status."""
    job = Store(patience=SERVICE).get(int(sys.argv[1]))
    place = job.run_dir.root / "hub"
    place.mkdir(mode=0o700, exist_ok=True)
    with open(place / "push.lock", "a") as lock:
        if not file_lock.acquire(lock):
            return 0
        os.nice(_NICE)
        return follow(Store(patience=SERVICE), job.id)


if __name__ == "__main__":
    raise SystemExit(main())
