"""Files and values that would hang, fill the memory or raise: each is one sentence."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import UserError
from jobs.run.rundir import read_json
from jobs.spec.values.yaml_lines import parse_yaml
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.tui.shell import Shell

DEEP = "[" * 100_000
BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 40)}]\n" for n in range(6)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 40)}]}}\n" for n in range(1, 6)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 20000 values through aliases"),
        (MERGES, "more than 20000 values through"),
        ("a: &a [*a]\n", "more than 20000 values through"),
        ("".join(f"key{n}: 1\n" for n in range(100_000)), "larger than 1 MiB"),
        ("#" * 10_000_000 + "\nname: a\n", "larger than 1 MiB"),
        (f"name: {DEEP}\n", "more than 30 levels"),
        ("{" * 100_000, "more than 30 levels"),
        (f"max_train_steps: {'9' * 5000}\n", "a number of 5000 characters"),
        (f"seed: {'9' * 4299}\n", "seed"),
        (f"max_train_steps: {'9:' * 100_000}9\n", "characters"),
        ("max_train_steps: 99999999999999999999\n", "max_train_steps"),
        ("seed: 1.0e+400\n", "seed"),
        ("".join(f"k{n}: 1\n" for n in range(5000)), "4990 more unknown keys"),
        (f"{'k' * 900}: 1\n", "kkk…"),
        (f"optimizer: {'x' * 5000}\n", 'x…" is not one of adamw'),
        ('dataset: "a\\0b"\n', "dataset has an invalid character"),
        ('validation_prompts: ["a\\uDC00b"]\n', "validation_prompts has an invalid character"),
        ('dataset: "\\uD800"\n', "dataset"),
        ('cache_dir: "/tmp/\\0"\n', "cache_dir|directory"),
        ('accelerate_config: "\\0"\n', "accelerate"),
        ("accelerate_config: /dev/zero\n", "not a regular file"),
        ("dataset: /dev/zero\n", "not a folder"),
        ("pretrained_model_name_or_path: /dev/zero\n", "dev/zero"),
        ("resume_from_checkpoint: /dev/zero\n", "dev/zero"),
        ("", "expected"),
        ("\0", "not valid YAML|cannot"),
    ],
    ids=lambda text: text[:40],  # one of them has ten million characters
)
def test_a_job_file_is_refused_in_one_sentence(
    shell: Shell, tmp_path: Path, job_values: dict[str, Any], text: str, said: str
) -> None:
    path, usual = tmp_path / "job.yaml", {**job_values}
    for key in [key for key in usual if key in text]:
        del usual[key]
    flags = [f"--{key}={value}" for key, value in usual.items()]
    path.write_text(text)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, out, err = shell("submit", str(path), *flags, "--dry-run")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert len(err) < 2000
    assert re.search(said, err), err
    assert time.process_time() - began < 20, "not minutes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/full"])
def test_what_is_no_file_is_not_waited_for(shell: Shell, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / name
    assert "not a regular file" in shell("submit", str(path))[2]
    assert "not a regular file" in shell("import", "simpletuner", str(path))[2]
    assert read_json(path) is None


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 10)
    assert read_regular(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="larger than"):
        read_regular(path, 9)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_layers": 10**9}, r"num_layers is 1e\+09, and the limit is 1,000"),
        ({"num_layers": 10**4000}, "num_layers"),
        ({"depth": [2, 2000]}, "depth is 2e"),
        ({"attention_head_dim": 10**10}, "attention_head_dim"),
    ],
)
def test_a_model_of_any_size_is_not_built(
    shell: Shell, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"} | config))
    status, _, err = shell(
        "detect", "--model_family=flux", f"--pretrained_model_name_or_path={path}"
    )
    assert status == 2
    assert re.search(said, err), err


def test_a_caption_of_20_megabytes_is_a_finding(tmp_path: Path) -> None:
    from engine.data.read.folders import _captions_of

    picture = tmp_path / "a.png"
    picture.with_suffix(".txt").write_bytes(b"x" * (20 << 20))
    assert _captions_of(picture, {}, {}) == (None, "caption cannot be read (larger than 1 MiB)")


def test_what_people_write_is_read() -> None:
    text = "a: &x [1, 2.5, 1e-3]\nb: *x\nc: {d: null}\n"
    assert parse_yaml(text)[1] == {"a": [1, 2.5, "1e-3"], "b": [1, 2.5, "1e-3"], "c": {"d": None}}
    assert parse_yaml("")[1] is None


def test_a_dry_run_writes_nothing(
    shell: Shell, tmp_path: Path, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_values))
    for name in ("FSDP_TUI_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "new" / name))
    status, out, err = shell("submit", str(path), "--dry-run")
    assert (status, err) == (0, "")
    assert out.startswith("name: t\n")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").touch()
    assert "is a file" in shell("submit", str(path), "--dry-run")[2]


def test_a_large_log_is_printed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui.cli.job.follow import _Tail

    lengths: list[int] = []
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.truncate(8 << 20)
    monkeypatch.setattr("sys.stdout.write", lambda text: lengths.append(len(text)))
    _Tail(path).copy_new()
    assert sum(lengths) == 8 << 20
    assert max(lengths) <= 1 << 20


def test_foreign_text_cannot_make_a_message_endless() -> None:
    said = str(UserError(f"the model is a {'x' * 100_000}, not a FLUX.1 model", "take another"))
    assert len(said) < 3100
    assert said.startswith("the model is a xxx")
    assert said.endswith(" not a FLUX.1 model; take another")
