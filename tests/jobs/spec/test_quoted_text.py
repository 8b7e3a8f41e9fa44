"""The tokens of what stands in quotes: as HunyuanVideo 1.5's pipeline encodes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.memory import question
from jobs.spec.job_spec import JobSpec
from jobs.spec.values import quoted_text
from jobs.spec.values.quoted_text import MOST, most_quoted_tokens, quoted_tokens

if TYPE_CHECKING:
    from pathlib import Path

SIGN = 'a sign with "OPEN" on it'
OPEN = len('Text "OPEN". ') + 1


@given(st.text(alphabet='a é"“”\n字', max_size=60) | st.text(max_size=20))
def test_a_text_has_the_tokens_that_the_pipeline_gives_it(text: str) -> None:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    glyphs = extract_glyph_texts(text)
    bytes_of = 0 if glyphs is None else len(glyphs.encode(errors="replace")) + 1
    assert quoted_tokens(text) == min(MOST, bytes_of)


def job(data: Path, **changes: Any) -> JobSpec:
    values = {"model_family": "hunyuanvideo15", "pretrained_model_name_or_path": "m"}
    return JobSpec.model_validate(values | {"dataset": str(data)} | changes)


def most(data: Path, **changes: Any) -> int:
    return most_quoted_tokens(job(data, **changes), training=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, text in {"a": "a cat", "b": SIGN, "ü": "a dog"}.items():
        (folder / f"{name}.mp4").touch()
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_captions_have_as_many_as_the_longest_needs(data: Path) -> None:
    assert most(data) == OPEN
    (data / "b.txt").write_text('a sign with\n"OP\nEN" on it')
    assert most(data, caption_lines="variants") == 0, "no line has both quotes"
    assert most(data, caption_lines="joined") == OPEN + 1
    (data / "b.txt").write_text(f'"{300 * "x"}"')
    assert most(data) == MOST
    (data / "b.txt").write_text('a "[trigger]"')
    assert most(data, trigger_word="sks") == len('Text "sks". ') + 1
    (data / "b.txt").write_text("a cat")
    assert most(data) == 0
    assert most(data, class_prompt=SIGN) == OPEN
    (data / "b.txt").unlink()
    assert most(data) == 0, "it is skipped"


@pytest.mark.parametrize("why", ["metadata", "json", "many", "elsewhere", "shuffled", "archives"])
def test_unknown_captions_count_as_the_longest(
    data: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {}
    match why:
        case "metadata":
            (data / "metadata.jsonl").write_text('{"file_name": "a.mp4", "text": "a"}')
        case "json":
            (data / "a.txt").rename(data / "a.json")
        case "many":
            monkeypatch.setattr(quoted_text, "_MOST_READ", 2)
        case "elsewhere":
            changes["dataset"] = "org/name"
        case "shuffled":
            changes["shuffle_captions"] = True
        case "archives":
            for path in data.iterdir():
                path.unlink()
            (data / "shard.tar").touch()
    assert most(data, **changes) == MOST


def test_prompts_are_counted_themselves(data: Path) -> None:
    def of_prompts(*prompts: Any) -> int:
        return most_quoted_tokens(job(data, validation_prompts=list(prompts)), training=False)

    assert of_prompts("a", {"prompt": "b", "negative_prompt": SIGN}) == OPEN
    assert of_prompts("a") == 0


def test_other_captions_are_another_question(data: Path) -> None:
    """Of this family only: nobody else's prediction depends on what is in files."""
    other = {"model_family": "wan"}
    before = [question.key_of(job(data, **changes), {}) for changes in ({}, other)]
    (data / "b.txt").write_text("nothing")
    after = [question.key_of(job(data, **changes), {}) for changes in ({}, other)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
