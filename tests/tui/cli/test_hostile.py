"""Whatever files say, what commands print cannot steer the terminal."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from jobs.untrusted.text import harmless
from tests.support.tui.hostile import EVIL, add_evil_job, steering, write_model
from tui.cli.echo import Stream

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store
    from tests.support.tui.shell import Shell


@pytest.mark.parametrize(
    "words",
    [
        "list",
        "list --json",
        "show 1",
        "show 1 --json",
        "show 1 --as yaml",
        "show 1 --as flags",
        "show 1 --as accelerate",
        "checkpoints 1",
        "samples 1",
        "diff 1 1",
        "resume 1",
        "logs 1",
        "logs 1 -f",
        "logs 1 --launcher",
        "logs 1 --supervisor",
        "stop 1",
    ],
)
def test_a_run_is_shown_without_what_its_files_would_do(
    shell: Shell, store: Store, words: str
) -> None:
    add_evil_job(store)
    _, out, err = shell(*words.split())
    assert steering(re.sub(r"\x1b\[[0-9;]*m", "", out)) == []
    assert steering(err) == []
    assert out or err


@pytest.mark.parametrize("command", ["submit", "submit --dry-run", "estimate", "detect", "data"])
def test_a_model_and_a_job_file_say_nothing_to_the_terminal(
    shell: Shell, tmp_path: Path, job_values: dict[str, Any], command: str
) -> None:
    model = write_model(tmp_path / f"model {EVIL[:6]}")
    jobs = [
        job_values | {"pretrained_model_name_or_path": str(model)},
        job_values | {EVIL: 1},
        job_values | {"optimizer": EVIL},
        job_values | {"dataset": f"/{EVIL}", "validation_prompts": [EVIL]},
        job_values | {"validation_prompts": [EVIL], "trigger_word": EVIL},
    ]
    for number, values in enumerate(jobs):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(values))
        words = [*command.split(), str(path)]
        if command == "detect":
            words = [
                "detect",
                "--model_family",
                "flux",
                "--pretrained_model_name_or_path",
                str(values["pretrained_model_name_or_path"]),
            ]
        _, out, err = shell(*words)
        assert steering(out + err) == [], number
        if command == "detect":
            break


def test_a_log_keeps_its_colours_and_nothing_else_however_it_is_cut() -> None:
    text = f"\x1b[1;31mred\x1b[0m\r{EVIL}\tend\x1b"
    whole = Stream().take(text)
    assert steering(whole.replace("\x1b[1;31m", "").replace("\x1b[0m", "").replace("\r", "")) == []
    assert whole.startswith("\x1b[1;31mred\x1b[0m\rA?]52;c;")
    for at in range(len(text)):
        stream = Stream()
        assert stream.take(text[:at]) + stream.take(text[at:]) == whole


def test_other_texts_stay_as_they_are() -> None:
    text = "ünï 猫 🐈\u200d⬛ é\u0301 שלום\n\tline  · – …"
    assert harmless(text) == text
