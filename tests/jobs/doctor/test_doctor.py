"""`fsdp-tui doctor` as a whole: nothing holds it up, nothing secret gets out, it fits a screen."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from jobs.doctor import processes
from jobs.doctor.agreed import END
from jobs.doctor.examine import Check, Finding, Patient, Verdict, examine, fail, ok, warn
from jobs.errors import UserError
from tests.support.waiting import PATIENCE, eventually
from tui.cli import commands
from tui.cli.machine import doctor
from tui.cli.machine.doctor import Style, lines, style

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


# -- running checks ------------------------------------------------------------------------


def test_a_check_that_hangs_or_breaks_is_a_failure_and_the_others_go_on() -> None:
    over = threading.Event()

    def hangs(_: Patient) -> Iterator[Finding]:
        yield ok("first half", "is well")
        over.wait()

    def breaks(_: Patient) -> Iterator[Finding]:
        yield ok("before", "is well")
        raise ZeroDivisionError("by nought")

    def refuses(_: Patient) -> Iterator[Finding]:
        yield from ()
        raise UserError("no such thing", "make one")

    checks = [
        Check("one", "stuck", hangs, seconds=4, when_late="wake it"),
        Check("one", "broken", breaks),
        Check("two", "refused", refuses),
        Check("two", "well", lambda _: [ok("well", "is well")]),
    ]
    found = list(examine(checks, Patient()))
    over.set()
    assert [(f.group, f.name, str(f.verdict)) for f in found] == [
        ("one", "first half", "ok"),
        ("one", "stuck", "fail"),
        ("one", "before", "ok"),
        ("one", "broken", "fail"),
        ("two", "refused", "fail"),
        ("two", "well", "ok"),
    ]
    assert (found[1].found, found[1].advice) == ("no answer within 4 s", "wake it")
    assert "ZeroDivisionError: by nought" in found[3].found
    assert (found[4].found, found[4].advice) == ("no such thing", "make one")


def test_later_stages_see_what_earlier_ones_learned_and_the_order_is_kept() -> None:
    def learn(patient: Patient) -> Iterator[Finding]:
        patient.run_id = "learned"
        yield from ()

    def use(patient: Patient) -> Iterator[Finding]:
        yield ok("use", patient.run_id)

    checks = [
        Check("a", "use", use, stage=1),
        Check("b", "now", lambda _: [ok("now", "")]),
        Check("c", "learn", learn),
    ]
    assert [(f.name, f.found) for f in examine(checks, Patient())] == [
        ("use", "learned"),
        ("now", ""),
    ]


def test_what_is_not_well_says_what_to_do() -> None:
    assert fail("x", "is wrong", "mend it").advice == "mend it"
    assert warn("x", "is odd", "look").verdict is Verdict.WARN
    again = Finding.from_dict(json.loads(json.dumps(fail("x", "y", "z", n=[1]).to_dict())))
    assert again == fail("x", "y", "z", n=[1])


def test_nothing_secret_and_nothing_that_steers_a_terminal_gets_out() -> None:
    found = warn(
        "x",
        f"\x1b[2Jhttps://me:pass@host/x and {SECRET}",
        f"ghp_{'a' * 30}",
        set={"NCCL_X": [f"https://u:{SECRET}@host"], "n": 1},
    ).plain("g")
    text = json.dumps(found.to_dict())
    assert "pass" not in text
    assert SECRET not in text
    assert "ghp_" not in text
    assert "\x1b" not in found.found
    assert "https://***@host/x" in found.found
    assert found.facts["set"]["n"] == 1


# -- the process that looks ----------------------------------------------------------------


@pytest.fixture
def doctor_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that plays `python -m jobs.doctor`; it leaves its pid beside it."""
    monkeypatch.setattr(processes, "_KILL_TIMEOUT", PATIENCE)
    script = tmp_path / "python"
    monkeypatch.setattr(processes.sys, "executable", str(script))
    return script


