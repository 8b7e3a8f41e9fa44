"""A glance at a dataset says what of it would be skipped, before a job is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.preflight import data
from jobs.preflight.data import find_unusable
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def glance(root: Path, missing_captions: str = "skip") -> list[str]:
    return find_unusable(JobSpec(dataset=str(root), missing_captions=missing_captions))


def test_good_images_raise_no_doubt(make_data: Callable[..., Path]) -> None:
    assert glance(make_data(pictures=3)) == []


def test_images_without_captions_or_pictures_are_counted(make_data: Callable[..., Path]) -> None:
    root = make_data(pictures=3)
    (root / "page.png").write_text("<html>not found</html>")
    (root / "page.txt").write_text("a page")
    (root / "empty.jpg").touch()
    assert glance(root) == [
        f"2 of 5 images in {root}: not readable, will be skipped.",
        f"1 of 5 images in {root}: no caption, will be skipped.",
    ]
    assert len(glance(root, "empty")) == 1, "they are trained without one"
    (root / "metadata.jsonl").touch()
    assert len(glance(root)) == 1, "captions may stand there"


def test_of_many_images_some_are_looked_at(
    make_data: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_data(pictures=9, captions=False)
    monkeypatch.setattr(data, "MOST", 3)
    assert glance(root) == [f"about 100% of 9 images in {root}: no caption, will be skipped."]
