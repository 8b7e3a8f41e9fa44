"""`fsdp-tui data`: a real look at small folders, what it prints, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from PIL import Image

from jobs.errors import UserError
from jobs.machine import engine_tools
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.preflight.data import look_at_data
from jobs.spec.file.load import load_spec
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, eventually
from tui.cli import commands
from tui.text.data_text import changes, data_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Run = Callable[..., tuple[int, str, str]]


def put(path: Path, size: tuple[int, int] = (60, 60), colour: str = "teal", **how: Any) -> Path:
    """A picture with a caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = how.pop("mode", "RGB")
    Image.new("RGB", size, colour).convert(mode).save(path)
    path.with_suffix(".txt").write_text(how.pop("caption", f"a picture, {path.stem}"))
    return path


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Six pictures that can be used, in two shapes; and others."""
    root = tmp_path / "messy"
    for number in range(4):
        put(root / f"square-{number}.png", colour=f"#{number}0a040")
    for number in range(2):
        put(root / "wide" / f"wide-{number}.png", (96, 54), f"#a{number}4040")
    put(root / "print.jpg", mode="CMYK")
    put(root / "tiny.png", (4, 4))
    cut = put(root / "a-cut-one-with-a-long-name-of-many-words-about-what-it-shows.png")
    cut.write_bytes(cut.read_bytes()[:60])
    put(root / "bare.png").with_suffix(".txt").unlink()
    (root / "notes.md").write_text("not an image")
    return root


@pytest.fixture
def job_file(job_values: dict[str, Any], messy: Path, tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        values = job_values | {"dataset": str(messy), "resolution": 64, "max_train_steps": 9}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump({**values, **changes}))
        return path

    return write


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fsdp-tui data` in this process; the look itself is a process of its own."""

    def data(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fsdp-tui", "data", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            commands.main()
        out, err = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int | None)
        return code or 0, out, err

    return data


# -- what is printed -----------------------------------------------------------------------


def test_a_person_reads_what_is_there_and_what_is_not(
    run: Run, job_file: Callable[..., Path]
) -> None:
    status, out, err = run(job_file())
    assert (status, err) == (0, "")
    for words in (
        "samples      7; 3 skipped",
        "buckets      2, sides 16 pixels apart",
        "epoch        ",
        "9 steps",
        "64x64",
        "SKIPPED",
        "1  no caption, such as bare.png",
        "1  truncated, such as",
        "1  too small, such as tiny.png",
        "CONVERTED",
        "1  CMYK, converted to RGB, such as print.jpg",
        "WARNINGS",
        ".md files",
    ):
        assert words in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_every_file_that_is_left_out_can_be_named(run: Run, job_file: Callable[..., Path]) -> None:
    _, out, _ = run(job_file(), "--all")
    lines = [line.strip() for line in out.splitlines()]
    assert "bare.png" in lines
    assert "a-cut-one-with-a-long-name-of-many-words-about-what-it-shows.png" in lines
    assert any(line.startswith("tiny.png: 4x4 would be upscaled 16.0 times") for line in lines)


def test_json_is_the_whole_report(run: Run, job_file: Callable[..., Path]) -> None:
    status, out, err = run("--json", job_file(), "--train-batch-size", "2")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["samples"] == 7
    assert found["global_batch"] == 4, "a flag wins over the file"
    assert sorted(bucket["samples"] for bucket in found["buckets"]) == [2, 5]
    assert "strips" not in found


def test_several_datasets_have_a_line_each(
    run: Run, job_file: Callable[..., Path], tmp_path: Path
) -> None:
    for number in range(3):
        put(tmp_path / "more" / f"{number}.png")
    entries = [str(tmp_path / "messy"), f"{tmp_path / 'more'} x4"]
    status, out, _ = run(job_file(dataset="", datasets=entries), "--all")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["7", "3", "7", "1x", str(tmp_path / "messy")] in rows
    assert ["3", "0", "12", "4x", str(tmp_path / "more")] in rows
    assert str(tmp_path / "messy" / "bare.png") in out, "its folder, as there are several"


