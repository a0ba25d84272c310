"""Helpers about this host for launchers, profilers and tests: ports, GPUs, proxies, TLS."""

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
"""Ports below the range that Linux uses for outgoing connections (`ip_local_port_range`).

A server binds its port seconds after it was chosen. In the meantime, an outgoing connection of any process
could take a port from that range.
"""


_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"})
"""Environment variables, in lower case, that set the proxy of HTTP libraries."""


def free_port(*, room: int = 0) -> int:
    """Return a TCP port of the loopback address on which no process listens.

    Args:
        room: Number of further ports above it that the server uses. They are below the range for outgoing
            connections too.
    """
    for port in random.sample(_PORTS[: len(_PORTS) - room], 64):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port found between {_PORTS.start} and {_PORTS.stop - 1}")


def reachable(host: str) -> str:
    """Return the address at which processes of this host reach a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without proxy variables, for a process that uses only configured services."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES}


@cache
def has_gpu() -> bool:
    """Return whether the NVIDIA driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.startswith("GPU")


@cache
def tls_context() -> ssl.SSLContext:
    """Return a TLS context that all HTTP clients of this process share.

    Otherwise each httpx client creates its own context, even for plain HTTP, and reads the host's certificate
    authorities. That takes 66 ms of CPU time on a small machine, for each poll of a starting engine.
    """
    return httpx.create_ssl_context()
