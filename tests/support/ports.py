"""A port for a server that has to be told which."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Final

# Below those that the kernel hands out, which anyone may get before it is bound (ip(7)).
_PORTS: Final = range(10_000, 32_768)


def free_port() -> int:
    """Where nobody listens on the loopback."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
