"""The form, driven by keys: its pages, what follows the ranks, templates, copies, changes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from textual.command import CommandList, CommandPalette
from textual.events import Paste
from textual.widgets import Static

from jobs.queue.states import State
from jobs.service import edit
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.file.templates import list_templates, path_of, save_template, templates_home
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.driven_app import (
    another_look,
    error_of,
    field,
    form,
    question,
    running,
    said,
)
from tests.support.tui.made_up_runs import FakeGpus, add_job
from tests.support.tui.pilot import until
from tests.support.waiting import PATIENCE
from tui.form import draft
from tui.form.beside import Look
from tui.form.fields import GpuPicker, users_of
from tui.form.files import saved_drafts
from tui.form.pages import PAGES
from tui.form.purpose import Purpose
from tui.form.screen import NewJobScreen
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from jobs.queue.store import Job, Store
    from tui.app.app import FsdpTui

pytestmark = pytest.mark.usefixtures("no_processes")


def screen(app: FsdpTui) -> NewJobScreen:
    found = next(one for one in app.screen_stack if isinstance(one, NewJobScreen))
    assert isinstance(found, NewJobScreen)
    return found


def text_of(app: FsdpTui, name: str) -> str:
    return str(screen(app).query_one(f"#{name}", Static).content)


def note_of(app: FsdpTui, name: str) -> str:
    return str(field(app, name).query_one(".note", Static).content)


async def find(app: FsdpTui, pilot: Pilot[None], text: str, shows: str, key: str) -> None:
    """Choose the first thing that a palette finds; its text is pasted."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(app.screen, CommandPalette))
    app.post_message(Paste(text))
    await until(pilot, lambda: palette_shows(app, shows))
    await pilot.press("enter")


async def find_field(app: FsdpTui, pilot: Pilot[None], name: str) -> None:
    """To a field, as the person finds it."""
    await find(app, pilot, name, name, "ctrl+f")
    await until(pilot, lambda: isinstance(app.screen, NewJobScreen))


async def go_to(app: FsdpTui, pilot: Pilot[None], name: str) -> None:
    """To a field, at once."""
    await screen(app).go_to(name)
    await until(pilot, lambda: field(app, name).control.has_focus)


def palette_shows(app: FsdpTui, name: str) -> bool:
    hits = app.screen.query_one(CommandList)
    return hits.option_count > 0 and name in str(hits.get_option_at_index(0).hit.text)  # type: ignore[attr-defined]


async def type_over(pilot: Pilot[None], text: str) -> None:
    await pilot.press(
        "end",
        "ctrl+u",
        *(
            {"_": "underscore", ".": "full_stop", "-": "minus", "/": "slash"}.get(c, c)
            for c in text
        ),
    )


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus(4)
    monkeypatch.setattr("jobs.machine.devices.gpus", gpus)
    return gpus


# -- by keyboard ---------------------------------------------------------------------------


async def test_seven_keys_and_two_paths_queue_a_flux_lora(
    store: Store, job_values: dict[str, Any]
) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        keys = 0

        async def press(*some: str) -> None:
            nonlocal keys
            keys += len(some)
            await pilot.press(*some)

        await press("n")
        await until(pilot, lambda: app.screen.query("#field-name") and app.focused)
        await press("down", "down", "down", "down")
        app.post_message(Paste(job_values["pretrained_model_name_or_path"]))
        await pilot.pause()
        await press("down")
        app.post_message(Paste(job_values["dataset"]))
        await pilot.pause()
        await press("ctrl+r")
        await until(pilot, lambda: store.all())
        assert keys <= 7
        spec = load_spec(store.all()[0].run_dir.job_file)
        assert (spec.model_family, spec.model_type) == ("flux", "lora")
        assert spec.dataset == job_values["dataset"]


