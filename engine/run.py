"""A rank's whole life, read from top to bottom: build, shard, load, adapt, plan, train, save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine import adapters, checkpoint, families, weights
from engine.control import Control
from engine.data.loader import Loader
from engine.data.plan import BatchPlan
from engine.data.prepare import Prepared, prepare
from engine.export import export
from engine.meeting import Meeting
from engine.optim import build_optimizer, build_scheduler
from engine.parallel import check_sharding, shard
from engine.trainer import Trainer
from engine.world import World, leave_world, start_world
from jobs.conflicts import chosen_strategy, world_size
from jobs.models import find_model
from jobs.specfile import load_spec

if TYPE_CHECKING:
    from pathlib import Path

    from engine.families import Family
    from engine.telemetry import Telemetry
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec


def run(run_dir: RunDir, telemetry: Telemetry) -> None:
    """Run the job of a run directory on this rank, from the newest checkpoint if there is one."""
    spec = load_spec(run_dir.job_file)
    world = start_world(spec)
    telemetry.device = str(world.device)
    telemetry.device_uuid = world.device_uuid()
    telemetry.read_memory = world.memory
    strategy, reason = chosen_strategy(spec)
    telemetry.say(f"rank {world.rank} of {world.size} on {world.device}; {strategy}: {reason}")
    control = Control(run_dir, world)
    meeting = Meeting(run_dir, world.token, world.rank, world.size)
    family = families.load(spec.model_family, spec.model_flavour)
    model_root = find_model(spec.pretrained_model_name_or_path)

    data = prepare(spec, family, model_root, run_dir, world, meeting, telemetry)
    model = build_model(spec, family, model_root, world, telemetry)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(spec, trained, world.device)
    training = checkpoint.Training(model, optimizer, build_scheduler(spec, optimizer))
    resume(training, run_dir, world, telemetry)

    plan = make_plan(spec, data)
    loader = Loader(spec, plan, data, world)
    telemetry.emit(
        "start",
        step=training.step,
        total_steps=spec.max_train_steps,
        world_size=world.size,
        strategy=strategy,
        strategy_reason=reason,
        samples=len(data.buckets),
        steps_per_epoch=plan.steps_per_epoch,
        trained_parameters=sum(parameter.numel() for parameter in trained),
    )
    trainer = Trainer(
        spec, family, model_root, run_dir, world, telemetry, control, training, plan, loader, data
    )
    with telemetry.phase("train", spec.max_train_steps):
        outcome = trainer.train()
    loader.close()
    if outcome == "completed":
        with telemetry.phase("export"):
            path = export(model, spec, family, run_dir.export, world)
        telemetry.emit("export", path=str(path))
        telemetry.say(f"exported to {path}")
    telemetry.phase_name = "end"
    meeting.arrive("end")
    if world.main:
        meeting.wait("end")
        meeting.close()
    telemetry.emit("end", reason=outcome, step=training.step)
    telemetry.say(outcome)
    leave_world()


def build_model(
    spec: JobSpec, family: Family, root: Path, world: World, telemetry: Telemetry
) -> torch.nn.Module:
    """The transformer on this rank's device: built on meta, adapted, sharded, then streamed."""
    directory = root / "transformer"
    model, stored = weights.build_on_meta(family.transformer_class(), directory, spec)
    if spec.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    whole: list[torch.nn.Parameter] = []
    if spec.model_type == "lora":
        adapters.add_lora(model, spec, family.LORA_TARGETS)
        if spec.lora_placement == "replicated":
            whole = list(adapters.lora_parameters(model).values())
    units: list[str] = []
    if world.strategy == "fsdp2":
        units = shard(model, spec, world, replicated=whole)
    weights.materialise(model, world.device)
    with telemetry.phase("load", len(stored)) as progress:
        names = adapters.adapted_name(model)
        read = weights.stream(model, stored, names=names.__getitem__, progress=progress)
    if spec.model_type == "lora":
        adapters.initialise(model, spec.seed)
        whole = list(adapters.lora_parameters(model).values()) if whole else []
    telemetry.say(f"read {read / 2**20:.1f} MiB of weights from {directory}")
    if world.strategy == "fsdp2":
        summary = check_sharding(model, world, units, replicated=whole)
        telemetry.say(str(summary))
        telemetry.emit("sharding", **vars(summary))
    return model


def resume(
    training: checkpoint.Training, run_dir: RunDir, world: World, telemetry: Telemetry
) -> None:
    """Load the newest sound checkpoint; rank 0 chooses it for all."""
    newest = checkpoint.newest_sound(run_dir, telemetry.warn) if world.main else None
    choice: list[Any] = [newest]
    if world.size > 1:
        torch.distributed.broadcast_object_list(choice, src=0)
    if choice[0] is None:
        return
    step, path = choice[0]
    checkpoint.load(training, path, world)
    telemetry.moved(step)
    telemetry.say(f"resumed after step {step} from {path}")


def make_plan(spec: JobSpec, data: Prepared) -> BatchPlan:
    """The batches of the whole job, the same on every rank."""
    per_step = world_size(spec) * spec.train_batch_size * spec.gradient_accumulation_steps
    return BatchPlan(data.buckets, per_step, spec.seed)
