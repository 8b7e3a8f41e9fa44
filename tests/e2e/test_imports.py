"""Configurations of other tools, imported, train: what `tests/jobs/imports` leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from PIL import Image

from jobs.imports.imported import (
    import_ai_toolkit,
    import_diffusion_pipe,
    import_file,
    import_onetrainer,
    import_script,
    import_simpletuner,
)
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.ranks.checkpoint import train
from tests.support.engine.toy_jobs import start_ranks
from tests.support.paths import IMPORT_EXAMPLES as EXAMPLES

STEPS: Final = 2


pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_an_imported_job_of_each_tool_trains_the_toy(toy: Path, tmp_path: Path) -> None:
    """In one process, one after the other; only places and sizes are others than in the files."""
    jobs = []
    for tool, imported in {
        "simpletuner": import_simpletuner(EXAMPLES / "simpletuner" / "flux-lora" / "config.json"),
        "ai-toolkit": import_ai_toolkit(EXAMPLES / "ai-toolkit" / "flux-lora.yaml"),
        "onetrainer": import_onetrainer(EXAMPLES / "onetrainer" / "flux-lora.json"),
        "diffusion-pipe": import_diffusion_pipe(EXAMPLES / "diffusion-pipe" / "flux-lora.toml"),
        "kohya": import_file(EXAMPLES / "kohya" / "flux-lora.sh"),
        "diffusers": import_script([str(EXAMPLES / "diffusers-script" / "flux-lora.sh")]),
    }.items():
        prompts = [prompt.prompt for prompt in imported.spec.validation_prompts]
        path = tmp_path / f"{tool}.yaml"
        path.write_text(imported.to_yaml())
        spec = load_spec(
            path,
            {
                "pretrained_model_name_or_path": str(toy / "model"),
                "dataset": str(toy / "data"),
                "datasets": None,
                "cache_dir": str(tmp_path / "cache"),
                "device": "cpu",
                "mixed_precision": "no",
                "num_train_epochs": None,
                "max_train_steps": STEPS,
                "lr_warmup_steps": 0,
                "resolution": 64,
                "max_sequence_length": 16,
                "train_batch_size": 1,
                "validation_resolution": 64,
                "validation_num_inference_steps": 1,
                "validation_prompts": [next(iter(prompts), "a potter")],
                "validation_on_startup": False,
            },
        )
        jobs.append((str(tmp_path / tool), spec.to_dict(), None))
    start_ranks(train, 1, jobs).join()
    for name, values, _ in jobs:
        run = RunDir(Path(name))
        log = EventLog(run.events).read_all()
        assert [step.step for step in log.steps] == [1, STEPS], name
        assert np.isfinite([step.loss for step in log.steps]).all()
        assert list(run.export.rglob("*.safetensors"))
        (picture,) = (run.samples / f"step-{STEPS}").glob("*.png")
        assert Image.open(picture).size == (64, 64)
        assert values["model_family"] == "flux"