@pytest.mark.slow
async def test_a_whole_job_is_described_and_queued_by_keys_alone(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = Path(job_values["pretrained_model_name_or_path"]), Path(job_values["dataset"])
    monkeypatch.chdir(model.parent)
    assert data.parent == model.parent
    async with form(store) as (app, pilot):
        await type_over(pilot, "cats")
        await pilot.press("down", "space")  # full
        await pilot.press("down", "down", "down")
        await type_over(pilot, model.name)
        await pilot.press("down")
        await type_over(pilot, data.name)
        await until(pilot, lambda: "3 images" in note_of(app, "dataset"))
        await pilot.press("down", "down")  # past several datasets
        await type_over(pilot, "5")
        await find_field(app, pilot, "mixed_precision")
        await pilot.press("n")  # by its first letter
        await go_to(app, pilot, "num_processes")
        await type_over(pilot, "2")
        await go_to(app, pilot, "device")
        await pilot.press("left")  # from auto round to cpu
        await go_to(app, pilot, "seed")
        await type_over(pilot, "7")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        spec = load_spec(store.all()[0].run_dir.job_file)
        assert (spec.name, spec.model_type, spec.max_train_steps) == ("cats", "full", 5)
        assert (spec.num_processes, spec.strategy, spec.device) == (2, "fsdp2", "cpu")
        assert (spec.mixed_precision, spec.seed) == ("no", 7)


async def test_pages_are_turned_made_and_marked_where_something_is_wrong(
    store: Store, job_values: dict[str, Any], tmp_path: Path
) -> None:
    async with form(store) as (app, pilot):
        assert len(app.screen.query(".page")) == 1
        await pilot.press("ctrl+n")
        await until(pilot, lambda: app.screen.query_one("#page-fsdp").display)
        assert not app.screen.query_one("#page-main").display
        await pilot.press("ctrl+pageup")
        await until(pilot, lambda: app.screen.query_one("#page-main").display)
        await until(pilot, lambda: field(app, "name").control.has_focus)
        await pilot.press("f7")  # round to the last one
        await until(pilot, lambda: app.screen.query_one("#page-running").display)
        await until(pilot, lambda: field(app, PAGES[-1].fields[0]).control.has_focus)
        await pilot.press("alt+4")
        await until(pilot, lambda: app.screen.query_one("#page-training").display)
        assert len(app.screen.query(".page")) == 4
        for name in ("pretrained_model_name_or_path", "dataset"):
            field(app, name).put(job_values[name])
        await go_to(app, pilot, "adam_beta1")
        await type_over(pilot, "2")
        await until(pilot, lambda: "less than 1" in error_of(app, "adam_beta1"))
        await pilot.press("alt+1")
        await until(pilot, lambda: "4 training!" in text_of(app, "form-tabs"))
        assert "adam_beta1: " in text_of(app, "form-error")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: field(app, "adam_beta1").control.has_focus)
        # Of several, the first is led to, whichever the job checks first.
        field(app, "resolution").put("0")
        field(app, "max_train_steps").put("many")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: field(app, "max_train_steps").control.has_focus)
        # With all values right, a path on which there is nothing.
        screen(app).fields.put({"resolution": 64, "max_train_steps": 5, "adam_beta1": 0.9})
        field(app, "dataset").put(str(tmp_path / "nowhere"))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: field(app, "dataset").control.has_focus)
        assert "no such dataset folder" in error_of(app, "dataset")
        assert store.all() == []


@pytest.mark.slow
async def test_leaving_asks_only_when_something_was_typed_and_templates_keep_it(
    store: Store,
) -> None:
    async with form(store) as (app, pilot):
        await pilot.press("ctrl+n", "escape")
        await until(pilot, lambda: app.screen is app.dashboard)
        await pilot.press("n")
        await until(pilot, lambda: app.screen.query("#field-name") and app.screen.focused)
        await pilot.press("x", "escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        assert field(app, "name").value == "x"
        # A template keeps to its directory.
        screen(app).save_as_template()
        await until(pilot, lambda: app.screen.query("#name"))
        app.screen.query_one("#name").value = "../out"  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: "is not a valid template name" in text_of(app, "form-error"))
        assert not templates_home().parent.joinpath("out.yaml").exists()
        # A flavour is a template as well.
        await find(app, pilot, "schnell", "schnell", "ctrl+t")
        await until(pilot, lambda: field(app, "model_flavour").value == "schnell")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: app.screen is app.dashboard)


@pytest.mark.slow
async def test_a_new_form_is_blank_and_one_key_takes_the_newest_job_and_gives_it_back(
    store: Store, job_values: dict[str, Any]
) -> None:
    add_job(store, "given", job_file=dump_spec(load_spec(None, job_values)))
    async with form(store) as (app, pilot):
        model = "pretrained_model_name_or_path"
        assert not any(field(app, name).value for name in (model, "dataset", "num_processes"))
        assert text_of(app, "form-title").endswith("F4 takes model and data from #1 “given”")
        await pilot.press("f4")
        await until(pilot, lambda: field(app, "dataset").value == job_values["dataset"])
        assert field(app, model).value == job_values[model]
        assert field(app, "num_processes").value == "2"
        assert screen(app).values["device"] == "auto", "the given job ran on the CPU"
        assert text_of(app, "form-title").endswith("from #1 “given” · F4 undoes that")
        # What was typed where it does not apply any more waits.
        field(app, "strategy").put("hsdp")
        await go_to(app, pilot, "dp_replicate_size")
        await type_over(pilot, "2")
        field(app, "strategy").put("fsdp2")
        await until(pilot, lambda: field(app, "dp_replicate_size").control.disabled)
        assert error_of(app, "dp_replicate_size") == ""
        assert "dp_replicate_size" not in screen(app).values
        field(app, "strategy").put("hsdp")
        await until(pilot, lambda: not field(app, "dp_replicate_size").control.disabled)
        assert screen(app).values["dp_replicate_size"] == "2"
        field(app, "strategy").put("auto")
        field(app, "dataset").put("another")
        await pilot.press("f4")
        await until(pilot, lambda: not field(app, model).value)
        assert not field(app, "num_processes").value
        assert field(app, "dataset").value == "another", "typed since"
        assert field(app, "dp_replicate_size").value == "2"
        assert "F4 takes" in text_of(app, "form-title")


