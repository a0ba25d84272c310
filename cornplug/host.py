"""Facts of this host that launchers, profilers and tests ask for."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import socket
import subprocess
from functools import cache
from typing import Final

_PORTS: Final = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections (`ip_local_port_range`): such a connection, of any
process, could have the port by the time that a server binds it, seconds later."""


def free_port() -> int:
    """A TCP port of the loopback address on which no process listens now."""
    for port in random.sample(_PORTS, 64):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port was found in {_PORTS.start} to {_PORTS.stop - 1}")


@cache
def has_gpu() -> bool:
    """Whether the NVIDIA driver names a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.startswith("GPU")
