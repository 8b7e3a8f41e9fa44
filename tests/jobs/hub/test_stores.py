"""Datasets in object stores: fetched once and whole, whatever is cut, and read as they were."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import SpecError, StateError
from jobs.hub import fetch as fetching
from jobs.hub import fetches, listing, stores
from jobs.hub.trouble import HubError, explain
from jobs.hub.wanted import ask_sizes, find_missing, names_in, question
from jobs.machine import file_lock, residence
from jobs.machine.residence import Residence
from jobs.paths import cache_home
from jobs.preflight.data import check_dataset
from jobs.queue import neighbors
from jobs.queue.neighbors import record_home
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.service.caches import clear, list_caches
from jobs.service.plan import plan_submit
from jobs.spec.file.load import load_spec
from jobs.spec.values import hub_names
from jobs.spec.values.datasets import datasets_of
from jobs.spec.values.hub_names import HubName, StoreUrl, pin_snapshots, use_pins, why_refused
from tests.conftest import plain_png
from tests.support.hub.objects import Objects, serve_objects
from tests.support.tui.made_up_runs import add_job
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.hub.fetches import Fetch
    from jobs.queue.store import Job

_SMALL = 1000  # bytes of a range in these tests


@pytest.fixture
def bucket(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_names, "_pins", {})
    monkeypatch.setattr(stores, "_RANGE", _SMALL)
    with serve_objects() as store:
        yield store


def cats(count: int = 3) -> dict[str, bytes]:
    """Pictures with captions, and what no job reads."""
    pictures = {f"cats/{n}.png": plain_png((n, 9, 9)) for n in range(count)}
    captions = {f"cats/{n}.txt": f"cat {n}".encode() for n in range(count)}
    return pictures | captions | {"cats/notes.xlsx": b"no", "cats/.hidden.png": b"no"}


def large(seed: int = 0) -> dict[str, bytes]:
    """Objects of no, one and several ranges, below folders, one with a name to be quoted."""
    sizes = {"a.tar": 5300, "b/c d.tar": 3000, "b/e.tar": 999, "b/f.txt": 0, "g.tar": 1000}
    draws = random.Random(seed)
    return {f"cats/{name}": draws.randbytes(size) for name, size in sizes.items()}


def url_of(bucket: Objects, folder: str = "cats") -> StoreUrl:
    return StoreUrl.of(f"{bucket.url}/{folder}")


def fetch(url: StoreUrl, told: list[Fetch] | None = None) -> Path:
    """In this process, without pauses."""
    tell = told.append if told is not None else lambda now: None
    return fetching.fetch(url, tell, pause=lambda seconds: None)


def tree_of(root: Path) -> dict[str, bytes]:
    return {
        f"cats/{path.relative_to(root)}": path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


@contextmanager
def killed_at(number: int, root: Path, *changes: tuple[Any, str]) -> Iterator[list[Path]]:
    """Raise `Killed` in place of one of these changes, and end the block with it.

    Only changes below `root` count, because other threads of this process may write files too.

    Yields:
        The path whose change was killed; empty if there were fewer changes.
    """
    calls, killed = itertools.count(1), []

    def kill(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(file: int | Path, *words: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file)
            if path.is_relative_to(root) and next(calls) == number:
                killed.append(path)
                raise Killed
            return real(file, *words)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for place, name in changes:
            patch.setattr(place, name, kill(getattr(place, name)))
        try:
            yield killed
        except Killed:
            return
    assert not killed, "it went on after it was killed"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://user:word@bucket/cats", "user, password or signature"),
        ("s3://AKIAABCDEFGHIJKLMNOP@bucket", "user, password or signature"),
        ("https://host/cats?X-Amz-Signature=word", "user, password or signature"),
        ("file:///data/cats", "write the path"),
        ("s3://bucket/*.tar", "one folder or object"),
        ("simplecache::s3://bucket/cats", "one folder or object"),
        ("s3://", "one folder or object"),
    ],
)
def test_an_address_that_no_job_file_may_hold(
    address: str, says: str, job_values: dict[str, Any]
) -> None:
    several = {"dataset": None, "datasets": [{"path": "here"}, {"path": address}]}
    for values in ({"dataset": address}, several, several | {"datasets": [address, address]}):
        with pytest.raises(SpecError, match=says) as error:
            load_spec(None, job_values | values)
        assert "word" not in str(error.value).replace("password", "")
    assert HubName.read("dataset", address) is None


def test_addresses_name_their_place_in_the_cache() -> None:
    url = HubName.read("dataset", " S3://bucket/some/cats/ ")
    assert isinstance(url, StoreUrl)
    assert (str(url), url.protocol, url.name) == ("s3://bucket/some/cats", "s3", "cats")
    slugs = {
        StoreUrl.of(f"s3://bucket/{text}").slug for text in ("a/b", "a-b", "a/../b", "é" * 900)
    }
    assert len(slugs) == 4
    assert all("/" not in slug and len(slug) < 200 for slug in slugs)
    assert not any(map(why_refused, ("s3://b/c", "gs://b", "az://c/d", "ORG/NAME", "/data/a@b?")))


@pytest.mark.parametrize("seed", range(2))
def test_cut_connections_lose_nothing_and_fetch_nothing_twice(bucket: Objects, seed: int) -> None:
    bucket.objects = large(seed)
    bucket.cuts, bucket.down = random.Random(seed), [503, 500]
    told: list[Fetch] = []
    folder = fetch(url_of(bucket), told)
    assert tree_of(folder) == bucket.objects
    assert set(bucket.whole.values()) == {1}, "each range comes to its end once"
    assert len(bucket.whole) == 6 + 3 + 1 + 1
    assert told[-1].done == told[-1].total == sum(map(len, bucket.objects.values()))
    assert not [*folder.parents[2].rglob("*.part")]
    before = bucket.sent
    assert fetch(url_of(bucket)) == folder
    assert bucket.sent == before


def test_an_object_that_changes_meanwhile_is_fetched_in_one_version(bucket: Objects) -> None:
    """One is overwritten between two of its ranges, another one is deleted before its first."""
    bucket.objects = large()
    other = random.Random(7).randbytes(5300)

    def change(key: str, begin: int) -> None:
        if key == "cats/a.tar" and begin == 2 * _SMALL:
            bucket.objects["cats/a.tar"] = other
        if key == "cats/g.tar":
            bucket.objects.pop(key, None)

    bucket.on_range = change
    folder = fetch(url_of(bucket))
    assert tree_of(folder)["cats/a.tar"] == other
    assert set(tree_of(folder)) == set(large()) - {"cats/g.tar"}


@pytest.mark.parametrize(
    ("objects", "status", "says"),
    [
        (cats(), 403, "the store refuses access to .*; only public addresses can be read"),
        ({}, 0, "there is nothing at .*/cats; check the address"),
        ({"cats/notes.xlsx": b"no"}, 0, "has no images or tables"),
        ({f"cats/{'a' * 252}.png": b"no"}, 0, "cannot be a file of that name here; rename it"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(
    bucket: Objects, objects: dict[str, bytes], status: int, says: str
) -> None:
    bucket.objects, bucket.refused = objects, status
    with pytest.raises(HubError, match=says) as error:
        fetch(url_of(bucket))
    assert not error.value.passing


def test_a_server_that_does_not_tell_versions_is_refused(bucket: Objects) -> None:
    bucket.objects, bucket.tagged = cats(), False
    with pytest.raises(HubError, match="does not say its size and version") as error:
        fetch(url_of(bucket))
    assert not error.value.passing


class NoCredentialsError(Exception):
    """As botocore names it."""


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, status: int) -> None:
        super().__init__("secret: AKIAABCDEFGHIJKLMNOP")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("error", "passing", "says"),
    [
        (NoCredentialsError(), False, "no credentials for s3://b/cats .* `aws configure`, or set"),
        (PermissionError("AccessDenied"), False, "refuses access to s3://b/cats; run `aws conf"),
        (ImportError("s3fs"), False, r"needs the package s3fs, .*; pip install 'fsdp-tui\[s3\]'"),
        (FileNotFoundError("b"), False, "there is no s3://b/cats"),
        (ValueError("Bucket name"), False, "cannot be read"),
        (ClientError(400), False, "cannot be read"),
        (ClientError(403), False, "refuses access"),
        (ClientError(503), True, "answered with status 503"),
        (TimeoutError(), True, "cannot be reached"),
        (ConnectionResetError(), True, "cannot be reached"),
    ],
)
def test_errors_of_s3_are_told_apart(error: Exception, passing: bool, says: str) -> None:
    trouble = explain(error, StoreUrl.of("s3://b/cats"))
    assert trouble.passing is passing
    with pytest.raises(HubError, match=says):
        raise trouble
    assert "AKIA" not in str(trouble)


def test_a_full_disk_is_told_before(bucket: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.objects = large()
    monkeypatch.setattr(listing, "_SPARE", 1 << 60)
    with pytest.raises(HubError, match=r"needs .* free; free space, or set XDG_CACHE_HOME"):
        fetch(url_of(bucket))
    assert bucket.sent == 0


def test_a_run_keeps_the_data_that_it_began_with(
    bucket: Objects, tmp_path: Path, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.objects = cats()
    url = url_of(bucket)
    spec = load_spec(None, job_values | {"dataset": str(url)})
    first = fetch(url)
    pin_snapshots(names_in(spec), tmp_path)
    bucket.objects["cats/0.txt"] = b"another caption"
    del bucket.objects["cats/1.png"]
    bucket.objects["cats/9.txt"] = b"new"
    second = fetch(url)
    assert (
        stores.compare(first.parent.name, url) == "1 new (9.txt), 1 gone (1.png), 1 changed (0.txt)"
    )
    assert [entry.path for entry in datasets_of(spec)] == [str(second)], "a new job"
    assert (second / "0.txt").read_bytes() == b"another caption"
    pin_snapshots(names_in(spec), tmp_path)  # the next attempt
    use_pins(tmp_path)
    assert [entry.path for entry in datasets_of(spec)] == [str(first)]
    assert (first / "0.txt").read_bytes() == b"cat 0"
    assert (first / "1.png").exists()
    url.listing_file(first.parent.name).unlink()  # its copy is deleted
    pin_snapshots(names_in(spec), tmp_path)
    use_pins(tmp_path)
    assert [entry.path for entry in datasets_of(spec)] == [str(second)]


def test_a_cleared_cache_has_no_half_copies(bucket: Objects, store: Store) -> None:
    """Whatever `cache clear` had deleted when it was killed, the copy does not count any more."""
    bucket.objects = cats(2)
    url = url_of(bucket)
    folder = fetch(url)
    measured = {cache.name: cache for cache in list_caches(store)}["stores"]
    assert measured.bytes > sum(len(bucket.objects[f"cats/{n}.png"]) for n in range(2))
    (folder / "0.png").resolve().unlink()
    for path in url.root.iterdir():
        if path.is_file():
            path.unlink()
    assert url.find() is None
    before = bucket.sent
    assert fetch(url) == folder
    assert bucket.sent - before == len(bucket.objects["cats/0.png"])
    assert (folder / "0.png").read_bytes() == bucket.objects["cats/0.png"]
    clear(store, ["stores"])
    assert url.find() is None
    assert not any(path.is_file() for path in url.root.parent.rglob("*"))


def test_local_and_remote_datasets_mix(
    bucket: Objects, make_data: Any, job_values: dict[str, Any], store: Store, no_gpus: None
) -> None:
    bucket.objects = cats() | {"masks/0.png": plain_png((0, 0, 0))}
    here, url, masks = make_data("here"), url_of(bucket), url_of(bucket, "masks")
    values = [{"path": str(here), "repeats": 2}, {"path": str(url), "mask_path": str(masks)}]
    more = {"dataset": None, "datasets": values, "masked_loss": "file"}
    spec = load_spec(None, job_values | more)
    assert find_missing(spec) == [url, masks]
    with pytest.raises(SpecError, match=rf"{url} is not on this machine; `fsdp-tui fetch {url}`"):
        check_dataset(spec)
    folder = fetch(url)
    assert find_missing(spec) == [masks]
    only = fetch(masks)
    paths = [(entry.path, entry.mask_path) for entry in datasets_of(spec)]
    assert paths == [(str(here), None), (str(folder), str(only))]
    assert check_dataset(spec) == 6
    (note, _) = [line for line in plan_submit(store, spec).warnings if "is used as" in line]
    assert note.startswith(f"{url} is used as it was on ")


def _began(store: Store, state: State, url: StoreUrl) -> Job:
    """A job in a state, which has begun with the newest copy."""
    job = add_job(store, state=state)
    pin_snapshots([url], job.run_dir.root)
    return job


def test_earlier_copies_are_cleared_but_for_those_that_jobs_need(
    bucket: Objects, store: Store
) -> None:
    """One that ended early may be resumed, and needs its copy too."""
    bucket.objects = cats(1)
    url = url_of(bucket)
    folders, jobs = [], []
    for state in (State.COMPLETED, State.RUNNING, State.STOPPED, State.QUEUED, None):
        bucket.objects["cats/0.txt"] = f"caption of a job that is {state}".encode()
        folders.append(fetch(url))
        if state is not None:
            jobs.append(_began(store, state, url))
    contents = [tree_of(folder) for folder in folders]

    def measured() -> dict[str, Any]:
        return {cache.name: cache for cache in list_caches(store)}

    before = measured()
    links = len(contents[0])
    assert before["old_stores"].files == links + 2, "with the listing and the caption"
    cleared = clear(store, ["old_stores"])
    assert (cleared.bytes, cleared.files) == (before["old_stores"].bytes, links + 2)
    assert [folder.exists() for folder in folders] == [False, True, True, True, True]
    assert [tree_of(folder) for folder in folders[1:]] == contents[1:]
    after = measured()
    assert after["old_stores"].files == 0
    assert after["stores"] == before["stores"]
    assert url.find() == folders[-1]
    pins = jobs[1].run_dir.root / "stores.json"
    pins.write_text("damaged")
    assert clear(store, ["old_stores"]).files == 0, "nobody knows what it reads"
    pins.unlink()
    assert clear(store, ["old_stores"]).files == links + 2
    sent = bucket.sent
    bucket.objects["cats/0.txt"] = b"caption of a job that is completed"
    assert tree_of(fetch(url)) == contents[0]
    assert bucket.sent - sent == len(bucket.objects["cats/0.txt"])


def _neighbor(path: Path, state: State, url: StoreUrl) -> tuple[Store, Job]:
    """Another state directory that shares the cache, with a job that began."""
    path.mkdir()
    store = Store(path)
    job = _began(store, state, url)
    record_home(job.run_dir)
    return store, job


@pytest.mark.parametrize("state", [State.RUNNING, State.STOPPED, State.QUEUED, State.COMPLETED])
def test_what_jobs_of_another_state_directory_read_is_kept(
    bucket: Objects, store: Store, tmp_path: Path, state: State
) -> None:
    bucket.objects = cats(1)
    url = url_of(bucket)
    old = fetch(url)
    other, job = _neighbor(tmp_path / "other", state, url)
    record_home(_began(store, State.COMPLETED, url).run_dir)
    bucket.objects["cats/0.txt"] = b"another"
    new, content = fetch(url), tree_of(old)
    before = other.path.read_bytes()
    clear(store, ["old_stores"])
    assert old.exists() is (state is not State.COMPLETED)
    assert new.exists()
    if state is not State.COMPLETED:
        assert tree_of(old) == content
    if state is State.RUNNING:
        with pytest.raises(StateError, match=rf"job {job.id} .* of {other.home} is running and ma"):
            clear(store, ["stores"])
    assert other.path.read_bytes() == before, "it is another's"
    clear(store, ["stores"], force=state is State.RUNNING)
    assert not new.exists()


@pytest.mark.parametrize(
    "unknown", ["elsewhere", "newer", "unreadable", "another volume", "damaged record"]
)
def test_a_state_directory_that_cannot_be_read_from_here_may_have_jobs(
    bucket: Objects,
    store: Store,
    tmp_path: Path,
    unknown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket.objects = cats(1)
    url = url_of(bucket)
    old, there = fetch(url), Residence("boot", "1", "box", "m")
    with monkeypatch.context() as patch:
        if unknown == "elsewhere":
            patch.setattr(neighbors, "residence", lambda: there)
            patch.setattr(residence, "is_shared", lambda path: True)
        other, _ = _neighbor(tmp_path / "other", State.STOPPED, url)
    bucket.objects["cats/0.txt"] = b"another"
    fetch(url)
    (record,) = (cache_home() / "state_directories").iterdir()
    if unknown == "elsewhere":
        monkeypatch.setattr(residence, "is_shared", lambda path: True)
    elif unknown == "newer":
        with other.connect() as db:
            db.execute("PRAGMA user_version=1000")
    elif unknown == "unreadable":
        other.path.write_bytes(b"?" * 4096)
    elif unknown == "damaged record":
        record.write_bytes(record.read_bytes()[:20])
    else:
        facts = json.loads(record.read_text())
        record.write_text(json.dumps(facts | {"inode": facts["inode"] + 1}))
    for names in (["old_stores"], ["latents"], []):
        with pytest.raises(StateError, match="cannot be seen from here; if it is gone, delete"):
            clear(store, names)
    assert {cache.name: cache.files for cache in list_caches(store)}["old_stores"] == 0
    assert old.exists()
    clear(store, ["detection"])
    assert clear(store, ["old_stores"], force=True).files
    assert not old.exists()


def test_a_state_directory_that_was_deleted_is_forgotten(
    bucket: Objects, store: Store, tmp_path: Path
) -> None:
    bucket.objects = cats(1)
    url = url_of(bucket)
    old = fetch(url)
    other, _ = _neighbor(tmp_path / "other", State.STOPPED, url)
    bucket.objects["cats/0.txt"] = b"another"
    fetch(url)
    shutil.rmtree(other.home)
    clear(store, ["old_stores"])
    assert not old.exists()
    assert not list((cache_home() / "state_directories").iterdir())


def test_a_state_directory_that_was_made_anew_is_no_other_one(store: Store) -> None:
    home = store.home
    record_home(add_job(store).run_dir)
    aside = home.rename(home.with_name("aside"))  # so that the new one has another inode
    home.mkdir()
    shutil.rmtree(aside)
    clear(Store(home), ["latents"])
    assert not list((cache_home() / "state_directories").iterdir())


def test_a_killed_clearing_leaves_no_half_copy(bucket: Objects, store: Store) -> None:
    bucket.objects = cats(1)
    url = url_of(bucket)
    first = fetch(url)
    bucket.objects["cats/0.txt"] = b"another"
    second = fetch(url)
    whole = tree_of(second)
    for last in itertools.count(1):
        with killed_at(last, url.root, (os, "replace"), (Path, "unlink")) as killed:
            clear(store, ["old_stores"])
        if not killed:
            break
        assert not url.has(first.parent.name) or last == 1
        assert tree_of(second) == whole
    assert last > 1
    assert sorted(path.name for path in url.root.glob("snapshots/*")) == [second.parent.name]
    assert len(list(url.root.glob("objects/*/*"))) == len(whole)
    assert tree_of(second) == whole
    with open(url.root / "lock", "a") as lock:
        assert file_lock.acquire(lock)
        bucket.objects["cats/0.txt"] = b"a third"
        assert stores.delete_outdated(url.root, ()) == [], "a fetch is under way"


@pytest.mark.slow
def test_killed_at_any_change_of_the_disk(bucket: Objects) -> None:
    """The copy is then whole or none, and what was fetched is not fetched again."""
    bucket.objects = {key: value for key, value in cats(1).items() if key[-3:] in ("png", "txt")}
    del bucket.objects["cats/.hidden.png"]
    url, size = url_of(bucket), sum(map(len, bucket.objects.values()))
    changes = ((os, "fsync"), (os, "replace"), (Path, "symlink_to"))
    for last in itertools.count(1):
        shutil.rmtree(url.root, ignore_errors=True)
        before = bucket.sent
        with killed_at(last, url.root, *changes) as killed:
            fetch(url)
        folder = url.find()
        assert folder is None or tree_of(folder) == bucket.objects
        assert tree_of(fetch(url)) == bucket.objects
        assert bucket.sent - before == size
        if not killed:
            break
    assert last > 10


@pytest.mark.slow
def test_a_job_waits_for_its_dataset_and_starts(
    bucket: Objects,
    store: Store,
    job_values: dict[str, Any],
    started: list[int],
    no_gpus: None,
) -> None:
    bucket.objects = cats()
    url = url_of(bucket)
    spec = load_spec(None, job_values | {"dataset": str(url)})
    sizes = ask_sizes(find_missing(spec))
    data = sum(len(bucket.objects[f"cats/{n}.{end}"]) for n in range(3) for end in ("png", "txt"))
    assert sizes == {url: data}
    assert question(sizes).startswith(f"{url} is not on this machine: fetch ")
    job = service.carry_out(store, plan_submit(store, spec, list(sizes)))
    assert job.reason == "waiting for its dataset: listing its files"

    def starts() -> bool:
        service.refresh(store)
        return store.get(job.id).state is State.STARTING

    eventually(starts, told=lambda: store.get(job.id))
    assert started == [job.id]
    assert url.find() is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_fetch_continues_within_its_objects(bucket: Objects, seed: int) -> None:
    """Killed at random moments, while ranges of 2 MiB are under way; what was synced is kept."""
    draws = random.Random(seed)
    bucket.objects = {f"cats/{n}.tar": draws.randbytes(5_000_000 + n) for n in range(3)}
    url = url_of(bucket)

    def whole_bytes() -> int:
        return sum(min(2 << 20, len(bucket.objects[key]) - begin) for key, begin in [*bucket.whole])

    for stop in sorted(draws.sample(range(1, 14_000_000), 3)):
        bucket.held_from = stop
        fetches.start(url)
        eventually(lambda: bucket.held)
        # All ranges that were sent to their end get to the disk; the others are held.
        eventually(lambda: stores.bytes_there(url) == whole_bytes())
        now = fetches.look_at(url)
        assert now is not None
        os.kill(now.pid, signal.SIGKILL)
        eventually(lambda: not fetches.is_under_way(url))
        bucket.drop_held()
        assert url.find() is None
    fetches.start(url)
    ended = fetches.wait(url, lambda now: None, every=0.02)
    assert ended.state == "done", ended
    folder = url.find()
    assert folder is not None
    assert tree_of(folder) == bucket.objects
    assert set(bucket.whole.values()) == {1}
    facts = json.loads(url.listing_file(folder.parent.name).read_text())
    assert {path: size for path, (size, _) in facts["objects"].items()} == {
        f"{n}.tar": 5_000_000 + n for n in range(3)
    }