# -- what follows the ranks ----------------------------------------------------------------


async def test_the_accumulation_follows_the_chosen_gpus_and_the_global_batch(
    store: Store, four_gpus: FakeGpus
) -> None:
    key = "gradient_accumulation_steps"
    async with form(store) as (app, pilot):
        field(app, "global_batch_size").put(8)
        await until(pilot, lambda: note_of(app, key) == "global_batch_size sets it to 8")
        field(app, "gpus").control.focus()
        await pilot.press("1", "3")
        await until(pilot, lambda: note_of(app, key) == "global_batch_size sets it to 4")
        assert field(app, key).control.disabled
        assert f"{key}:" not in screen(app).preview.texts["yaml"]
        field(app, "global_batch_size").put(None)
        await until(pilot, lambda: not field(app, key).control.disabled)


async def test_two_gpus_turn_fsdp_on_and_one_restores_what_was_there(
    store: Store, four_gpus: FakeGpus
) -> None:
    async with form(store) as (app, pilot):
        await go_to(app, pilot, "unload_text_encoder")
        await pilot.press("n")
        await pilot.press("alt+1")
        field(app, "gpus").control.focus()
        await pilot.press("1")
        await until(pilot, lambda: field(app, "num_processes").control.disabled)
        assert field(app, "strategy").value == "auto"
        await pilot.press("3")
        await until(pilot, lambda: field(app, "strategy").value == "fsdp2")
        assert field(app, "unload_text_encoder").value is True
        values = screen(app).values
        assert (values["unload_text_encoder"], values["cache_text_embeddings"]) == (True, True)
        assert text_of(app, "cascade") == (
            "2 ranks turn FSDP on: strategy fsdp2, unload text encoder on, cache text embeddings on"
        )
        assert note_of(app, "num_processes") == "2, one per GPU"
        assert note_of(app, "strategy") == "1/2 of the model"
        field(app, "strategy").put("ddp")
        await until(pilot, lambda: note_of(app, "strategy") == "a full copy per rank")
        assert text_of(app, "cascade") == (
            "2 ranks: unload text encoder on, cache text embeddings on"
        )
        field(app, "strategy").put("fsdp2")
        await until(pilot, lambda: "turn FSDP on" in text_of(app, "cascade"))
        await pilot.press("3")
        await until(pilot, lambda: field(app, "strategy").value == "auto")
        assert field(app, "unload_text_encoder").value is False
        assert "cache_text_embeddings" not in screen(app).values
        assert text_of(app, "cascade").startswith("1 rank, restored: strategy auto")


@pytest.mark.slow
async def test_a_job_file_with_several_ranks_is_taken_as_it_is(
    store: Store, job_values: dict[str, Any]
) -> None:
    spec = load_spec(None, job_values | {"strategy": "ddp", "cache_text_embeddings": None})
    add_job(store, "given", job_file=dump_spec(spec))
    async with form(store, "D") as (app, pilot):
        await until(pilot, lambda: text_of(app, "form-tabs"))
        assert field(app, "strategy").value == "ddp"
        assert not screen(app).query_one("#cascade").display


# -- what does not apply -------------------------------------------------------------------


@pytest.mark.slow
async def test_options_that_do_not_apply_are_off_and_say_why_and_come_back(store: Store) -> None:
    async with form(store) as (app, pilot):
        await until(pilot, lambda: field(app, "fsdp_reshard_after_forward").control.disabled)
        assert note_of(app, "fsdp_reshard_after_forward") == "no effect on 1 rank"
        await pilot.press("alt+2")
        await until(pilot, lambda: app.screen.query("#row-fsdp_cpu_offload"))
        offload = field(app, "fsdp_cpu_offload")
        assert offload.control.disabled
        assert note_of(app, "fsdp_cpu_offload") == "no effect on 1 rank"
        field(app, "num_processes").put("2")
        await until(pilot, lambda: not offload.control.disabled)
        assert "Keep shards" in note_of(app, "fsdp_cpu_offload")
        assert note_of(app, "fsdp_min_num_params").startswith("needs fsdp_auto_wrap_policy")
        field(app, "strategy").put("ddp")
        await until(pilot, lambda: offload.control.disabled)
        assert note_of(app, "fsdp_cpu_offload") == "needs strategy: fsdp2 or hsdp"
        # What was chosen among several ranks comes back with them.
        field(app, "num_processes").put("")  # on the way to another number
        await until(pilot, lambda: field(app, "strategy").value == "auto")
        field(app, "num_processes").put("8")
        await until(pilot, lambda: field(app, "strategy").value == "ddp")
        # Looking for a field that does not apply tells why.
        await pilot.press("alt+1")
        field(app, "model_type").control.focus()
        await pilot.press("slash")  # where nothing is typed
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        app.post_message(Paste("huber"))
        await until(pilot, lambda: palette_shows(app, "huber_c"))
        await pilot.press("enter")
        await until(pilot, lambda: screen(app).query("#row-huber_c"))
        await until(pilot, lambda: "Now: needs loss_type" in text_of(app, "field-help"))


