"""A hub of our own: listings, downloads with ranges, new repositories, LFS uploads, commits.

It holds its repositories in memory, and cuts connections where a test asks for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

_REPO = r"(?P<repo>[^/]+/[^/]+)"
_LARGE = 2048  # bytes from which a file is kept as LFS
_PIECE = 1 << 14
_ASIDE = "/api/agent-harnesses"  # the library asks this once in a process, and not everywhere


@dataclass
class Repo:
    """A repository: each commit is all files at that time."""

    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)
    gated: bool = False
    private: bool = False

    def commit(self, message: str, files: dict[str, bytes]) -> str:
        number = hashlib.sha1(f"{len(self.commits)}{message}".encode()).hexdigest()
        self.commits.append((number, message, files))
        return number

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][2]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1][0], self.files
        return next(((sha, files) for sha, _, files in self.commits if sha == revision), None)


@dataclass
class Hub:
    """What the server has, and how it behaves.

    Attributes:
        url: Its address.
        repos: `models/ORG/NAME` → repository.
        token: The only one that it takes; None lets everybody write.
        cuts: Cuts connections while it draws numbers below `share`; None never does.
        down: Statuses to answer the next requests with.
        requests: Method and path of each.
        sent: Path → bytes of it that were sent.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    token: str | None = None
    cuts: random.Random | None = None
    share: float = 0.3
    down: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    going: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.going.set()

    def hold(self) -> None:
        """Send no more than the beginning of a file until `release`."""
        self.going.clear()

    def release(self) -> None:
        self.going.set()

    def add(self, repo: str, files: dict[str, bytes], kind: str = "models", **more: bool) -> Repo:
        made = self.repos[f"{kind}/{repo}"] = Repo(**more)
        made.commit("first", files)
        return made


