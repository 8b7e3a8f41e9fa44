"""Predict a job's memory and that of its variants, caching traces by shape."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from engine.memory.phases import (
    autoencoder_bytes,
    decoding,
    disk_of,
    host_of,
    latent_cache,
    scoring,
    text_cache,
    text_lora_bytes,
)
from engine.memory.predict import OVERHEADS, Overheads, predict, strategy_of
from engine.memory.tracing.inputs import references
from engine.memory.tracing.model import Shape, shape_of
from engine.memory.tracing.timeline import work_of
from engine.memory.tracing.trace import Trace, trace_model
from engine.memory.walk import layout_of
from engine.model.packing import packing_of
from engine.model.precision import compute_dtype
from engine.model.text_encoders import encoder_bytes
from jobs.errors import UserError
from jobs.models.find_model import find_model
from jobs.models.model_config import find_target
from jobs.models.scorers import scorers_of
from jobs.spec.families import get_family
from jobs.spec.keys.prompts import class_prompts
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.lora_conflicts import trains_text
from jobs.spec.rules.strategy import SHARDING, world_size

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path

    from jobs.memory.predicted import Phase, Predicted
    from jobs.spec.job_spec import JobSpec

_KEPT: Final = 24  # traces, of a few hundred KB each
_NO_MODEL: Final = "the model is not on this machine: text encoders and VAE are not counted"
_WIDENED: Final = (
    "mixed_precision: no keeps frozen weights in fp32, which takes more memory than the files' own "
    "precision"
)
# Kernels in forward and backward of FLUX.1's blocks in bf16, and memory kept for backward: 448 →
# 210 and 8 % less for a LoRA, 407 → 105 and 28 % less for all weights (Inductor for CPUs, torch
# 2.13).
_COMPILED: Final = {"lora": ("half", 8), "full": ("a quarter", 28)}

# What decides about the share that `tread` saves.
_SAVES_BY: Final = (
    "tread",
    "pretrained_model_name_or_path",
    "model_family",
    "model_flavour",
    "model_type",
    "train_batch_size",
    "max_sequence_length",
    "gradient_checkpointing",
    "fsdp_activation_checkpointing",
    "gradient_checkpointing_interval",
    "gradient_checkpointing_policy",
)


class Estimator:
    """Predicts memory, and caches traces.

    Args:
        overheads: Memory on top of tensors.
    """

    def __init__(self, overheads: Overheads = OVERHEADS) -> None:
        self._overheads = overheads
        self._traces: OrderedDict[Hashable, Any] = OrderedDict()
        # Which outputs of blocks get no gradient depends on the model and on what is trained of it.
        # To know it saves a second run of each trace.
        self._asked: dict[Hashable, Any] = {}

    def estimate(
        self, spec: JobSpec, ranks: int | None = None, strategy: str | None = None
    ) -> Predicted:
        """Predict the memory of a job on the rank that needs the most.

        Args:
            spec: The job.
            ranks: World size; default: the job's.
            strategy: single, ddp, hsdp or fsdp2; default: the one that the job would run.

        Raises:
            UserError: The job cannot run like that, or its model is unknown.
        """
        if spec.num_class_images:  # counted as samples, an upper bound
            prompts = [*spec.validation_prompts, *class_prompts(spec, [0])]
            spec = spec.model_copy(update={"validation_prompts": prompts})
        ranks = ranks or world_size(spec)
        strategy = strategy or strategy_of(spec, ranks)
        sharded = strategy in SHARDING
        trace = self._trace(spec, sharded=sharded, training=True)
        assert trace is not None, "every job has steps"
        sample = self._sample(spec, sharded=sharded)
        root = _root(spec.pretrained_model_name_or_path)
        file_bytes = find_target(
            spec.model_family, spec.model_flavour, spec.pretrained_model_name_or_path
        ).dtype_bytes
        prediction = predict(
            trace,
            spec,
            ranks,
            strategy,
            sample=sample,
            decoding=self._decoding(spec, root) if sample is not None else 0,
            scoring=self._scoring(spec),
            resident=_resident(spec, root, ranks),
            caching=self._caching(spec, trace.shape, root, ranks),
            overheads=self._overheads,
        )
        layout = layout_of(spec, ranks, strategy)
        autoencoder = autoencoder_bytes(root) if root is not None else 0
        notes = _notes(spec, root, file_bytes, sampled=sample is not None, compiles=trace.compiles)
        if spec.tread:
            notes.append(self._saved_by_routes(spec, trace))
        return replace(
            prediction,
            host=host_of(
                spec, trace, layout, ranks, device=prediction.peak, autoencoder=autoencoder
            ),
            disk=disk_of(spec, trace, file_bytes, root),
            notes=tuple(notes),
        )

    def _trace(self, spec: JobSpec, *, sharded: bool, training: bool) -> Trace | None:
        shape = shape_of(spec, sharded=sharded, training=training)
        if shape is None:
            return None

        def make() -> Trace:
            trace = trace_model(shape, asked=self._asked.get(shape.trains))
            # Of a block none of whose outputs gets one, another trace would not find it otherwise.
            self._asked[shape.trains] = {n: some for n, some in trace.asked.items() if any(some)}
            return trace

        traced: Trace = self._once(shape.key, make)
        return traced

    def _sample(self, spec: JobSpec, *, sharded: bool) -> Trace | None:
        """Trace the forward of a sample.

        Return None if the job samples nothing, or if the model reads values that fake tensors lack.
        """
        try:
            return self._trace(spec, sharded=sharded, training=False)
        except UserError:
            raise
        except Exception:
            return None

    def _saved_by_routes(self, spec: JobSpec, trace: Trace) -> str:
        """Say what a step saves whose tokens skip blocks, compared with one whose tokens do not.

        Computed once for all strategies and packed bases, which change neither much.
        """
        shape = trace.shape
        facts = spec.model_dump(mode="json", include=set(_SAVES_BY))

        def say() -> str:
            without = spec.model_copy(update={"tread": None})
            plain = self._trace(without, sharded=shape.sharded, training=True)
            assert plain is not None, "every job has steps"
            flops = round(100 * (1 - _flops(trace) / _flops(plain)))
            kept = round(100 * (1 - trace.most_activations / plain.most_activations))
            text = f"tread: {flops} % fewer FLOPs in a step than with all tokens"
            return f"{text}, and {kept} % less memory for activations" if kept > 0 else text

        size = (shape.size, shape.frames, references(spec, training=True))
        note: str = self._once(("routes", size, str(facts)), say)
        return note

    def _caching(self, spec: JobSpec, shape: Shape, root: Path | None, ranks: int) -> list[Phase]:
        if root is None:
            return []
        key = shape.key
        texts = text_cache(spec, root, ranks)
        latents = self._once(("latents", key), lambda: latent_cache(spec, root))
        return [phase for phase in (texts, latents) if phase is not None]

    def _decoding(self, spec: JobSpec, root: Path | None) -> int:
        shape = shape_of(spec, sharded=False, training=False)
        if root is None or shape is None:
            return 0
        size: int = self._once(("decoding", shape.key), lambda: decoding(spec, root))
        return size

    def _scoring(self, spec: JobSpec) -> int:
        models = tuple(scorers_of(spec).items())
        key = ("scoring", models, spec.device, len(spec.validation_prompts))
        size: int = self._once(key, lambda: scoring(spec)) if models else 0
        return size

    def _once(self, key: Hashable, make: Any) -> Any:
        if key not in self._traces:
            self._traces[key] = make()
            while len(self._traces) > _KEPT:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return self._traces[key]


@lru_cache(maxsize=64)
def _root(name: str) -> Path | None:
    """Return the model's directory, or None if it is not on this machine."""
    try:
        return find_model(name)
    except UserError:
        return None