# -- GPUs ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_gpus_in_use_say_by_whom_and_keys_choose_all_or_the_free_ones(
    store: Store, four_gpus: FakeGpus
) -> None:
    from jobs.machine.gpu import GpuProcess

    four_gpus.gpus[0] = replace(four_gpus.gpus[0], memory_used=0)
    four_gpus.gpus[3] = replace(
        four_gpus.gpus[3], processes=(GpuProcess(812, 1 << 30, user="eve"),)
    )
    add_job(store, state=State.RUNNING, gpus=["GPU-0001"])
    async with form(store) as (app, pilot):
        picker = field(app, "gpus").control
        assert isinstance(picker, GpuPicker)
        text = lambda: str(picker.content)  # noqa: E731
        assert "□ 1 105.8G job 1" in text()
        assert "□ 2 74.8G hidden 65.0 GiB" in text(), "in use, though no process can be seen"
        assert "□ 3 43.8G eve 812" in text()
        picker.focus()
        await pilot.press("f")
        assert field(app, "gpus").value == [0]
        await pilot.press("a")
        assert field(app, "gpus").value == [0, 1, 2, 3]
        assert "waiting for 1, 2, 3" in text()
        await pilot.press("a")
        assert field(app, "gpus").value is None
        await pilot.press("right", "right", "space", "left", "space")
        assert field(app, "gpus").value == [1, 2]
        await pilot.press("9")  # there is none
        assert field(app, "gpus").value == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "shown", "then"),
    [
        (["GPU-0001", "GPU-0003"], "■ 3", ["GPU-0001"]),
        (3, "any 3 free GPUs", [3]),
        (["GPU-ffff"], "GPU-ffff: not on this machine", [3]),
    ],
)
async def test_gpus_stay_as_the_job_names_them(
    store: Store, four_gpus: FakeGpus, given: Any, shown: str, then: Any
) -> None:
    text = f"name: given\ngpus: {given}\npretrained_model_name_or_path: m\ndataset: d\n"
    add_job(store, "given", job_file=text)
    async with form(store, "D") as (app, pilot):
        picker = field(app, "gpus").control
        assert isinstance(picker, GpuPicker)
        assert shown in str(picker.content)
        assert screen(app).values["gpus"] == given
        picker.focus()
        await pilot.press("3")
        assert field(app, "gpus").value == then


@pytest.mark.slow
async def test_a_file_is_replaced_only_when_asked_for(store: Store, tmp_path: Path) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("name: precious\n")
    async with form(store) as (app, pilot):
        for key in ("n", "y"):
            await pilot.press("ctrl+s")
            await until(pilot, lambda: app.screen.query("#path"))
            app.screen.query_one("#path").value = str(there)  # type: ignore[attr-defined]
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
            assert there.read_text() == "name: precious\n"
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        await until(pilot, lambda: "precious" not in there.read_text())


# -- templates -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_template_is_begun_from_and_kept(store: Store, job_values: dict[str, Any]) -> None:
    save_template("tiny", {"model_family": "wan", "lora_rank": 4, "seed": 9})
    add_job(store, "given", job_file=dump_spec(load_spec(None, job_values)))
    async with form(store, "D") as (app, pilot):
        await find(app, pilot, "tiny", "tiny", "ctrl+t")
        await until(pilot, lambda: field(app, "model_family").value == "wan")
        assert "loaded tiny" in said(app)
        assert field(app, "lora_rank").value == "4"
        assert field(app, "dataset").value == job_values["dataset"]
        assert screen(app).values["seed"] == 9
        await find(app, pilot, "save", "Save", "ctrl+t")
        await until(pilot, lambda: app.screen.query("#name"))
        app.screen.query_one("#name").value = "tiny"  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "seed: 9" in path_of("tiny").read_text()
        screen(app).fields.put({"lora_rank": 8})
        await pilot.press("y")
        await until(pilot, lambda: any("tiny.yaml" in text for text in said(app)))
        assert int(yaml.safe_load(path_of("tiny").read_text())["lora_rank"]) == 8


