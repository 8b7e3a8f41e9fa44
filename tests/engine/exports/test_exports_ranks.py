"""The export of a sharded model, and of the checkpoint of the same step: the same bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engine.exports.__main__ import main
from jobs.run.export_places import export_facts
from tests.support.engine.exports import bytes_of
from tests.support.engine.ranks.export import STEP, on_rank
from tests.support.engine.toy_jobs import start_ranks, toy_values

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora-sharded-ema": {
        "lora_placement": "sharded",
        "use_ema": True,
        "lora_alpha": 7,
        "lora_variant": "dora",
    },
    "lora-full-layout-ema": {"fsdp_state_dict_type": "FULL_STATE_DICT", "use_ema": True},
    "full": {"model_type": "full"},
    "full-ema-bf16": {"model_type": "full", "use_ema": True, "export_dtype": "bf16"},
    "full-schedule-free": {"model_type": "full", "optimizer": "adamw_schedule_free"},
    "full-full-layout": {"model_type": "full", "fsdp_state_dict_type": "FULL_STATE_DICT"},
}


@pytest.fixture(scope="module")
def shared(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory for each case, with a checkpoint and exports by two ranks."""
    root = tmp_path_factory.mktemp("exports")
    (root / "toy").symlink_to(toy)
    common = {"num_processes": 2, "strategy": "fsdp2"}
    cases = {name: toy_values(toy, **common | values) for name, values in CASES.items()}
    start_ranks(on_rank, 2, cases, root).join()
    return root


@pytest.mark.parametrize("name", CASES)
def test_the_checkpoint_exports_to_the_bytes_of_the_live_model(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shared / name
    checkpoint = run_dir / "checkpoints" / f"step-{STEP}"
    assert main([str(checkpoint), str(run_dir / "offline")]) == 0
    out, err = capsys.readouterr()
    ema = "ema" in name or "schedule-free" in name
    assert json.loads(out) == {
        "path": str(run_dir / "offline"),
        "step": STEP,
        "ema": ema,
        "warnings": [],
    }
    assert [line.split()[1] for line in err.splitlines() if "exporting" in line][-1] == "writing"
    live = bytes_of(run_dir / "export")
    assert bytes_of(run_dir / "offline") == live
    assert (export_facts(run_dir / "export") or {})["ema"] is ema
    if ema:
        assert main([str(checkpoint), str(run_dir / "no-average"), "--no_ema"]) == 0
        raw = bytes_of(run_dir / "no-average")
        weights = {n for n in raw if n.endswith(".safetensors") and "encoder" not in n}
        for each in weights - {"vae/diffusion_pytorch_model.safetensors"}:
            assert raw[each] != live[each]
        if CASES[name].get("export_dtype") is None:
            assert raw == bytes_of(run_dir / "raw")


def test_ranks_wait_for_a_slow_one_outside_of_collectives(shared: Path) -> None:
    """Twice as long as a collective may take; they would have failed."""
    assert bytes_of(shared / "lora" / "late") == bytes_of(shared / "lora" / "export")


def test_nothing_is_left_of_an_export_that_failed(shared: Path) -> None:
    names = {path.name for path in (shared / "lora").iterdir()}
    assert not any(name.startswith(".full") or name == "full" for name in names)
    error = json.loads((shared / "lora" / "ranks" / "0.error.json").read_text())
    assert error["message"].startswith("cannot write the export to")


def test_the_events_tell_of_the_export_when_it_is_there(shared: Path) -> None:
    events = [json.loads(line) for line in (shared / "full" / "events.jsonl").open()]
    kinds = [event["kind"] for event in events]
    assert kinds[-1] == "export"
    assert events[-1]["path"] == str(shared / "full" / "export")
    done = [e for e in events if e["kind"] == "phase" and e["name"] == "export"]
    assert done[-1]["state"] == "end"
