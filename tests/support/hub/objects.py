"""An object store on this machine: an index of links, objects by range, versions, cuts.

fsspec reads it as it reads any server of files, so what a fetch goes through is real.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

_PIECE = 1 << 14


@dataclass
class Objects:
    """What the store has, and how it behaves.

    Attributes:
        url: The address of its bucket.
        objects: Key → content.
        cuts: Draws whether a connection is cut and where; None never cuts.
        down: Statuses to answer the next requests with.
        tagged: Whether it says which version of an object it has.
        refused: The status of every request; 0 for none.
        on_range: Called with the key and the first byte of each range before it is sent.
        whole: Key and first byte → how often this range was sent to its end.
        sent: Bytes of objects sent.
        held_from: Sending waits once this many bytes are sent, until `drop_held`.
        held: Whether it waits.
    """

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict, repr=False)
    cuts: random.Random | None = None
    down: list[int] = field(default_factory=list)
    tagged: bool = True
    refused: int = 0
    on_range: Callable[[str, int], None] = lambda key, begin: None
    whole: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: int = 0
    held_from: float = math.inf
    held: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _going: threading.Event = field(default_factory=threading.Event)

    def may_go_on(self) -> bool:
        """Wait while sending is held; return whether the answer is to be continued."""
        if self.sent < self.held_from:
            return True
        with self.lock:
            self.held, going = True, self._going
        going.wait()
        return False

    def drop_held(self) -> None:
        """Drop the connections that wait; send to new ones without end."""
        with self.lock:
            self.held, self.held_from = False, math.inf
            going, self._going = self._going, threading.Event()
        going.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Objects

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        store = self.store
        path = unquote(self.path.partition("?")[0]).removeprefix("/bucket/")
        with store.lock:
            status = store.refused or (store.down.pop(0) if store.down else 0)
            cut = store.cuts.random() if store.cuts and self.command == "GET" else 1.0
        if status:
            self._answer(status)
        elif path in store.objects:
            self._send(path, store.objects[path], cut)
        elif names := self._names(path.rstrip("/")):
            links = [f'<a href="{quote(name)}">{name}</a>' for name in ("../", *names)]
            self._answer(200, "".join(['<a href="?C=N;O=D">Name</a>', *links]).encode())
        else:
            self._answer(404)

    def _names(self, folder: str) -> list[str]:
        """What an index of this folder links to, folders with a slash."""
        inside = [
            key.removeprefix(f"{folder}/")
            for key in self.store.objects
            if key.startswith(f"{folder}/")
        ]
        return sorted({name.partition("/")[0] + "/" * ("/" in name) for name in inside})

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, key: str, content: bytes, cut: float) -> None:
        store, begin, end = self.store, 0, len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match:
            begin, end = int(match[1]), int(match[2]) + 1
            store.on_range(key, begin)
        self.send_response(206 if match else 200)
        if store.tagged:
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        until = end
        if cut < 0.3:
            until = begin + int((end - begin) * cut / 0.3)
            self.close_connection = True
        for at in range(begin, until, _PIECE):
            if not store.may_go_on():
                self.close_connection = True
                return
            piece = content[at : min(at + _PIECE, until)]
            self.wfile.write(piece)
            with store.lock:
                store.sent += len(piece)
        if until == end:
            with store.lock:
                store.whole[key, begin] += 1


@contextmanager
def serve_objects() -> Iterator[Objects]:
    """A store on a free port, until the end of the block."""
    store = Objects()
    handler = type("BoundHandler", (_Handler,), {"store": store})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        store.url = f"http://127.0.0.1:{server.server_address[1]}/bucket"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield store
        finally:
            store.drop_held()
            server.shutdown()
            thread.join()