def _entry(path: str, content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if len(content) >= _LARGE:
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    # -- answers -----------------------------------------------------------------------------

    def _answer(self, status: int, value: Any = None, **headers: str) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, text: str) -> None:
        self._answer(status, {"error": text}, X_Error_Code=code, X_Error_Message=text)

    def _cut(self) -> bool:
        cuts = self.hub.cuts
        return cuts is not None and cuts.random() < self.hub.share

    def _begin(self) -> str | None:
        """The path to answer, unless the server fails now. Bodies are read first."""
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        if path == _ASIDE:
            self._answer(404)
            return None
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.down:
            self._answer(self.hub.down.pop(0), {"error": "down"})
            return None
        if self._cut():
            self.close_connection = True
            return None
        return path

    def _may(self, repo: Repo, *, write: bool = False) -> bool:
        known = self.hub.token is None or self.headers.get("Authorization") == (
            f"Bearer {self.hub.token}"
        )
        if known:
            return True
        if repo.private:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif write:
            self._refuse(403, "", "you need a token that may write")
        else:
            return not repo.private
        return False

    # -- requests ----------------------------------------------------------------------------

    def do_GET(self) -> None:
        path = self._begin()
        if path is None:
            return
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/auth-check", path):
            if repo := self._find(match[1], match[2]):
                gated = repo.gated and self.headers.get("Authorization") is None
                if gated:
                    self._refuse(403, "GatedRepo", "gated")
                else:
                    self._answer(200, {})
        elif match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path
        ):
            if repo := self._find(match[1], match[2]):
                self._list(repo, match[2], match[3], match[4] or "main")
        elif match := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if repo := self._find(match[1] or "models", match[2]):
                self._send(repo, match[3], match[4])
        elif path == "/api/whoami-v2":
            if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                self._refuse(401, "", "Invalid username or password.")
            else:
                self._answer(200, {"name": "somebody", "type": "user", "orgs": []})
        else:
            self._refuse(404, "", "no such page")

    do_HEAD = do_GET

    def _find(self, kind: str, name: str, *, write: bool = False) -> Repo | None:
        repo = self.hub.repos.get(f"{kind}/{name}")
        if repo is None:
            # As the hub does: who is not logged in is not told what is there.
            status = 401 if self.headers.get("Authorization") is None else 404
            self._refuse(status, "RepoNotFound", "Repository not found")
            return None
        return repo if self._may(repo, write=write) else None

    def _list(self, repo: Repo, name: str, what: str | None, revision: str) -> None:
        found = repo.at(revision)
        if found is None:
            self._refuse(404, "RevisionNotFound", "no such revision")
            return
        commit, files = found
        entries = [_entry(path, content) for path, content in files.items()]
        if what == "tree":
            self._answer(200, entries)
            return
        siblings = [{"rfilename": path} for path in files]
        said = {"id": name, "sha": commit, "siblings": siblings, "tags": []}
        self._answer(200, said | {"private": repo.private})

    def _send(self, repo: Repo, revision: str, path: str) -> None:
        if repo.gated and self.headers.get("Authorization") is None:
            self._refuse(401, "GatedRepo", "gated")
            return
        found = repo.at(revision)
        if found is None or path not in found[1]:
            self._refuse(404, "EntryNotFound" if found else "RevisionNotFound", "not found")
            return
        commit, files = found
        content, entry = files[path], _entry(path, files[path])
        begin = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            begin = int(match[1])
        self.send_response(206 if begin else 200)
        tag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        self.send_header("ETag", f'"{tag}"')
        if "lfs" in entry:
            self.send_header("X-Linked-ETag", f'"{tag}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(content)
        if self._cut() and end - begin > 1:
            assert self.hub.cuts is not None
            end = self.hub.cuts.randrange(begin, end)
            self.close_connection = True
        for at in range(begin, end, _PIECE):
            if at > begin:
                self.hub.going.wait()
            piece = content[at : min(at + _PIECE, end)]
            self.wfile.write(piece)
            self.hub.sent[path] = self.hub.sent.get(path, 0) + len(piece)

    def do_POST(self) -> None:
        path = self._begin()
        if path is None:
            return
        if path == "/api/repos/create":
            self._create(json.loads(self.body))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            if repo := self._find("models", match[1], write=True):
                self._preupload(repo, json.loads(self.body)["files"])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            if self._find("models", match[1], write=True):
                self._batch(json.loads(self.body)["objects"])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            if repo := self._find("models", match[1], write=True):
                self._commit(repo, match[1])
        elif path == "/lfs/verify":
            asked = json.loads(self.body)
            self._answer(200 if asked["oid"] in self.hub.blobs else 404, {})
        else:
            self._refuse(404, "", "no such page")

    def do_PUT(self) -> None:
        path = self._begin()
        if path is None:
            return
        digest = path.removeprefix("/lfs/")
        if hashlib.sha256(self.body).hexdigest() != digest:
            self._refuse(400, "", "the content has another checksum")
            return
        self.hub.blobs[digest] = self.body
        self._answer(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(401, "", "Invalid username or password.")
            return
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        key, url = f"models/{name}", f"{self.hub.url}/{name}"
        if key in self.hub.repos:
            self._answer(409, {"error": "You already created this model repo", "url": url})
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[key] = repo = Repo(private=private)
        repo.commit("initial commit", {})
        self._answer(200, {"url": url, "name": name})

    def _preupload(self, repo: Repo, files: list[dict[str, Any]]) -> None:
        there = {path: _entry(path, content) for path, content in repo.files.items()}
        answer = []
        for file in files:
            entry = there.get(file["path"], {})
            oid = entry["lfs"]["oid"] if "lfs" in entry else entry.get("oid")
            mode = "lfs" if file["size"] >= _LARGE else "regular"
            answer.append(
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        self._answer(200, {"files": answer})

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        answer = []
        for one in objects:
            wanted: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.blobs:
                wanted["actions"] = {
                    "upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"},
                    "verify": {"href": f"{self.hub.url}/lfs/verify"},
                }
            answer.append(wanted)
        self._answer(200, {"transfer": "basic", "objects": answer})

    def _commit(self, repo: Repo, name: str) -> None:
        message, files = "", dict(repo.files)
        for line in self.body.splitlines():
            one = json.loads(line)
            value = one["value"]
            match one["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.blobs[value["oid"]]
                case "deletedFile":
                    files.pop(value["path"], None)
        commit = repo.commit(message, files)
        if self._cut():  # done, and nobody is told
            self.close_connection = True
            return
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._answer(200, {"commitUrl": url, "commitOid": commit, "success": True})


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub on a free port, until the end of the block."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
