"""Which fast tests stand for a module."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Where tests are about a module that they do not import, or import what they are not about.
_FILES: Final[dict[str, tuple[str, ...]]] = {
    "engine.checkpoint.choose": ("engine/test_checkpoint_files.py", "engine/test_checkpoints.py"),
    "engine.checkpoint.contents": ("engine/test_checkpoint_files.py", "engine/test_checkpoints.py"),
    "engine.checkpoint.data_facts": ("engine/test_data_facts.py",),
    "engine.checkpoint.full": ("engine/test_checkpoint_files.py", "engine/test_checkpoints.py"),
    "engine.checkpoint.restore": ("engine/test_checkpoint_files.py", "engine/test_checkpoints.py"),
    "engine.checkpoint.resume": ("engine/test_checkpoint_files.py",),
    "engine.checkpoint.together": ("engine/test_checkpoint_files.py",),
    "engine.checkpoint.write": ("engine/test_checkpoint_files.py", "engine/test_checkpoints.py"),
    "engine.checkpoint.saver": ("engine/test_checkpoints.py",),
    "engine.checkpoint.sharded": ("engine/test_checkpoint_files.py", "engine/test_checkpoints.py"),
    "engine.draws": ("engine/test_draws.py", "engine/test_objective.py"),
    "engine.ema": ("engine/test_ema.py", "engine/test_parts.py", "engine/test_step.py"),
    "engine.gradients": ("engine/test_replicated.py",),
    "engine.objective": ("engine/test_objective.py",),
    "engine.replicas": ("engine/test_replicated.py",),
    "engine.step": ("engine/test_step.py", "engine/test_late_steps.py"),
    "engine.weight_reader": ("engine/test_weight_reader.py",),
    "engine.weights": ("engine/test_weights.py", "engine/test_replicated.py"),
    "jobs.conflicts": ("jobs/test_conflicts.py", "jobs/test_flags.py"),
    "jobs.dispatch": ("jobs/test_dispatch.py", "jobs/test_edit.py"),
    "jobs.memory.estimate": ("jobs/test_fit.py", "jobs/test_estimate.py"),
    "jobs.memory.fit": ("jobs/test_fit.py", "jobs/test_estimate.py"),
    "jobs.resume": ("jobs/test_resume.py", "jobs/test_service.py"),
    "jobs.states": ("jobs/test_states.py", "jobs/test_store.py"),
    "jobs.supervisor": (
        "jobs/test_supervisor_parts.py",
        "jobs/test_supervisor_looks.py",
        "jobs/test_supervisor.py",
    ),
    "jobs.store": ("jobs/test_store.py", "jobs/test_service.py"),
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
    found = [file for file in sorted(folder.glob("test_*.py")) if module in imports_of(file)]
    if not found:
        raise LookupError(f"no test in {folder} imports {module}; name some in {__file__}")
    own = f"test_{module.rpartition('.')[2]}.py"
    found.sort(key=lambda file: (file.name != own, file.stat().st_size))
    return [str(file.relative_to(ROOT)) for file in found]


def imports_of(file: Path) -> set[str]:
    """The modules that a file imports, and those that things may have been imported from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return names
