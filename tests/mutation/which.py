"""Which fast tests stand for a module."""

from __future__ import annotations

import ast
from typing import Final

from tests.support.paths import ROOT

# Where tests are about a module that they do not import, or import what they are not about.
_FILES: Final[dict[str, tuple[str, ...]]] = {
    "engine.checkpoint.choose": (
        "engine/checkpoint/test_checkpoint_files.py",
        "engine/checkpoint/test_checkpoints.py",
    ),
    "engine.checkpoint.contents": (
        "engine/checkpoint/test_checkpoint_files.py",
        "engine/checkpoint/test_checkpoints.py",
    ),
    "engine.checkpoint.data_facts": ("engine/checkpoint/test_data_facts.py",),
    "engine.checkpoint.full": (
        "engine/checkpoint/test_checkpoint_files.py",
        "engine/checkpoint/test_checkpoints.py",
    ),
    "engine.checkpoint.restore": (
        "engine/checkpoint/test_checkpoint_files.py",
        "engine/checkpoint/test_checkpoints.py",
    ),
    "engine.checkpoint.resume": ("engine/checkpoint/test_checkpoint_files.py",),
    "engine.checkpoint.together": ("engine/checkpoint/test_checkpoint_files.py",),
    "engine.checkpoint.write": (
        "engine/checkpoint/test_checkpoint_files.py",
        "engine/checkpoint/test_checkpoints.py",
    ),
    "engine.checkpoint.saver": ("engine/checkpoint/test_checkpoints.py",),
    "engine.checkpoint.sharded": (
        "engine/checkpoint/test_checkpoint_files.py",
        "engine/checkpoint/test_checkpoints.py",
    ),
    "engine.diffusion.random_numbers": (
        "engine/diffusion/test_random_numbers.py",
        "engine/diffusion/test_objective.py",
    ),
    "engine.train.ema": (
        "engine/train/test_ema.py",
        "engine/train/test_parts.py",
        "engine/train/test_optimizer_step.py",
    ),
    "engine.train.gradients": ("engine/parallel/test_replicated.py",),
    "engine.diffusion.objective": ("engine/diffusion/test_objective.py",),
    "engine.parallel.replica_check": ("engine/parallel/test_replicated.py",),
    "engine.train.optimizer_step": (
        "engine/train/test_optimizer_step.py",
        "engine/train/test_late_steps.py",
    ),
    "engine.model.files.weight_reader": (
        "engine/model/files/test_weight_reader.py",
        "engine/model/quantized/test_quantized.py",
    ),
    "engine.model.files.weights": (
        "engine/model/files/test_weights.py",
        "engine/parallel/test_replicated.py",
    ),
    "jobs.spec.rules.conflicts": ("jobs/spec/test_conflicts.py", "jobs/spec/file/test_flags.py"),
    "jobs.backends.local.dispatch": (
        "jobs/backends/local/test_dispatch.py",
        "jobs/service/test_edit.py",
    ),
    "jobs.memory.estimate": ("jobs/memory/test_fit.py", "jobs/memory/test_estimate.py"),
    "jobs.memory.fit": ("jobs/memory/test_fit.py", "jobs/memory/test_estimate.py"),
    "jobs.resume.resume_conflicts": ("jobs/resume/test_resume.py", "jobs/service/test_service.py"),
    "jobs.queue.states": ("jobs/queue/test_states.py", "jobs/queue/test_store.py"),
    "jobs.supervise.supervisor": (
        "jobs/supervise/test_supervisor_parts.py",
        "jobs/supervise/test_supervisor_looks.py",
        "jobs/supervise/test_supervisor.py",
    ),
    "jobs.queue.store": (
        "jobs/queue/test_store.py",
        "jobs/service/test_service.py",
        "jobs/machine/test_network_homes.py",
    ),
}


def files_for(module: str) -> list[str]:
    """Test files for a module, the one of its own name first.

    Those of its package's folder that import it, unless `_FILES` says otherwise.

    Raises:
        LookupError: There are none.
    """
    if module in _FILES:
        return [f"tests/{name}" for name in _FILES[module]]
    folder = ROOT / "tests" / module.split(".")[0]
    own = module.rpartition(".")[2]
    found = [
        file
        for file in sorted(folder.rglob("test_*.py"))
        if own in (source := file.read_text()) and module in imports_of(source)
    ]
    if not found:
        raise LookupError(f"no test in {folder} imports {module}; name some in {__file__}")
    found.sort(key=lambda file: (file.name != f"test_{own}.py", file.stat().st_size))
    return [str(file.relative_to(ROOT)) for file in found]


def imports_of(source: str) -> set[str]:
    """The modules that a source imports, and those that things may have been imported from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return names
