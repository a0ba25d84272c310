"""Facts of this host that launchers, profilers and tests ask for."""

from __future__ import annotations

import shutil
import socket
import subprocess
from functools import cache


def free_port() -> int:
    """A TCP port of the loopback address on which no process listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


@cache
def has_gpu() -> bool:
    """Whether the NVIDIA driver names a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.startswith("GPU")