async def test_templates_are_found_by_who_types_before_they_are_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()

    def read_slowly() -> object:
        assert read.wait(PATIENCE)
        return list_templates()

    monkeypatch.setattr("tui.form.files.list_templates", read_slowly)
    save_template("tiny", {"lora_rank": 4})
    async with form(store) as (app, pilot):
        await pilot.press("ctrl+t")
        await pilot.press("t")
        await pilot.press("i")
        read.set()
        await until(pilot, lambda: palette_shows(app, "tiny"))


# -- copies and queued jobs ----------------------------------------------------------------


@pytest.fixture
def waiting(store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("jobs.service.dispatch", lambda store: None)
    return add_job(store, "t", job_file=dump_spec(load_spec(None, job_values)))


@pytest.mark.slow
async def test_a_waiting_job_is_changed_in_its_place(store: Store, waiting: Job) -> None:
    async with form(store, "e") as (app, pilot):
        assert text_of(app, "form-title") == "job 1 “t”, queued"
        assert "change" in text_of(app, "form-keys")
        field(app, "max_train_steps").put(77)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: "job 1 changed" in said(app))
        assert [job.total_steps for job in store.all()] == [77]
        assert load_spec(store.get(1).run_dir.job_file).max_train_steps == 77


@pytest.mark.slow
async def test_the_jobs_before_it_are_chosen_and_checked_as_typed(
    store: Store, waiting: Job, job_values: dict[str, Any]
) -> None:
    def below() -> str:
        return str(app.screen.query_one("#base", Static).content)

    add_job(store, "other", job_file=dump_spec(load_spec(None, job_values | {"name": "other"})))
    async with running(store, select=waiting.id) as (app, pilot):
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        await pilot.press("f8", "9")
        await until(pilot, lambda: below() == "! no job 9")
        await pilot.press("enter", "backspace", "1")
        await until(pilot, lambda: below() == "! job 1 cannot wait for itself")
        await pilot.press("backspace", "2")
        await until(pilot, lambda: "2  other, queued" in below())
        await pilot.press("enter")
        await until(pilot, lambda: "starts after job 2" in text_of(app, "form-title"))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        assert store.get(1).blockers == ((2, State.QUEUED),)
        await pilot.press("e")
        await until(pilot, lambda: "starts after job 2" in text_of(app, "form-title"))
        await pilot.press("f8", "backspace", "enter", "escape")
        await question(app, pilot)
        await pilot.press("n", "ctrl+r")
        await until(pilot, lambda: not store.get(1).follows)
    assert Purpose(follows=(1, 2)).stages == " · starts after jobs 1, 2"
    purpose = Purpose(follows=(1,))
    made, _ = purpose.carry_out(store, load_spec(None, job_values | {"name": "third"}))
    assert [number for number, _ in store.get(made).follows] == [1]


@pytest.mark.slow
async def test_a_job_that_starts_meanwhile_becomes_a_copy(store: Store, waiting: Job) -> None:
    async with form(store, "e") as (app, pilot):
        field(app, "max_train_steps").put(77)
        assert store.claim(1, [], "starting")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "^r now queues" in text_of(app, "form-error"))
        assert field(app, "name").value == "t-2"
        assert field(app, "max_train_steps").value == "77"
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        assert [(job.name, job.total_steps) for job in store.all()] == [("t-2", 77), ("t", 200)]


