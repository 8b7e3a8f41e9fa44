"""A rank that says what it and its launcher listen on, for `tests/engine/start`."""

from __future__ import annotations

import os

import psutil
import torch
import torch.distributed as dist


def main() -> None:
    """Look once all ranks have talked with each other."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.new_group()
    dist.barrier()
    # In one piece: `print` writes each word by itself, and another rank may come between.
    for process in (psutil.Process(), launcher()):
        for one in process.net_connections():
            if one.status == psutil.CONN_LISTEN:
                os.write(1, f"LISTENS {one.laddr.ip}\n".encode())
    os.write(1, f"ADDRESS {os.environ['MASTER_ADDR']}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


def launcher() -> psutil.Process:
    """Whose store the ranks have met at. It need not be their parent; see `tests.support.forks`."""
    port = int(os.environ["MASTER_PORT"])
    return next(
        psutil.Process(one.pid)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    )


if __name__ == "__main__":
    main()