def _resident(spec: JobSpec, root: Path | None, ranks: int) -> int:
    """Return the bytes of text encoders that stay in memory during training."""
    settled = settle(spec.model_copy(update={"num_processes": ranks}))
    if root is None or settled.unload_text_encoder:
        return 0
    try:
        size = encoder_bytes(root, compute_dtype(spec), packing_of(spec.text_encoder_precision))
    except UserError:
        return 0
    return size + (text_lora_bytes(spec, root) if trains_text(spec) else 0)


def _flops(trace: Trace) -> int:
    """Return the FLOPs of a forward and a backward."""
    return sum(work_of(trace.timeline, phase).flops for phase in ("forward", "backward"))


def _notes(
    spec: JobSpec, root: Path | None, file_bytes: int, *, sampled: bool, compiles: bool
) -> list[str]:
    notes = [] if root is not None else [_NO_MODEL]
    lora = spec.model_type == "lora"
    if lora and spec.mixed_precision == "no" and root is not None and file_bytes < 4:
        notes.append(_WIDENED)
    if spec.validation_prompts and not sampled:
        notes.append("sampling this model cannot be traced and is not counted")
    if spec.torch_compile:
        notes.append("torch_compile keeps less than counted here; its workspaces are not counted")
    elif compiles and spec.device != "cpu" and spec.context_parallel_size == 1:
        share, less = _COMPILED[spec.model_type]
        notes.append(
            f"torch_compile: true would run blocks with about {share} of the kernels, and keep "
            f"{less} % less for backward where they are not recomputed (measured on FLUX.1); the "
            "speedup depends on the GPU, and the first steps take minutes"
        )
    if spec.context_parallel_size > 1:
        whole = "" if get_family(spec.model_family).splits_text else ", those of whole texts too"
        notes.append(
            f"context parallelism is counted as activations divided by its ranks{whole}; "
            "attention's communication buffers are not counted"
        )
    if spec.attention_backend == "math":
        notes.append("the math attention kernel is counted as on a CPU")
    return notes
