"""`fsdp-tui fetch`, and what `submit` says of a model that is not on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import yaml

from jobs.hub.wanted import noted
from jobs.queue.states import State
from jobs.spec.values.hub_names import HubName
from tests.support.hub.repos import CHOSEN, flux_like

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from jobs.queue.store import Store
    from tests.support.hub.server import Hub
    from tests.support.tui.shell import Shell

pytest_plugins = ["tests.support.hub.fixture"]

NAME = "someone/FLUX.1-dev"


def test_fetch_says_how_much_fetches_it_and_says_where(hub: Hub, shell: Shell) -> None:
    files = flux_like()
    hub.add(NAME, files)
    total = sum(len(files[path]) for path in CHOSEN)
    (found,) = shell.json("fetch", NAME, "--dry-run")
    assert found == {"name": NAME, "kind": "model", "bytes": total, "missing": total}
    assert HubName("model", NAME).find() is None, "the index alone is no model"
    (found,) = shell.json("fetch", NAME)
    assert found["path"] == str(HubName("model", NAME).find())
    status, out, _ = shell("fetch", NAME)
    assert (status, out.strip()) == (0, found["path"])
    status, _, err = shell("fetch", "someone/nothing")
    assert status == 2
    assert "has no model someone/nothing" in err
    assert shell("fetch", "no name")[0] == 2


def test_submit_asks_once_or_is_allowed_to_fetch(
    hub: Hub,
    shell: Shell,
    store: Store,
    job_values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add(NAME, flux_like())
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_values | {"pretrained_model_name_or_path": NAME}))
    # Where nobody can answer, nothing is asked, of the hub neither.
    status, _, err = shell("submit", str(path))
    assert status == 2
    assert f"fsdp-tui fetch {NAME}" in err
    assert hub.requests == []
    status, out, err = shell("submit", str(path), "--dry-run")
    assert status == 0
    assert f"would fetch {NAME}: " in err
    assert yaml.safe_load(out)["pretrained_model_name_or_path"] == NAME
    assert set(hub.sent) == {"model_index.json"}, "only what tells the size"
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr("click.confirm", lambda text, **more: asked.append(text))
        status, out, err = shell("submit", str(path))
    (job,) = store.all()
    shell("stop", str(job.id))
    assert status == 0, err
    assert out.strip() == str(job.id)
    (question,) = asked
    assert question.startswith("FLUX.1-dev is not on this machine: fetch ")
    assert store.get(job.id).state is State.STOPPED
    assert noted(job.run_dir) == [], "it waits no more, and its fetch was ended"
