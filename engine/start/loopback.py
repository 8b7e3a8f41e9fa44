"""A rendezvous for the ranks of one machine that other machines cannot reach.

Torch's store, which ranks use to find each other without a password, listens on every network
interface regardless of its address (torch 2.13, all of its own backends). It accepts an existing
listening socket, though, so pass it one on the loopback interface. This is only for jobs on one
machine.
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
_WAITS: Final = timedelta(minutes=15)  # same as torch's default


class Loopback(RendezvousHandler):
    """The rendezvous of a single agent.

    Args:
        run_id: Torch elastic's name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the backend's name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use the agent's store instead of creating their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, created on first use, for the only agent."""
        if self._store is None:
            self._store = listen()
        where = RendezvousStoreInfo(_HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Return False: it is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing, since no other agent can join."""

    def num_nodes_waiting(self) -> int:
        """Return 0, since there are no other agents."""
        return 0

    def get_run_id(self) -> str:
        """Return torch elastic's name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True, since there is nothing to shut down."""
        return True


def listen() -> TCPStore:
    """Return a store on a free port that only this machine's processes can connect to."""
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
        listening.detach()  # the store owns it now
    return store


def _create(parameters: RendezvousParameters) -> Loopback:
    return Loopback(parameters.run_id)


def register() -> None:
    """Register the rendezvous with torch elastic, as `--rdzv_backend=loopback`."""
    rendezvous_handler_registry.register(BACKEND, _create)
