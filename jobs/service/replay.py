"""Export a job for running it anywhere: as its file, flags, or its ranks' command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import yaml

from jobs.backends import backend
from jobs.backends.slurm.script import script_by_hand
from jobs.errors import UserError
from jobs.launch import build_launch
from jobs.machine import bytecode
from jobs.machine.processes import RUN_ID_VARIABLE
from jobs.run.rundir import RunDir, read_json
from jobs.spec.file.flags import flags_of, to_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.strategy import launched_strategy, world_size
from jobs.spec.values.yaml_lines import dump_mapping

if TYPE_CHECKING:
    from jobs.queue.store import Job
    from jobs.spec.job_spec import JobSpec

Form = Literal["yaml", "flags", "accelerate", "sbatch"]
FORMS: Final = get_args(Form)


def replay(job: Job, form: Form, *, public: bool = False) -> str:
    """Return the text that reruns a job: a job file, shell-quoted flags, or a shell script.

    Args:
        job: The job.
        form: The format.
        public: Include only public values, like model cards: a file or flags without model, data,
            and anything that names a person or a machine.

    Raises:
        UserError: Its job file cannot be read, or the format cannot be public.
    """
    facts = replay_facts(job, form, public=public)
    if form == "sbatch":
        return str(facts).rstrip("\n")
    if form == "yaml":
        return (dump_mapping(facts) if public else yaml_of(job)).rstrip("\n")
    return shlex.join(facts) if form == "flags" else script_of(facts, f"Job {job.id} “{job.name}”")


def replay_facts(job: Job, form: Form, *, public: bool = False) -> Any:
    """Return what reruns a job as JSON values.

    These are the job's values, its flags, or environment, command and files.
    """
    spec = load_spec(job.run_dir.job_file)
    if public and form not in ("yaml", "flags"):
        raise UserError(
            "--public goes with --as yaml or flags", "a launch names paths and machines"
        )
    if public:
        values = spec.public_values()
        return values if form == "yaml" else flags_of(values)
    if form == "yaml":
        return spec.to_dict()
    if form == "flags":
        return to_flags(spec)
    if form == "sbatch":
        return script_by_hand(spec)
    return launch_facts(_settled(job, spec), spec, on_gpus=job.wanted is not None)


def resolved(spec: JobSpec) -> str:
    """Return a job that was not submitted, with all values resolved.

    The result is a job file or, for Slurm, a script that contains one.
    """
    return backend(spec.launcher).by_hand(spec)


def yaml_of(job: Job) -> str:
    """Return the complete job as a job file."""
    return dump_spec(load_spec(job.run_dir.job_file))


def launch_facts(spec: JobSpec, written: JobSpec | None = None, *, on_gpus: bool) -> dict[str, Any]:
    """Return how to launch a job's ranks without the queue, in a directory of their own.

    Args:
        spec: The job; if its strategy is `auto`, the GPUs and the model are inspected.
        written: The contents of its job file; by default `spec`.
        on_gpus: Whether its ranks run on GPUs.

    Returns:
        The environment variables, the words of the command, and the files it reads by path.
    """
    written = written or spec
    run_dir = RunDir(Path(f"{spec.name}-by-hand"))
    gpus: list[str] = []
    if on_gpus:  # GPU UUIDs differ on other machines
        named = spec.gpus if isinstance(spec.gpus, list) else range(world_size(spec))
        gpus = [str(name) for name in named]
    launch = build_launch(spec, run_dir, gpus=gpus, run_id="")
    of_here = (RUN_ID_VARIABLE, *bytecode.VARIABLES)
    environment = {k: v for k, v in launch.environment.items() if k not in of_here}
    command = ["accelerate", *launch.command[launch.command.index("launch") :]]
    return {
        "environment": environment,
        "command": command,
        "files": {
            str(run_dir.job_file): dump_spec(written, only_set=True),
            str(run_dir.accelerate_file): yaml.safe_dump(launch.config, sort_keys=False),
        },
    }


def _settled(job: Job, spec: JobSpec) -> JobSpec:
    """Return the job with the strategy that `auto` chose at its launch, if it was launched."""
    record = read_json(job.run_dir.launch_file) or {}
    strategy, _ = launched_strategy(record.get("environment") or {})
    return spec.model_copy(update={"strategy": strategy}) if strategy else spec


def script_of(facts: dict[str, Any], what: str) -> str:
    """Return a shell script that writes the files and launches the ranks.

    Args:
        facts: The result of `launch_facts`.
        what: Name of the job for the first line.
    """
    lines = [f"# {what} by hand: no queue, no supervisor, its own directory."]
    folders = dict.fromkeys(str(Path(name).parent) for name in facts["files"])
    lines += [f"mkdir -p {shlex.quote(folder)}" for folder in folders]
    for name, text in facts["files"].items():
        lines += [f"cat > {shlex.quote(name)} <<'END_OF_FILE'", text.rstrip("\n"), "END_OF_FILE"]
    settings = [f"{key}={shlex.quote(value)}" for key, value in facts["environment"].items()]
    return "\n".join([*lines, " ".join(["env", *settings, shlex.join(facts["command"])])])


def command_of(facts: dict[str, Any]) -> str:
    """Return the launch command for a shell, one flag per line."""
    first, *flags = _grouped(facts["command"])
    return " \\\n  ".join([first, *flags])


def _grouped(words: list[str]) -> list[str]:
    """Quote the words, and join each flag with its value."""
    lines: list[str] = []
    for word in map(shlex.quote, words):
        flag = lines and lines[-1].startswith("-") and "=" not in lines[-1]
        if lines and not word.startswith("-") and (flag or len(lines) == 1):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
