"""Facts of this host that launchers, profilers and tests ask for."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import socket
import ssl
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Final

import httpx

_PORTS: Final = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections (`ip_local_port_range`): such a connection, of any
process, could have the port by the time that a server binds it, seconds later."""


_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"})
"""Variables, in lower case, by which HTTP libraries find a proxy."""


def free_port(*, room: int = 0) -> int:
    """A TCP port of the loopback address on which no process listens now.

    `room`: ports above it that a server takes besides; no outgoing connection gets one of them either.
    """
    for port in random.sample(_PORTS[: len(_PORTS) - room], 64):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port was found in {_PORTS.start} to {_PORTS.stop - 1}")


def reachable(host: str) -> str:
    """The address by which this host's processes reach a server that listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that talks to configured services only: no proxy stands before them."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES}


@cache
def has_gpu() -> bool:
    """Whether the NVIDIA driver names a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.startswith("GPU")


@cache
def tls_context() -> ssl.SSLContext:
    """The TLS context of this process's HTTP clients, httpx's own.

    A client without one makes its own, for plain HTTP too, and reads the host's list of authorities for it:
    66 ms of CPU on a small machine, at each poll of a starting engine.
    """
    return httpx.create_ssl_context()