@pytest.mark.slow
async def test_who_leaves_while_a_job_is_queued_is_told_of_it(
    store: Store, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the data may take long; leaving does not stop what it is for."""
    go_on, change = threading.Event(), edit.change

    def slow(*args: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return change(*args)

    monkeypatch.setattr(edit, "change", slow)
    async with form(store, "e") as (app, pilot):
        field(app, "max_train_steps").put(77)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen(app).submission.busy)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "leaving does not stop that" in app.screen.detail  # type: ignore[attr-defined]
        await pilot.press("y")
        await until(pilot, lambda: app.screen is app.dashboard)
        go_on.set()
        await until(pilot, lambda: "job 1 changed" in said(app))


@pytest.mark.slow
async def test_a_job_changed_elsewhere_is_not_overwritten(store: Store, waiting: Job) -> None:
    before = load_spec(waiting.run_dir.job_file)
    async with form(store, "e") as (app, pilot):
        edit.change(store, 1, before.model_copy(update={"seed": 3}), before)
        field(app, "max_train_steps").put(77)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "was changed elsewhere" in text_of(app, "form-error"))
        assert load_spec(waiting.run_dir.job_file).seed == 3


@pytest.mark.slow
async def test_of_a_job_that_runs_a_copy_is_offered(
    store: Store, job_values: dict[str, Any]
) -> None:
    file = dump_spec(load_spec(None, job_values))
    add_job(store, "t", state=State.RUNNING, job_file=file)
    async with running(store, (80, 24)) as (app, pilot):
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "running" in str(app.screen.question)  # type: ignore[attr-defined]
        await pilot.press("y")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen) and app.screen.is_mounted)
        await until(pilot, lambda: app.screen.query("#field-name"))
        assert field(app, "name").value == "t-2"


@pytest.mark.slow
async def test_a_job_file_that_cannot_be_read_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.service.dispatch", lambda store: None)
    add_job(store, "broken", job_file="{")
    async with running(store, (80, 24)) as (app, pilot):
        await pilot.press("D", "e")
        await until(pilot, lambda: len([text for text in said(app) if "YAML" in text]) == 2)
        assert app.screen is app.dashboard


# -- the machine, meanwhile ----------------------------------------------------------------


@pytest.mark.slow
async def test_the_form_sees_who_comes_and_goes(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = FakeGpus(2)
    cards.gpus = [replace(gpu, memory_used=0) for gpu in cards.gpus]
    monkeypatch.setattr("jobs.machine.devices.gpus", cards)
    looked: list[Any] = []

    def look(values: Any, snapshot: Any, *_: Any) -> Look:
        looked.append(users_of(snapshot))
        return Look(values)

    monkeypatch.setattr("tui.form.beside.look", look)
    job = add_job(
        store,
        "t",
        state=State.RUNNING,
        gpus=[cards.gpus[0].uuid],
        job_file=dump_spec(load_spec(None, job_values)),
    )
    async with form(store, "D") as (app, pilot):
        picker = field(app, "gpus").control
        assert isinstance(picker, GpuPicker)
        await until(pilot, lambda: looked)
        assert "job 1" in str(picker.content)
        drawn: list[str] = []
        monkeypatch.setattr(picker, "update", drawn.append)
        await another_look(app, pilot)
        assert not drawn, "nobody came or went"
        assert len(looked) == 1
        store.change(job.id, State.COMPLETED, "all steps")
        await until(pilot, lambda: drawn)
        assert "job 1" not in str(drawn[-1])
        await until(pilot, lambda: len(looked) == 2)
        assert looked == [{cards.gpus[0].uuid: "job 1"}, {}]


@pytest.mark.slow
async def test_a_slow_disk_does_not_hold_the_form_up(
    store: Store, monkeypatch: pytest.MonkeyPatch, job_values: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump_spec(load_spec(None, job_values | {"seed": 77})))
    go_on = threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return load_spec(*args, **options)

    monkeypatch.setattr("tui.form.files.load_spec", slow)
    async with form(store) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query("#path"))
        app.screen.query_one("#path").value = str(path)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen(app))
        await pilot.press("alt+2")
        await until(pilot, lambda: screen(app).fields.page == 1)
        assert screen(app).values["seed"] != 77
        go_on.set()
        await until(pilot, lambda: screen(app).values["seed"] == 77)


# -- preview -------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_command_and_the_file_stand_beside_the_form_and_are_copied(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(
        "tui.terminal.clipboard.copy", lambda app, text: copied.append(text) or "copied"
    )
    add_job(store, "given", job_file=dump_spec(load_spec(None, job_values)))
    async with form(store, "D", (120, 40)) as (app, pilot):
        await until(pilot, lambda: "name: given-2" in text_of(app, "yaml"))
        assert screen(app).preview.display
        await pilot.press("ctrl+y")
        assert copied == [text_of(app, "yaml")]
        await pilot.press("f3")
        await until(pilot, lambda: text_of(app, "command").startswith("accelerate launch"))
        assert "--num_processes=2" in text_of(app, "command")
        await pilot.press("ctrl+y")
        assert "cat > given-2-by-hand/job.yaml" in copied[1]
        assert "accelerate launch" in copied[1]
        field(app, "num_processes").put("3")
        await until(pilot, lambda: "--num_processes=3" in text_of(app, "command"))
        field(app, "dataset").put("")
        await until(pilot, lambda: text_of(app, "command").startswith("not yet: "))
        assert screen(app).fields.display


@pytest.mark.slow
async def test_on_a_narrow_screen_the_file_takes_the_place_of_the_fields(store: Store) -> None:
    async with form(store) as (app, pilot):
        shown = lambda: (screen(app).fields.display, screen(app).preview.display)  # noqa: E731
        assert shown() == (True, False)
        await pilot.press("f3")
        assert shown() == (False, True)
        await pilot.press("f3", "f3")
        assert shown() == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_nothing_is_cut_off(store: Store, size: tuple[int, int]) -> None:
    async with form(store, "n", size) as (app, pilot):
        for page in (0, 2):
            await screen(app).action_show_page(page)
            await pilot.pause()
            fields = screen(app).fields
            assert fields.virtual_size.width <= fields.size.width
            assert fields.size.height >= 16
        assert screen(app).query_one("#form-keys").region.bottom == size[1]
        assert len(plain_keys(app)) <= size[0]


def plain_keys(app: FsdpTui) -> str:
    content: Any = screen(app).query_one("#form-keys", Static).content
    return f" {content.plain} "


# -- sweeps --------------------------------------------------------------------------------


class Keys:
    """Presses keys, and counts them."""

    def __init__(self, app: FsdpTui, pilot: Pilot[None]) -> None:
        self.app, self.pilot, self.count = app, pilot, 0

    async def press(self, *keys: str) -> None:
        self.count += len(keys)
        await self.pilot.press(*keys)

    async def to_learning_rate(self) -> None:
        """Go to the field from the first one of a form that opens."""
        await until(self.pilot, lambda: self.app.screen.query("#field-name") and self.app.focused)
        await self.press("ctrl+f")
        await until(self.pilot, lambda: isinstance(self.app.screen, CommandPalette))
        await self.press(*"lear")
        await until(self.pilot, lambda: palette_shows(self.app, "learning_rate"))
        await self.press("enter")
        await until(self.pilot, lambda: isinstance(self.app.screen, NewJobScreen))
        await until(self.pilot, lambda: field(self.app, "learning_rate").control.has_focus)


async def test_a_job_resumes_with_another_rate_by_twelve_keys(
    store: Store, job_values: dict[str, Any]
) -> None:
    spec = load_spec(None, job_values | {"name": "cats", "learning_rate": 1e-4})
    job = add_job(store, "cats", ranks=1, job_file=dump_spec(spec), state=State.STOPPED)
    store.pause(True)
    async with running(store) as (app, pilot):
        keys = Keys(app, pilot)
        await keys.press("S")
        await keys.to_learning_rate()
        await keys.press(*"3e-5", "ctrl+r")
        await until(pilot, lambda: store.get(job.id).state is State.QUEUED)
    assert keys.count <= 12
    assert load_spec(job.run_dir.job_file).learning_rate == 3e-5


async def test_five_learning_rates_are_queued_with_at_most_twelve_keys(
    store: Store, job_values: dict[str, Any]
) -> None:
    spec = load_spec(None, job_values | {"name": "cats", "learning_rate": 1e-4})
    add_job(store, "cats", ranks=1, job_file=dump_spec(spec))
    async with running(store) as (app, pilot):
        keys = Keys(app, pilot)
        await keys.press("D")
        await keys.to_learning_rate()
        await keys.press("ctrl+e")
        await until(pilot, lambda: "queue 5 jobs" in text_of(app, "form-keys"))
        assert note_of(app, "learning_rate") == "5 values, a job each"
        await keys.press("ctrl+r")
        await until(pilot, lambda: len(store.all()) == 6)
        assert keys.count <= 12
        await until(pilot, lambda: "sweep cats-2: 5 jobs queued" in said(app))
    made = store.all()[::-1][1:]
    rates = [load_spec(job.run_dir.job_file).learning_rate for job in made]
    assert rates == [1e-5, 3e-5, 1e-4, 3e-4, 1e-3]
    assert {store.sweeps()[job.id] for job in made} == {"cats-2"}


async def test_a_field_is_a_list_until_the_key_is_pressed_again(store: Store) -> None:
    async with form(store) as (app, pilot):
        await go_to(app, pilot, "model_type")
        await pilot.press("ctrl+e")
        await until(pilot, lambda: field(app, "model_type").control.has_focus)
        assert field(app, "model_type").values == ["lora", "full"]
        assert screen(app).values["model_type"] == "lora", "the first one is what is checked"
        await pilot.press("ctrl+e")
        await until(pilot, lambda: field(app, "model_type").control.has_focus)
        assert field(app, "model_type").values == ["lora"]
        await go_to(app, pilot, "lora_rank")
        await pilot.press("ctrl+e")
        await type_over(pilot, "8,many")
        await until(pilot, lambda: "many" in error_of(app, "lora_rank"))
        await go_to(app, pilot, "name")
        await pilot.press("ctrl+e")
        assert "name cannot be a list of values" in said(app)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("learning_rate", "2e-4", "2e-5, 7e-5, 2e-4, 7e-4, 2e-3"),
        ("learning_rate", "0.00035", "4e-5, 1e-4, 3.5e-4, 1e-3, 4e-3"),
        ("lora_rank", "16", "4, 8, 16, 32, 64"),
        ("lora_rank", "1", "1, 2, 4"),
        ("validation_fraction", "0.1", "0.01, 0.03, 0.1, 0.3"),  # a half at most
        ("seed", "7", "7, 8, 9, 10, 11"),
        ("resolution", "512, 768", "512, 768; "),
        ("optimizer", "lion", "lion"),
    ],
)
def test_a_list_begins_with_values_around_the_one_there_is(
    name: str, text: str, values: str
) -> None:
    assert draft.proposal(name, text) == values


# -- nothing typed is lost -----------------------------------------------------------------


def drafts_of(store: Store) -> list[dict[str, Any]]:
    return [dict(one.values) for one in saved_drafts(store.home / "drafts")]


async def test_a_draft_outlives_the_terminal_and_the_next_form_restores_it(store: Store) -> None:
    async with form(store) as (app, pilot):
        await pilot.press("end", "c", "a", "t", "s")
        await until(pilot, lambda: drafts_of(store) == [{"name": "jobcats"}])
        (path,) = (store.home / "drafts").glob("[!.]*")  # it may be written again
        assert path.stat().st_mode & 0o777 == 0o600
    async with form(store) as (app, pilot):
        await until(pilot, lambda: "F6 restores your draft of" in text_of(app, "form-title"))
        assert field(app, "name").value == "job"
        await pilot.press("f6")
        await until(pilot, lambda: field(app, "name").value == "jobcats")
        assert "F6 undoes that" in text_of(app, "form-title")
        await pilot.press("f6")
        assert field(app, "name").value == "job"
        field(app, "name").put("hf_" + "a" * 30)
        field(app, "max_train_steps").put(7)
        await until(pilot, lambda: drafts_of(store)[0] == {"max_train_steps": "7"})


@pytest.mark.slow
async def test_a_queued_job_leaves_no_draft(store: Store, job_values: dict[str, Any]) -> None:
    async with form(store) as (app, pilot):
        screen(app).fill(job_values)
        await until(pilot, lambda: len(drafts_of(store)) == 1)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: drafts_of(store) == [])


async def test_quitting_asks_while_a_form_holds_changes(store: Store) -> None:
    async with form(store) as (app, pilot):
        await pilot.press("end", "x", "ctrl+q")
        assert "draft" in (await question(app, pilot)).detail
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        assert app.is_running
        assert app.return_code is None
        await pilot.press("ctrl+q")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: app.return_code == 0)


async def test_three_pasted_prompts_are_three(store: Store) -> None:
    async with form(store, size=(120, 60)) as (app, pilot):
        field(app, "validation_prompts").control.focus()
        app.post_message(Paste("a cat\na dog | red\n\na bird\n"))
        wanted = ["a cat", '{"prompt": "a dog \\u007c red"}', "a bird"]
        await until(pilot, lambda: field(app, "validation_prompts").value == wanted)


# -- a resume with other settings ----------------------------------------------------------


@pytest.fixture
def ended(store: Store, job_values: dict[str, Any]) -> Job:
    """A stopped job with a checkpoint of step 30."""
    spec = load_spec(None, job_values | {"max_train_steps": 200})
    job = add_job(store, "cats", state=State.STOPPED, job_file=dump_spec(spec))
    save_checkpoint(job.run_dir, 30, spec.to_dict())
    return job


async def test_a_resume_changes_what_its_checkpoint_allows_and_says_what_that_means(
    store: Store, ended: Job
) -> None:
    async with form(store, "S", (120, 60)) as (app, pilot):
        assert text_of(app, "form-title").startswith("resume job 1 “cats” after step 30")
        assert text_of(app, "carried") == ""
        assert not field(app, "lora_rank").display, "its tensors have this shape"
        field(app, "learning_rate").put(3e-4)
        await until(pilot, lambda: "the result changes: learning_rate" in text_of(app, "carried"))
        assert note_of(app, "learning_rate") == "was 0.0001; the result changes"
        field(app, "checkpointing_steps").put(7)
        await until(pilot, lambda: "stays the same" in note_of(app, "checkpointing_steps"))
        field(app, "learning_rate").put(1e-4)
        await until(pilot, lambda: text_of(app, "carried").startswith("The result stays"))
        assert note_of(app, "learning_rate") == ""
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: "job 1 resumes" in said(app))
        spec = load_spec(ended.run_dir.job_file)
        assert (spec.checkpointing_steps, spec.learning_rate) == (7, 1e-4)
        assert store.get(1).state is not State.STOPPED


async def test_a_resume_that_cannot_be_is_said_while_it_is_typed(store: Store, ended: Job) -> None:
    async with form(store, "S", (120, 60)) as (app, pilot):
        field(app, "max_train_steps").put(20)
        await until(pilot, lambda: "already trained 30 of 20" in text_of(app, "form-error"))
