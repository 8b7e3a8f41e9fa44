"""A rank's whole life, read from top to bottom: build, shard, load, adapt, plan, train, save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine import families
from engine.checkpoint import Saver
from engine.checkpoint.data_facts import data_facts
from engine.checkpoint.resume import resume
from engine.data.encode.texts import TrainedTexts
from engine.data.loader import Loader
from engine.data.prepare import prepare
from engine.diffusion.objective import build_objective
from engine.exports.live import export_trained
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters import lora, lora_file
from engine.model.adapters.text_lora import attach
from engine.model.adapters.training_adapter import add_training_adapter
from engine.model.base_matmul import settle_matmul
from engine.model.compiled import compile_blocks
from engine.model.files import weights
from engine.model.kernels import activate_flash3, choose_attention, choose_backends
from engine.model.packing import unpacked_by
from engine.model.precision import compute_dtype, computes_alone, narrow_inputs
from engine.model.quantized_linear import quantize_layers
from engine.parallel.block_swap import swap_blocks, swaps
from engine.parallel.context_parallel import (
    check_tokens,
    enable_context_parallel,
    require_cuda,
)
from engine.parallel.sharding import precision_policy, shard
from engine.parallel.sharding_check import check_sharding
from engine.ranks.failure import write_flight
from engine.ranks.team import Control, FileBarrier, StoppedError
from engine.ranks.telemetry import Peaks
from engine.ranks.world import World, leave_world, start_world, stay_near_gpu
from engine.run_context import RunContext
from engine.sample.class_images import add_class_images
from engine.train.ema import Ema
from engine.train.muon import hidden_matrices
from engine.train.optimizer import build_optimizer, build_scheduler
from engine.train.optimizer_step import Stepper
from engine.train.train_state import TrainState
from engine.train.training_loop import Trainer
from jobs.errors import UserError
from jobs.models.find_model import find_lora, find_model
from jobs.run.events import End, Start
from jobs.spec.families import get_family, latent_step_of, token_parts
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.buckets import sizes_of
from jobs.spec.rules.lora_conflicts import may_scale
from jobs.spec.rules.steps import accumulation_steps, steps_of, with_total_steps
from jobs.spec.rules.strategy import checkpoints_activations
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.hub_names import use_pins

if TYPE_CHECKING:
    from engine.families import Family
    from engine.ranks.telemetry import Telemetry
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec, RecipeKeys


def run_rank(run_dir: RunDir, telemetry: Telemetry) -> None:
    """Run the job of a run directory on this rank, from the newest checkpoint if there is one."""
    spec = load_spec(run_dir.job_file)
    use_pins(run_dir.root)
    choose_backends(spec)
    if moved := stay_near_gpu(on_cpu=spec.device == "cpu"):
        telemetry.say(moved)
    world = start_world(spec)
    run_job(spec, run_dir, world, telemetry)
    leave_world()


def run_job(spec: JobSpec, run_dir: RunDir, world: World, telemetry: Telemetry) -> None:
    """Run a job among ranks that have met."""
    peaks = Peaks(world.device)
    telemetry.device = str(world.device)
    telemetry.device_uuid = world.device_uuid()
    telemetry.gpu, telemetry.gpu_memory = world.gpu()
    telemetry.peaks = peaks
    telemetry.record_flight = partial(write_flight, run_dir, world.rank)
    telemetry.say(
        f"rank {world.rank} of {world.size} on {world.device}; {world.strategy}: {world.reason}"
    )
    for warning in find_warnings(spec):
        telemetry.warn(warning)
    control = Control(run_dir, world)
    barrier = FileBarrier(run_dir, world.token, world.rank, world.size)
    model_root = find_model(spec.pretrained_model_name_or_path)
    family = families.load(spec.model_family, spec.model_flavour, model_root, spec.fps)

    run = RunContext(
        world=world,
        barrier=barrier,
        telemetry=telemetry,
        stop_requested=control.stop_requested,
        spec=spec,
        family=family,
        model_root=model_root,
        run_dir=run_dir,
    )
    if world.context_size > 1:
        check_context(spec, family, world)
    try:
        data = prepare(replace(run, spec=add_class_images(run)))
    except StoppedError as stopped:
        telemetry.say(f"stopped while preparing data ({stopped}); cached files are kept")
        end("stopped", run)
        return
    spec = with_total_steps(spec, data.plan.draws_per_epoch)
    run = replace(run, spec=spec)
    model = build_model(run)
    if isinstance(data.texts, TrainedTexts):
        attach(model, data.texts.encoders)
    begins_from_lora = begin_from_lora(run, model)
    training = start_training(spec, model, world)
    facts = data_facts(data.index, data.plan)
    matmul = resume(run, training, facts)
    spec = settle_matmul(spec, model, world, telemetry, matmul)
    run = replace(run, spec=spec)
    if not (begins_from_lora or training.step):
        raise UserError(f"init_lora: there is no LoRA at {spec.init_lora}")
    saver = Saver(spec, run_dir, world, telemetry, facts)
    saver.check_room(training)

    objective = build_objective(spec, family, model_root)
    loader = Loader(spec, data, world, family, objective)
    stepper = Stepper(spec, family, objective, training, loader, world, peaks)
    telemetry.emit(
        Start(
            step=training.step,
            total_steps=steps_of(spec),
            world_size=world.size,
            strategy=world.strategy,
            strategy_reason=world.reason,
            samples=len(data.index.samples),
            global_batch=data.plan.global_batch,
            accumulation=accumulation_steps(spec),
            steps_per_epoch=data.plan.steps_per_epoch,
            trained_parameters=sum(p.numel() for p in training.trained().values()),
            base_matmul=spec.base_matmul if may_scale(spec) else None,
            best_by=spec.checkpoints_best_by,
        )
    )
    trainer = Trainer(run, control, objective, training, stepper, data, peaks, saver)
    with telemetry.phase("train", steps_of(spec)):
        try:
            outcome = trainer.train()
        except BaseException:
            if telemetry.phase_name == "train":  # else what has failed is no part of a step
                telemetry.phase_name = peaks.doing or "train"
            stepper.last_words()
            saver.rescue()
            raise
    loader.close()
    saver.close()
    data.texts.close()
    if outcome == "completed":
        export_trained(run, training)
    trainer.report_memory()
    end(outcome, run)


def end(outcome: str, run: RunContext) -> None:
    """Meet for the last time, and say how it ended."""
    run.telemetry.phase_name = "end"
    run.barrier.arrive("end")
    if run.world.main:
        run.barrier.wait("end")
        run.barrier.close()
    run.telemetry.emit(End(outcome, run.telemetry.step))
    run.telemetry.say(outcome)


def build_model(run: RunContext) -> torch.nn.Module:
    """Build the transformer on this rank's device.

    It is built on meta, adapted, sharded, then streamed.
    """
    spec, family, world, telemetry = run.spec, run.family, run.world, run.telemetry
    directory = family.denoiser_of(run.model_root)
    model, stored = weights.build_on_meta(
        family.transformer_class(), directory, spec, say=telemetry.say
    )
    family.freeze(model, spec)
    if note := quantize_layers(model, spec, family, stored):
        telemetry.say(f"{note}; weights are unpacked by {unpacked_by(world.device)}")
    choose_attention(model, spec)
    activate_flash3(spec)
    if checkpoints_activations(spec):
        checkpoint_activations(model, spec)
    if spec.model_type == "lora":
        unused = family.without_gradient(model, spec)
        lora.add_lora(model, spec, family.lora_targets(spec), unused)
    if computes_alone(spec, sharded=world.shards):
        narrow_inputs(model, compute_dtype(spec))
    if world.mesh is not None and world.context_size > 1:
        enable_context_parallel(model, world.mesh)
    compile_blocks(model, spec, telemetry.pass_on)
    units: list[str] = []
    if swapped := swap_blocks(model, spec, family, world, share=True):
        telemetry.say(swapped.note)
    if world.shards:
        units = shard(model, spec, world, replicated=kept_whole(model, spec))
    offload = torch.device("cpu") if world.shards and spec.fsdp_cpu_offload else None
    telemetry.phase_name = "load"  # which is what fails where there is no room for the weights
    hosts = swapped.hosts if swapped else None
    weights.materialise(model, world.device, parameters_on=offload, hosts=hosts)
    with telemetry.phase("load", len(stored)) as progress:
        names = lora.adapted_name(model)
        others = swapped.read_elsewhere() if swapped else ()
        read = weights.stream(
            model, stored, names=names.__getitem__, skip=others, progress=progress
        )
        if swaps(spec):  # another rank may read what this one swaps
            run.barrier.arrive("swapped")
            run.barrier.wait("swapped", waiting=telemetry.moved)
    if spec.model_type == "lora":
        if spec.lora_variant == "dora":
            lora.check_whole(model)
        lora.initialise(model, spec.seed, spec.lora_init)
    if note := add_training_adapter(model, spec, family, world.device):
        telemetry.say(note)
    weights.check_precision(model, spec)
    if swapped:
        swapped.start()
    telemetry.say(f"read {read / 2**20:.1f} MiB of weights from {directory}")
    if world.shards:
        summary = check_sharding(
            model,
            world,
            units,
            replicated=kept_whole(model, spec),
            offloaded=offload is not None,
            gathered_in=precision_policy(spec).param_dtype,
        )
        telemetry.say(str(summary))
        telemetry.emit(summary)
    return model


def begin_from_lora(run: RunContext, model: torch.nn.Module) -> bool:
    """Set the adapter to the one that the job begins from, if it names one.

    Returns:
        False when it is not there, which does not matter to a job that resumes.
    """
    if run.spec.model_type != "lora" or not run.spec.init_lora:
        return True
    file = find_lora(run.spec.init_lora)
    if file is not None:
        unused = run.family.without_gradient(model, run.spec)
        left_out = lora_file.begin_from(model, file, run.family, unused)
        run.telemetry.say(f"the adapter begins from {file}")
        if left_out:
            run.telemetry.warn(
                f"init_lora: {file.name} also adapts {left_out[0]}"
                f"{f' and {len(left_out) - 1} more' if left_out[1:] else ''}, which the loss of "
                "this job does not depend on; the export leaves these out"
            )
    return file is not None


def kept_whole(model: torch.nn.Module, spec: RecipeKeys) -> list[torch.nn.Parameter]:
    """Return the parameters that stay replicated where the rest is sharded."""
    if spec.model_type == "full":
        return weights.computed_in_fp32(model)
    sharded = spec.lora_placement == "sharded"
    return [] if sharded else list(lora.lora_parameters(model).values())


def check_context(spec: JobSpec, family: Family, world: World) -> None:
    """Refuse what a context-parallel group cannot share evenly, before anything is encoded.

    Images are fitted to sizes that divide (`jobs.spec.rules.buckets.sizes_of`).

    Raises:
        UserError: Not on GPUs, or the ranks cannot evenly share the tokens of an image or caption.
    """
    require_cuda(world.device)
    size, step = token_parts(spec), latent_step_of(spec)
    sizes_of(spec)  # refuses
    for request in requests_of(spec):
        tokens = (request.width // step) * (request.height // step)
        check_tokens(tokens, size, f"samples of {request.width}x{request.height}")
    if family.facts.splits_text:
        check_tokens(spec.max_sequence_length, size, "max_sequence_length")


def start_training(spec: RecipeKeys, model: torch.nn.Module, world: World) -> TrainState:
    """Optimizer, schedule, average and loss scale around a model, at step 0."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = get_family(spec.model_family).text_lora
    texts = [p for n, p in trained.items() if n.partition(".")[0] in names]
    others = [p for n, p in trained.items() if n.partition(".")[0] not in names]
    matrices = hidden_matrices(model, spec) if spec.optimizer == "muon" else {}
    optimizer = build_optimizer(spec, others, world.device, texts, matrices.values())
    ema = Ema(trained, spec.ema_decay, on_cpu=spec.ema_device == "cpu") if spec.use_ema else None
    fp16 = spec.mixed_precision == "fp16"
    scaler = torch.amp.GradScaler(world.device.type) if fp16 else None
    return TrainState(model, optimizer, build_scheduler(spec, optimizer), ema, scaler)
