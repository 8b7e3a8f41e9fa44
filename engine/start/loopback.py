"""The rendezvous of one machine's ranks, where nobody else can reach it.

Torch's store, through which ranks find each other and which asks for no password, listens on every
network interface whatever address it is given (torch 2.13, all backends of its own). It takes a
socket that listens already, though: here one of the loopback interface. For jobs on one machine,
and there are no others.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # is documented
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

BACKEND: Final = "loopback"
_HOST: Final = "127.0.0.1"
_WAITS: Final = timedelta(minutes=15)  # as long as torch's own


class Loopback(RendezvousHandler):
    """One agent that need not look for others.

    Args:
        run_id: Torch elastic's name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the agent's store, and make none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, created on first use, for the only agent."""
        if self._store is None:
            self._store = listen()
        where = RendezvousStoreInfo(_HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nobody else would come."""

    def num_nodes_waiting(self) -> int:
        """None."""
        return 0

    def get_run_id(self) -> str:
        """Torch elastic's name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is left to do."""
        return True


def listen() -> TCPStore:
    """Return a store that this machine's processes alone can connect to, on a free port."""
    with socket.socket() as listening:
        listening.bind((_HOST, 0))
        listening.listen(socket.SOMAXCONN)
        port = listening.getsockname()[1]
        store = TCPStore(
            _HOST,
            port,
            None,
            is_master=True,
            timeout=_WAITS,
            wait_for_workers=False,
            master_listen_fd=listening.fileno(),
        )
        listening.detach()  # it is the store's now
    return store


def _create(parameters: RendezvousParameters) -> Loopback:
    return Loopback(parameters.run_id)


def register() -> None:
    """Make it known to torch elastic, as `--rdzv_backend=loopback`."""
    rendezvous_handler_registry.register(BACKEND, _create)
