"""Helpers for ports, GPUs, proxies and TLS of this host, used by launchers, profilers and tests."""

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

A server binds its port only seconds after the port was chosen. In the meantime, an outgoing connection of any
process could use a port in Linux's range.
"""


_PROXY_VARIABLES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"})
"""Environment variables, in lower case, that set the proxy of HTTP libraries."""


def free_port(*, extra_ports: int = 0) -> int:
    """Return a TCP port of the loopback address on which no process listens.

    Args:
        extra_ports: Number of additional ports above the returned port that the server uses. They are also
            below the range for outgoing connections.
    """
    for port in random.sample(_PORTS[: len(_PORTS) - extra_ports], 64):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port found between {_PORTS.start} and {_PORTS.stop - 1}")


def reachable_address(host: str) -> str:
    """Return the address at which processes on this host can reach a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without proxy variables, for a process that must not use a proxy."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXY_VARIABLES}


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

    Otherwise each httpx client would create its own context, even for plain HTTP, and read the host's
    certificate authorities. On a small machine, this takes 66 ms of CPU time, for example each time a
    starting engine is polled.
    """
    return httpx.create_ssl_context()
