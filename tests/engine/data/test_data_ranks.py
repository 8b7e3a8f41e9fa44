"""Ranks that fill caches together, one of which dies, is late, or finds damaged files."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from engine.data.encode.latents import _READ_AHEAD
from engine.data.encode.tensor_cache import TensorCache
from jobs.run.rundir import RunDir
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.engine.ranks import data as data_ranks
from tests.support.engine.toy_jobs import start_ranks, toy_values
from tests.support.forks.client import RanksFailedError
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.forks.client import Ranks

TIMEOUT: Final = 20.0  # seconds, of every collective
DELAY: Final = 60.0  # seconds, of one rank while the caches are filled
VARIED: Final[dict[str, Any]] = {
    "random_flip": True,
    "crop": "random",
    "crop_variants": 2,
    "caption_dropout_probability": 0.1,
    "validation_prompts": ["a red circle"],
    "max_train_steps": 60,
}


class Folder:
    """Jobs that share a cache."""

    def __init__(self, root: Path, toy: Path) -> None:
        self.root = root
        self.toy = toy
        self.cache = root / "cache"

    def values(self, ranks: int, **changes: Any) -> dict[str, Any]:
        settings = VARIED | {"cache_dir": str(self.cache), "num_processes": ranks} | changes
        return toy_values(self.toy, **settings)

    def fill(
        self, token: str, ranks: int, changes: dict[str, Any] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """An attempt at the folder's run: what each rank says it did."""
        self.start(token, ranks, changes, **options).join()
        files = [self.root / "run" / f"{token}-{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]

    def start(
        self, token: str, ranks: int, changes: dict[str, Any] | None = None, **options: Any
    ) -> Ranks:
        values = self.values(ranks, **changes or {})
        return start_ranks(data_ranks.fill, ranks, values, self.root / "run", token, options)

    def stop(self, token: str, ranks: int, kind: str, holds: str) -> list[dict[str, Any]]:
        """An attempt that is asked to stop while each rank is at its third thing of a kind: what
        each rank says it did.
        """
        context = self.start(token, ranks, holds=holds)
        eventually(lambda: len(self.files(kind)) >= ranks * (data_ranks.HELD - 1))
        RunDir(self.root / "run").request("stop")
        context.join()
        RunDir(self.root / "run").clear_request("stop")  # as the next attempt's launch does
        return [
            json.loads((self.root / "run" / f"{token}-{rank}.json").read_text())
            for rank in range(ranks)
        ]

    def files(self, kind: str) -> dict[str, tuple[int, int]]:
        """Name → inode and time of change: a file that was written again has others."""
        paths = (self.cache / kind).glob("*/[!.]*.safetensors")
        return {p.stem: (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths}

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of all attempts."""
        return read_events(self.root / "run")

    @property
    def warnings(self) -> list[str]:
        return [event["message"] for event in self.events if event["kind"] == "warning"]


@pytest.fixture
def folder(tmp_path: Path, toy: Path) -> Folder:
    return Folder(tmp_path, toy)


def read_events(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDir(root).events.read_text().splitlines()]


def computed(facts: list[dict[str, Any]]) -> tuple[int, int]:
    """Texts and pictures, of all ranks."""
    return sum(len(f["texts"]) for f in facts), sum(f["pictures"] for f in facts)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_fill_the_caches_once_together_and_nothing_is_left_to_do(
    ranks: int, folder: Folder
) -> None:
    first = folder.fill("first", ranks, together=True)
    texts, latents = folder.files("text"), folder.files("latents")
    # 24 captions, a prompt and the empty caption; of each picture two sides, and two cuts where
    # there is something to cut.
    assert len(texts) == 26
    assert 48 < len(latents) <= 96
    assert computed(first) == (len(texts), len(latents)), "no file is computed twice"
    assert len({text for facts in first for text in facts["texts"]}) == 26
    assert all(facts["texts"] and facts["pictures"] for facts in first), "every rank does some"
    assert len({facts["digest"] for facts in first}) == 1, "and sees the same"
    ends = {e["name"]: e for e in folder.events if e["kind"] == "phase" and e["state"] == "end"}
    assert ends["encode"]["ranks"] == [len(facts["texts"]) for facts in first]
    assert ends["latents"]["ranks"] == [facts["pictures"] for facts in first]

    again = folder.fill("again", ranks)
    assert computed(again) == (0, 0)
    assert [facts["loaded"] for facts in again] == [[]] * ranks, "no model is even loaded"
    assert (folder.files("text"), folder.files("latents")) == (texts, latents)
    assert {facts["digest"] for facts in again} == {facts["digest"] for facts in first}


@pytest.mark.slow
def test_no_encoder_is_left_in_any_rank(folder: Folder) -> None:
    for facts in folder.fill("first", 2, together=True):
        assert sorted(facts["loaded"]) == ["text", "vae"]
        assert facts["left"] == []


@pytest.mark.slow
def test_a_rank_that_is_killed_loses_only_its_current_file(folder: Folder) -> None:
    context = folder.start("killed", 2, dies=30, holds="pictures", holder=0)
    with pytest.raises(RanksFailedError) as end:
        context.join()  # as a launcher does, this ends the other rank too
    assert end.value.codes == {1: -signal.SIGKILL}
    kept = {kind: folder.files(kind) for kind in ("text", "latents")}
    assert sum(map(len, kept.values())) >= 30
    unfinished = list(folder.cache.rglob(".*.tmp"))
    assert len(unfinished) in (1, 2), "what the ranks were writing, and no more"
    for kind, files in kept.items():
        cache = TensorCache(folder.cache, kind)
        assert {cache.check(key) for key in files} <= {"sound"}

    again = folder.fill("again", 2)
    texts, latents = folder.files("text"), folder.files("latents")
    assert computed(again) == (len(texts) - len(kept["text"]), len(latents) - len(kept["latents"]))
    for kind, now in (("text", texts), ("latents", latents)):
        assert kept[kind].items() <= now.items(), "what was there was not touched"


@pytest.mark.slow
def test_damaged_files_are_computed_anew_with_a_warning(folder: Folder) -> None:
    whole = folder.fill("whole", 2)
    texts, latents = folder.files("text"), folder.files("latents")
    for kind, name in (("text", min(texts)), ("latents", min(latents))):
        path = TensorCache(folder.cache, kind).path(name)
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
    again = folder.fill("again", 2)
    assert computed(again) == (1, 1)
    assert again[0]["digest"] == whole[0]["digest"]
    said = [line for line in folder.warnings if "damaged" in line]
    assert [line[:39] for line in said] == [
        "1 cached text files are damaged and wil",
        "1 cached latents files are damaged and ",
    ]
    assert min(latents) in said[1]


@pytest.mark.slow
def test_a_changed_picture_and_a_changed_caption_are_noticed(
    folder: Folder, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder.toy / "data", data)
    plain = {"dataset": str(data), "validation_prompts": []}
    folder.fill("one", 2, plain)
    first, second, *_ = sorted(data.glob("*.png"))
    first.write_bytes(second.read_bytes())  # same name, other content
    second.with_suffix(".txt").write_text("a completely different caption")
    (data / "new.png").write_bytes(first.read_bytes() + b" ")
    (data / "new.txt").write_text("a new one")
    again = folder.fill("two", 2, plain)
    texts = [text for facts in again for text in facts["texts"]]
    assert sorted(texts) == ["a completely different caption", "a new one"]
    (said,) = [line for line in folder.warnings if "last attempt" in line]
    changed = f"1 changed ({first.name}), 1 with another caption ({second.name})"
    assert f"1 new (new.png), {changed}" in said


@pytest.mark.slow
def test_a_job_that_sees_little_prepares_little(folder: Folder) -> None:
    short = folder.fill("short", 2, {"max_train_steps": 3, "validation_prompts": []})
    texts, pictures = computed(short)
    assert (texts, pictures) == (7, 6), "three steps of two, and the empty caption"
    longer = folder.fill("longer", 2, {"max_train_steps": 5, "validation_prompts": []})
    assert computed(longer) == (4, 4), "and the longer one only what is new to it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "kind", "holds", "ahead"),
    [
        ("encode", "text", "texts", 0),
        ("latents", "latents", "pictures", _READ_AHEAD),
    ],
)
def test_ranks_that_are_asked_to_stop_leave_together_and_go_on_later(
    phase: str, kind: str, holds: str, ahead: int, folder: Folder
) -> None:
    stopped = folder.stop("stopped", 2, kind, holds)
    assert [said["stopped"] for said in stopped] == [phase, phase]
    # Whatever a rank was at, and pictures that are read already; not a whole piece, nor the rest.
    for said in stopped:
        assert len(said["texts"]) <= data_ranks.HELD or kind != "text"
        assert said["pictures"] <= data_ranks.HELD + ahead
    kept = {kind: folder.files(kind) for kind in ("text", "latents")}
    assert computed(stopped) == (len(kept["text"]), len(kept["latents"]))
    assert len(kept[kind]) < {"text": 26, "latents": 48}[kind], "it had more to do"

    again = folder.fill("again", 2)
    now = {kind: folder.files(kind) for kind in kept}
    assert computed(again) == tuple(len(now[kind]) - len(kept[kind]) for kind in kept)
    for kind, files in kept.items():
        assert files.items() <= now[kind].items(), "what was there was not touched"


@pytest.mark.slow
@pytest.mark.parametrize(("sees", "place"), [(0, "index"), (1, "check-text")])
def test_a_wish_that_one_rank_sees_is_everyones(sees: int, place: str, folder: Folder) -> None:
    RunDir(folder.root / "run").request("stop")
    facts = folder.fill("seen", 2, sees=sees)
    assert [said["stopped"] for said in facts] == [place, place]
    assert computed(facts) == (0, 0)


@pytest.mark.slow
def test_ranks_whose_encoders_are_sharded_stop_in_the_middle_too(folder: Folder) -> None:
    context = start_training(
        folder.root / "run",
        folder.toy,
        {"each": 1.0},
        shard_text_encoders=True,
        cache_dir=str(folder.cache),
        max_train_steps=12,
    )
    eventually(lambda: len(folder.files("text")) >= 3)
    RunDir(folder.root / "run").request("stop")
    context.join()
    end = folder.events[-1]
    assert (end["kind"], end["reason"], end["step"]) == ("end", "stopped", 0)
    assert not [e for e in folder.events if e.get("name") == "encode" and e["state"] == "end"]
    assert len(folder.files("text")) < 24, "it had more to do"
    assert not (folder.root / "run" / ".meeting").exists()
    assert not RunDir(folder.root / "run").rank_errors()


@dataclass
class Late:
    """A job one of whose ranks is late."""

    context: Ranks
    root: Path

    def end_of(self, phase: str) -> dict[str, Any]:
        """The event with which a phase ended, once the job has."""
        self.context.join()
        events = read_events(self.root)
        assert (events[-1]["kind"], events[-1]["reason"]) == ("end", "completed")
        (end,) = [
            e
            for e in events
            if (e["kind"], e.get("name"), e.get("state")) == ("phase", phase, "end")
        ]
        return end

    def texts(self) -> dict[str, bytes]:
        """What was cached."""
        return {p.name: p.read_bytes() for p in (self.root / "cache/text").rglob("*.safetensors")}


def start_training(root: Path, toy: Path, options: dict[str, Any], **changes: Any) -> Ranks:
    """A whole job on two ranks; see `data_ranks.train`."""
    values = toy_values(toy, num_processes=2, strategy="fsdp2", **changes)
    RunDir(root).create()
    RunDir(root).job_file.write_text(dump_spec(load_spec(None, values)))
    return start_ranks(data_ranks.train, 2, values, root, options)


@pytest.fixture(scope="module", autouse=True)
def _late_ones_start_first(request: pytest.FixtureRequest) -> None:
    """So that they are late while the other tests run; only if one that asks for them will."""
    for item in request.session.items:
        if item.path == request.path and "late" in getattr(item, "fixturenames", ()):
            request.getfixturevalue("late")
            return


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[dict[str, Late]]:
    """Jobs with encoders whole and sharded; they sleep while the other tests run."""
    jobs = {}
    for name in ("whole", "sharded"):
        root = tmp_path_factory.mktemp("late") / name
        context = start_training(
            root,
            toy,
            {"delay": DELAY},
            distributed_timeout_seconds=TIMEOUT,
            max_train_steps=12,
            cache_dir=str(root / "cache"),
            shard_text_encoders=name == "sharded",
        )
        jobs[name] = Late(context, root)
    yield jobs
    for job in jobs.values():
        job.context.kill()


@pytest.mark.slow
def test_a_rank_that_is_late_by_more_than_the_timeout_fails_nothing(late: dict[str, Late]) -> None:
    encode = late["whole"].end_of("encode")
    assert encode["seconds"] > DELAY - 5 > 2 * TIMEOUT
    mine, its = encode["ranks"]
    assert mine > 5 * its, "the other rank did not leave it all the work"


@pytest.mark.slow
def test_nor_does_one_for_which_sharded_encoders_wait_in_a_collective(
    late: dict[str, Late],
) -> None:
    encode = late["sharded"].end_of("encode")
    assert encode["seconds"] > DELAY - 5 > 2 * TIMEOUT
    assert abs(encode["ranks"][0] - encode["ranks"][1]) <= 1, "they go in step"
    log = (late["sharded"].root / "events.jsonl").read_text()
    assert '"freed"' in log


@pytest.mark.slow
def test_sharded_encoders_fill_the_cache_with_the_same_bytes(late: dict[str, Late]) -> None:
    for job in late.values():
        job.end_of("encode")
    whole, sharded = late["whole"].texts(), late["sharded"].texts()
    assert len(whole) > 10
    assert sharded == whole
