"""The form follows the family: its flavours, and what was left at its default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from textual.widgets import Select

from jobs.spec.file.load import dump_spec, load_spec
from tests.support.tui.driven_app import field, form, running, said
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.pilot import rest, until
from tui.form import draft
from tui.form.screen import NewJobScreen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Store

pytestmark = pytest.mark.usefixtures("no_processes")


def offered(app: Any, name: str) -> list[Any]:
    return [value for _, value in field(app, name).control._options if value is not Select.NULL]


def choose(app: Any, name: str, value: str) -> None:
    field(app, name).control.value = value  # type: ignore[attr-defined]


def test_only_what_was_left_at_its_default_follows_the_family() -> None:
    before, after = draft.defaults_of("flux", None), draft.defaults_of("sdxl", None)
    changes = draft.adopt(before, before, after)
    assert changes == {key: after[key] for key in changes}
    assert "model_family" not in changes
    assert changes["validation_guidance"] == after["validation_guidance"] != 3.5
    mine = before | {"validation_guidance": 9.0}
    assert "validation_guidance" not in draft.adopt(mine, before, after)


async def test_choosing_a_family_offers_its_flavours_and_takes_its_defaults(store: Store) -> None:
    async with form(store) as (app, pilot):
        choose(app, "learning_rate", "0.003")
        assert offered(app, "model_flavour") == list(draft.flavours_of("flux"))
        choose(app, "model_family", "wan")
        await until(pilot, lambda: offered(app, "model_flavour") == list(draft.flavours_of("wan")))
        usual = draft.defaults_of("wan", None)
        await until(pilot, lambda: field(app, "resolution").value == str(usual["resolution"]))
        assert field(app, "learning_rate").value == "0.003"
        carried = app.screen.query_one("#carried")
        assert not str(carried.content), "its defaults are nothing that was set"  # type: ignore[attr-defined]
        choose(app, "model_flavour", "2.2-t2v-a14b-low")
        await rest(app)
        choose(app, "model_family", "flux")
        await until(pilot, lambda: field(app, "resolution").value == "1024")
        await until(pilot, lambda: field(app, "model_flavour").value is None)
        await until(pilot, lambda: "wan" not in str(app.screen.query_one("#yaml").content))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["schnell", None])
async def test_what_a_job_file_says_does_not_follow(
    store: Store, job_values: dict[str, Any], tmp_path: Path, flavour: str | None
) -> None:
    """Also values that happen to be the default of the family that was shown before."""
    given = tmp_path / "given.yaml"
    values = job_values | {"name": "given", "model_flavour": flavour, "max_sequence_length": 512}
    given.write_text(yaml.safe_dump(values))
    async with form(store) as (app, pilot):
        choose(app, "model_family", "wan")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query("#path"))
        app.screen.query_one("#path").value = str(given)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        await until(pilot, lambda: field(app, "name").value == "given")
        await until(pilot, lambda: field(app, "model_flavour").value == flavour)
        await rest(app)
        assert draft.spec_of(app.screen.values) == load_spec(given)  # type: ignore[attr-defined]


async def test_a_switch_of_the_form_queues_both_experts(
    store: Store, job_values: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    parts = ("transformer", "transformer_2", "vae")
    root = make_model("wan", pipeline="WanPipeline", parts=parts)
    values = {"name": "cats", "model_family": "wan", "pretrained_model_name_or_path": str(root)}
    values |= {"model_flavour": "2.2-t2v-a14b-high", "both_experts": True}
    spec = load_spec(None, job_values | values)
    add_job(store, "cats", ranks=1, job_file=dump_spec(spec))
    async with running(store) as (app, pilot):
        await pilot.press("D")
        await until(
            pilot, lambda: "queue 2 jobs" in str(app.screen.query_one("#form-keys").content)
        )
        await pilot.press("ctrl+r")
        await until(pilot, lambda: len(store.all()) == 3)
        await until(pilot, lambda: "sweep cats-2: 2 jobs queued" in said(app))
    made = [load_spec(job.run_dir.job_file) for job in store.all()[:2]]
    assert {spec.name for spec in made} == {"cats-2-high", "cats-2-low"}
    assert all(spec.other_expert for spec in made)


async def test_fields_that_a_model_cannot_use_are_hidden(store: Store) -> None:
    """They come back with a model that can, and where a person looks for them by name."""
    async with form(store) as (app, pilot):
        screen = app.screen
        assert isinstance(screen, NewJobScreen)
        assert not any(field(app, name).display for name in ("num_frames", "both_experts"))
        choose(app, "model_family", "wan")
        await until(pilot, lambda: field(app, "num_frames").display)
        assert "cat.mp4" in field(app, "dataset").control.placeholder  # type: ignore[attr-defined]
        assert not field(app, "train_audio").display
        choose(app, "model_flavour", "2.2-t2v-a14b-low")
        await until(pilot, lambda: field(app, "both_experts").display)
        choose(app, "model_family", "qwen_image")
        await until(pilot, lambda: "layered" in offered(app, "model_flavour"))
        choose(app, "model_flavour", "layered")
        await until(pilot, lambda: not field(app, "num_frames").display)
        await until(
            pilot,
            lambda: "layer_suffix" in field(app, "datasets").control.placeholder,  # type: ignore[attr-defined]
        )
        await screen.go_to("slurm_account")
        assert field(app, "slurm_account").display
        assert not field(app, "slurm_qos").display
        assert "needs launcher: slurm" in screen.said_below


async def test_a_page_on_which_nothing_applies_takes_no_keys(store: Store) -> None:
    async with form(store) as (app, pilot):
        screen = app.screen
        assert isinstance(screen, NewJobScreen)
        await screen.action_show_page(1)
        assert "No field of this page applies" in screen.said_below
        before = field(app, "name").value
        await pilot.press("x")
        assert field(app, "name").value == before