def play(script: Path, *then: str) -> None:
    line = json.dumps(ok("first", "is well").plain("g").to_dict())
    script.write_text(
        "\n".join(["#!/bin/sh", f"echo $$ > {script}.pid", f"echo '{line}'", *then]) + "\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def gone(script: Path) -> bool:
    return not psutil.pid_exists(int(script.with_name("python.pid").read_text()))


def test_findings_come_until_the_process_says_that_it_is_done(doctor_script: Path) -> None:
    play(doctor_script, f"echo '{json.dumps({END: True})}'", "exec sleep 600")
    found = list(processes.find())
    assert [finding.name for finding in found] == ["first"]
    assert gone(doctor_script), "nobody waits for what it still does"


def test_a_process_that_dies_is_a_failure_with_its_last_words(doctor_script: Path) -> None:
    play(doctor_script, "echo trouble >&2", "echo 'ImportError: no sqlite' >&2", "exit 3")
    found = list(processes.find())
    assert [str(finding.verdict) for finding in found] == ["ok", "fail"]
    assert found[1].found == "stopped: ImportError: no sqlite"


def test_a_process_that_says_nothing_is_given_up(doctor_script: Path) -> None:
    play(doctor_script, "exec sleep 600")
    found = list(processes.find(silent=8))
    assert found[1].verdict is Verdict.FAIL
    assert gone(doctor_script)


def test_who_stops_listening_ends_the_process_and_what_it_started(
    doctor_script: Path, tmp_path: Path
) -> None:
    marked = 'FSDP_TUI_RUN_ID="${3#--run-id=}"'
    # It tells its pid itself: the mark is there only when it runs.
    child = f"{marked} sh -c 'echo $$ > {tmp_path}/child; exec sleep 600' &"
    play(doctor_script, child, "wait")
    coming = processes.find()
    assert next(coming).name == "first"
    eventually(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
    coming.close()
    assert gone(doctor_script)
    pid = int((tmp_path / "child").read_text())
    # The container's first process may be slow to collect it.
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


# -- what is printed -----------------------------------------------------------------------


def printed(found: Finding, **look: Any) -> list[str]:
    return list(lines(found.plain("group"), Style(**look)))


LONG = fail("a rather long name", "é × " + "word " * 60 + "x" * 200, "advice " * 40, n=1)


@pytest.mark.parametrize("width", [50, 80, 100])
def test_lines_fit(width: int) -> None:
    shown = printed(replace(LONG, lines=("NV18 " * 40,)), width=width)
    assert max(map(len, shown)) <= width
    assert shown[0].startswith("  ✗ a rather long name ")
    assert any(line.lstrip().startswith("→ advice") for line in shown)


def test_without_utf8_all_is_ascii() -> None:
    for verdict, sign in ((ok("n", "µ → é"), "+"), (warn("n", "µ", "→"), "!"), (LONG, "x")):
        shown = "\n".join(printed(verdict, utf8=False))
        assert shown.isascii()
        assert shown.startswith(f"  {sign} ")


def test_colours_are_never_the_only_sign() -> None:
    assert "\x1b" not in "".join(printed(LONG))
    coloured = printed(LONG, colour=True)
    assert "\x1b[" in coloured[0]
    assert "✗" in coloured[0]


@pytest.mark.parametrize(
    ("environ", "tty", "colour", "utf8"),
    [
        ({"TERM": "xterm", "LANG": "en_US.UTF-8"}, True, True, True),
        ({"TERM": "xterm", "LANG": "en_US.UTF-8", "NO_COLOR": "1"}, True, False, True),
        ({"TERM": "xterm", "LANG": "C.utf8"}, False, False, True),
        ({"TERM": "dumb", "LANG": "C.utf8"}, True, False, True),
        ({"LANG": "C.utf8"}, True, False, True),
        ({"TERM": "xterm", "LANG": "de_DE.UTF-8", "LC_ALL": "C"}, True, True, False),
        ({"TERM": "xterm"}, True, True, False),
    ],
)
def test_the_style_follows_the_terminal(
    environ: dict[str, str], tty: bool, colour: bool, utf8: bool
) -> None:
    look = style(environ, tty=tty)
    assert (look.colour, look.utf8) == (colour, utf8)


# -- the command ---------------------------------------------------------------------------


def run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fsdp-tui", "doctor", *words])
    with pytest.raises(SystemExit) as caught:
        commands.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ([ok("a", "well")], 0),
        ([ok("a", "well"), warn("b", "odd", "look")], 0),
        ([fail("a", "wrong", "mend"), ok("b", "well")], 1),
    ],
)
def test_only_failures_make_the_exit_status_1(
    found: list[Finding],
    status: int,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def play_findings(*_: Any, **__: Any) -> Iterator[Finding]:
        yield from (finding.plain("group") for finding in found)

    monkeypatch.setattr(doctor.processes, "find", play_findings)
    code, out, err = run([], monkeypatch, capsys)
    assert (code, err) == (status, "")
    assert "\ngroup\n" in out
    code, out, _ = run(["--json"], monkeypatch, capsys)
    said = json.loads(out)
    assert code == status
    assert said["ok"] == (status == 0)
    assert said["counts"]["fail"] == status
    mine = [one for one in said["findings"] if one["group"] == "group"]
    assert [one["name"] for one in mine] == [finding.name for finding in found]
    assert {"group", "name", "verdict", "found", "advice", "lines", "facts"} == mine[0].keys()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing.yaml"], "no such job file: missing.yaml"),
        (["--gpus", "0,0"], "not a list of different GPUs"),
        (["--gpus", "0,"], "not a list of different GPUs"),
        (["--gpus="], "not a list of different GPUs"),
        (["--fast"], "--fast"),
        (["a.yaml", "b.yaml"], "b.yaml"),
    ],
)
def test_bad_usage_is_one_line(
    words: list[str],
    told: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(words, monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_real_look_at_this_machine(home: Path, tmp_path: Path, job_values: Any) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(job_values | {"dataset": str(tmp_path / "nowhere")}))
    done = subprocess.run(
        [sys.executable, "-m", "tui", "doctor", str(job), "--quick", "--json"],
        env=os.environ | {"HF_TOKEN": SECRET, "NCCL_P2P_DISABLE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    assert SECRET not in done.stdout
    said = json.loads(done.stdout)
    found = {(one["group"], one["name"]): one for one in said["findings"]}
    groups = list(dict.fromkeys(one["group"] for one in said["findings"]))
    order = [
        "terminal",
        "software",
        "GPUs",
        "limits",
        "disks",
        "hub",
        "environment",
        "queue",
        "job",
    ]
    assert groups == order
    for one in said["findings"]:
        assert one["found"]
        assert (one["advice"] is None) == (one["verdict"] == "ok"), one
    assert found["software", "Python"]["verdict"] == "ok"
    assert found["hub", "token"]["facts"] == {"present": True}
    assert found["environment", "NCCL_P2P_DISABLE"]["verdict"] == "warn"
    assert found["disks", "state"]["facts"]["path"] == str(home)
    assert found["queue", "database"]["found"].startswith("none yet")
    assert not (home / "jobs.db").exists(), "looking makes nothing"
    assert "no such dataset folder" in found["job", "dataset"]["found"]
    assert found["job", "devices"]["found"] == "2 CPU ranks"
    assert (done.returncode, said["ok"]) == (1, False)
    assert not list(home.iterdir())
