"""A pid namespace, which is what a container is to its processes."""

from __future__ import annotations

import shutil
import subprocess
from typing import Final

CONTAINER: Final = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
"""Before a command: it becomes the first process of a namespace of its own."""


def has_namespaces() -> bool:
    """Whether this user may make one."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0