def test_a_sheet_of_pictures_is_written(
    run: Run, job_file: Callable[..., Path], tmp_path: Path
) -> None:
    status, out, _ = run(job_file(), "--sheet", tmp_path / "sheet.png")
    assert status == 0
    assert f"images of every bucket: {tmp_path / 'sheet.png'}" in out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 100


def test_data_can_be_looked_at_before_there_is_a_model(
    run: Run, job_file: Callable[..., Path]
) -> None:
    status, out, err = run(job_file(pretrained_model_name_or_path=""), "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["samples"], report["longest"]) == (7, None), "without a tokenizer"


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"dataset": "/no/such"}, [], "no such dataset folder: /no/such"),
        ({"pretrained_model_name_or_path": "/no/such"}, [], "no such model directory: /no/such"),
        ({"max_upscale": 1, "resolution": 512}, [], "no usable image"),
        ({}, ["--resolution", "no"], "resolution: "),
        ({}, ["--sheet", "/no/such/sheet.png"], "cannot write /no/such/sheet.png"),
        ({}, ["another.yaml"], 'another.yaml"'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_looked_at_is_one_line(
    run: Run, job_file: Callable[..., Path], changes: dict[str, Any], words: list[str], said: str
) -> None:
    status, out, err = run(job_file(**changes), *words)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("fsdp-tui: ")
    assert err.count("\n") == 1


def test_without_a_job_it_says_what_to_give(run: Run) -> None:
    status, _, err = run()
    assert status == 2
    assert "no job given" in err


# -- a process of its own ------------------------------------------------------------------


FAILED = "python -m some_tool failed"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Runs a few lines of Python as if they were a tool of the engine."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def ask(code: str, cancelled: Callable[[], bool] = lambda: False) -> Mapping[str, Any]:
        (tmp_path / "some_tool.py").write_text("import os, sys, time\n" + textwrap.dedent(code))
        return engine_tools.ask(
            "some_tool", ["a"], tmp_path / "answer", lambda line: None, cancelled
        )

    return ask


def test_an_answer_is_read_whatever_is_said_beside_it(tool: Callable[..., Any]) -> None:
    assert tool("print('{\"given\": \"' + sys.argv[1] + '\"}'); print('hm', file=sys.stderr)") == {
        "given": "a"
    }


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("sys.exit('fsdp-tui: wrong')", ToolError, f"{FAILED}: fsdp-tui: wrong"),
        ("print('x\\nfsdp-tui: wrong', file=sys.stderr); sys.exit(2)", UserError, "wrong"),
        ("raise MemoryError('too much')", ToolError, f"{FAILED}: MemoryError: too much"),
        ("os.kill(os.getpid(), 9)", ToolError, f"{FAILED}: it was killed by SIGKILL"),
        ("sys.exit(7)", ToolError, f"{FAILED}: exit status 7"),
        ("print('[1')", ToolError, f"{FAILED}: its answer is not a JSON object"),
    ],
)
def test_a_tool_that_fails_says_why(
    tool: Callable[..., Any], code: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        tool(code)
    assert str(caught.value) == said


def test_who_loses_interest_ends_the_tool(tool: Callable[..., Any], tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with pytest.raises(Cancelled):
        tool(
            f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(10**6)",
            lambda: mark.exists() and bool(mark.read_text()),
        )
    assert not psutil.pid_exists(int(mark.read_text()))


def test_a_tool_does_not_outlive_an_asker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "some_tool.py").write_text(
        "import os, sys, time\n"
        "while True:\n"
        "    print('looked', os.getpid(), 1, file=sys.stderr, flush=True); time.sleep(0.02)\n"
    )
    code = (
        "from pathlib import Path; from jobs.machine import engine_tools as tools; "
        "tools.ask('some_tool', [], "
        f"Path({str(tmp_path / 'answer')!r}), lambda line: print(line, flush=True), lambda: False)"
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert asker.stdout is not None
    with asker.stdout:
        pid = int(asker.stdout.readline().split()[1])
        asker.kill()
        asker.wait()
    eventually(lambda: not _runs(pid))


def test_ctrl_c_ends_the_look(job_file: Callable[..., Path], messy: Path, home: Path) -> None:
    os.mkfifo(messy / "endless.png")  # whoever reads it waits forever
    (messy / "endless.txt").write_text("a pipe")
    command = subprocess.Popen(
        [sys.executable, "-m", "tui", "data", str(job_file())],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever started the tests in the background may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with command, _ended(command):
        children: list[psutil.Process] = []

        def looks() -> bool:
            children[:] = psutil.Process(command.pid).children()
            return bool(children) and "engine.data" in children[0].cmdline()

        eventually(looks)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=PATIENCE)
    assert (command.returncode, out, err.strip()) == (130, "", "fsdp-tui: interrupted")
    assert not _runs(children[0].pid)


def test_progress_is_told_and_strips_come_with_the_report(job_file: Callable[..., Path]) -> None:
    told: list[tuple[int, int]] = []
    found = look_at_data(
        load_spec(job_file()), lambda done, total: told.append((done, total)), strips=True
    )
    assert told[-1] == (10, 10)
    assert len(found.strips) == len(found.report["buckets"]) == 2


@contextmanager
def _ended(command: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens within, the command does not outlive it."""
    try:
        yield
    finally:
        command.kill()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- words ---------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    """A report as the engine makes it."""
    found: dict[str, Any] = {
        "samples": 24,
        "skipped": [],
        "reasons": [],
        "handled": [],
        "cautions": [],
        "datasets": [
            {
                "path": "/data",
                "layout": "folder",
                "samples": 24,
                "skipped": 0,
                "draws": 24,
                "others": {},
            }
        ],
        "buckets": [
            {
                "size": [64, 64],
                "samples": 24,
                "draws": 24,
                "cut_mean": 0.0,
                "cut_most": 0.0,
            }
        ],
        "texts": 24,
        "views": 1,
        "longest": None,
        "global_batch": 2,
        "steps_per_epoch": 12,
        "draws_per_epoch": 24,
        "epochs": 1.0,
        "total_steps": 12,
    }
    return found | changes


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (2.5, 9), (0.1, 1)])
def test_the_steps_of_epochs_are_told_before_the_job_runs(
    run: Run, job_file: Callable[..., Path], epochs: float, steps: int
) -> None:
    """Of the seven images that can be used, not of the ten that are there."""
    path = job_file(num_train_epochs=epochs, max_train_steps=None, global_batch_size=2)
    assert json.loads(run(path, "--json")[1])["total_steps"] == steps
    assert f"job          {steps} step" in run(path)[1]


def test_one_of_something_is_not_called_several() -> None:
    text = data_text(report(samples=1, texts=1, steps_per_epoch=1, total_steps=1))
    assert "1 unique caption\n" in text
    assert "1 step of 2\n" in text
    assert "1 step, 1 epoch\n" in text


def test_a_name_is_never_cut(run: Run) -> None:
    name = "x" * 200 + ".png"
    found = [{"count": 1, "text": "truncated", "examples": [name]}]
    assert name in data_text(report(reasons=found, skipped=[[0, name, "truncated"]]))


def test_what_changed_since_is_told_in_numbers() -> None:
    assert changes(None, report()) == ""
    assert changes(report(), report()) == ""
    assert changes({"of": "another version"}, report()) == ""
    more = report(samples=30, skipped=[[0, "a.png", "truncated"]])
    assert changes(report(), more) == "samples 24 → 30, skipped 0 → 1"
    other = report()["buckets"][0] | {"size": [48, 80]}
    assert changes(report(), report(buckets=[other])) == "other sizes"
