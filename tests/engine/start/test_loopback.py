"""What ranks of one machine listen on: nobody from elsewhere can connect to it."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest
from torch.distributed import TCPStore

from engine.start.loopback import Loopback
from jobs.launch import loopback_variables
from tests.support.paths import ROOT


def test_the_store_is_of_this_machine_alone_and_the_same_each_time() -> None:
    one = Loopback("run")
    first, again = one.next_rendezvous(), one.next_rendezvous()
    info = first.bootstrap_store_info
    assert (first.rank, first.world_size, info.master_addr) == (0, 1, "127.0.0.1")
    assert again.bootstrap_store_info == info
    listening = [
        found.laddr.ip
        for found in psutil.Process().net_connections()
        if found.status == psutil.CONN_LISTEN and found.laddr.port == info.master_port
    ]
    assert listening == ["127.0.0.1"]
    rank = TCPStore("127.0.0.1", info.master_port, None, is_master=False)
    rank.set("said", "yes")
    assert rank.get("said") == b"yes"


def test_a_persons_own_interface_stays() -> None:
    assert loopback_variables({}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert loopback_variables({"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
def test_torchs_own_backends_listen_everywhere_still_and_ours_does_not(forked: str) -> None:
    said = {}
    for name, more in {"ours": [], "theirs": ["--rdzv_backend=static"]}.items():
        words = [
            forked,
            "-m",
            "engine.start.accelerate",
            "launch",
            "--num_processes=2",
            "--num_machines=1",
            "--main_process_port=0",
            "--multi_gpu",
            "--mixed_precision=no",
            "--dynamo_backend=no",
            *more,
            "-m",
            "tests.support.engine.ranks.listening",
        ]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            words, env=environment | loopback_variables({}), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said[name] = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert said["ours"] == {("LISTENS", "127.0.0.1"), ("ADDRESS", "127.0.0.1")}
    assert said["theirs"] - said["ours"], "torch has mended it: engine.start.loopback can go"
