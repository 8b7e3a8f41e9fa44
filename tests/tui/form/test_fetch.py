"""A model that is not on this machine: one question, and the job waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.hub import fetches
from jobs.hub.wanted import noted
from jobs.queue.states import State
from jobs.spec.values.hub_names import HubName, StoreUrl
from tests.support.tui.driven_app import error_of, field, form
from tests.support.tui.pilot import until
from tui.form.draft import check_path, complete
from tui.form.screen import NewJobScreen
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

pytestmark = pytest.mark.usefixtures("no_processes")

MODEL = HubName("model", "someone/FLUX.1-dev")


async def test_a_missing_model_is_fetched_after_one_question(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    """And what entries of `datasets` name: pictures and masks."""
    begun: list[HubName] = []
    urls = [StoreUrl.of(f"s3://bucket/{name}") for name in ("cats", "masks")]
    sizes: dict[HubName, int] = dict.fromkeys(urls, 1 << 30)
    here = job_values.pop("dataset")
    job_values["masked_loss"] = "file"
    job_values["datasets"] = [str(here), {"path": str(urls[0]), "mask_path": str(urls[1])}]
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("tui.form.checks.ask_sizes", lambda names, cancelled: sizes)
    monkeypatch.setattr(fetches, "start", begun.append)
    async with form(store) as (app, pilot):
        app.screen.fields.put(job_values | {"resolution": 64})  # type: ignore[attr-defined]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert isinstance(app.screen, ConfirmScreen)
        names = " and ".join(map(str, urls))
        assert app.screen.question == f"{names} are not on this machine: fetch 2.0 GiB?"
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        sizes.clear()
        sizes[MODEL] = 33_700_000_000
        field(app, "pretrained_model_name_or_path").put(str(MODEL))
        await until(
            pilot,
            lambda: (
                error_of(app, "pretrained_model_name_or_path")
                == f"! {MODEL} is not on this machine; ^r offers to fetch it from the hub"
            ),
        )
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert isinstance(app.screen, ConfirmScreen)
        assert app.screen.question == "FLUX.1-dev is not on this machine: fetch 31.4 GiB?"
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        assert store.all() == []
        # Where the hub has nothing to offer, the field is led to, as ever.
        offered = dict(sizes) | dict.fromkeys(urls, 1 << 30)
        sizes.clear()
        await pilot.press("ctrl+r")
        await until(pilot, lambda: field(app, "pretrained_model_name_or_path").control.has_focus)
        sizes |= offered
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: len(store.all()) == 1)
        (job,) = store.all()
        assert job.state is State.QUEUED
        assert noted(job.run_dir) == [MODEL, *urls]
        await until(pilot, lambda: set(begun) == {MODEL})


def test_a_dataset_in_a_store_is_offered_to_be_fetched(home: Path) -> None:
    values = complete({"dataset": "s3://bucket/cats", "model_family": "flux"})
    says = "s3://bucket/cats is not on this machine; ^r offers to fetch it"
    assert check_path("dataset", values) == (False, says)
    several = {"datasets": [{"path": "cats"}, "s3://bucket/cats"]}
    assert check_path("datasets", values | several) == (False, says)
    assert check_path("datasets", values) == check_path("datasets", several | {"datasets": "["})
    good, why = check_path("dataset", values | {"dataset": "s3://me:word@bucket/cats"})
    assert "job files hold no secrets" in why
    assert not good
    assert "word@" not in why
