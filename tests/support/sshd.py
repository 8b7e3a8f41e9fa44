"""A real sshd of this user's own on the loopback, and an `ssh` that knows its boxes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.ports import free_port
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

SSHD: Final = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
_CONFIG: Final = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host_key
AuthorizedKeysFile {root}/key.pub
PidFile {root}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
MaxStartups 100
"""
_ALIASES: Final = """\
Host *
  HostName 127.0.0.1
  Port {port}
  IdentityFile {root}/key
  IdentitiesOnly yes
  UserKnownHostsFile {root}/known_hosts
  StrictHostKeyChecking accept-new
"""


class Sshd:
    """Started by `start`; what runs over it ends with `stop`.

    Attributes:
        root: A folder with a short path, for keys and sockets.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("host_key", "key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True
            )
        self.port = free_port()
        facts = {"root": root, "port": self.port}
        (root / "sshd_config").write_text(_CONFIG.format(**facts), encoding="utf-8")
        (root / "ssh_config").write_text(_ALIASES.format(**facts), encoding="utf-8")
        wrapper = root / "bin" / "ssh"
        wrapper.parent.mkdir()
        real = shutil.which("ssh")
        wrapper.write_text(f'#!/bin/sh\nexec {real} -F {root}/ssh_config "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """In which `ssh NAME` reaches it, whatever the name."""
        return {
            "PATH": f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self.root),
        }

    def start(self) -> None:
        """Let it listen."""
        if os.geteuid() == 0:  # it insists on this folder then
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        assert SSHD is not None
        config = str(self.root / "sshd_config")
        self._process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", config], stderr=subprocess.DEVNULL, start_new_session=True
        )
        eventually(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def sessions(self) -> list[int]:
        """The processes of its connections."""
        assert self._process is not None
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def signal_sessions(self, number: int) -> None:
        """Stop, continue or kill what serves its connections, as a box that hangs or dies."""
        for pid in self.sessions():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End it with all of its connections."""
        if self._process is not None:
            self.signal_sessions(signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            self._process = None
