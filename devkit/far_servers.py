"""A far store's server on this host, for tests, benchmarks and the soak."""

from __future__ import annotations

import contextlib
import shutil
import socket
from pathlib import Path

from cornplug.host import free_port
from cornplug.processes import ManagedProcess


def redis_program() -> str | None:
    """The installed Valkey or Redis server; None where there is none. script/setup installs one."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


class RedisServer(ManagedProcess):
    """A Valkey or Redis server without persistence; one that was killed starts empty.

    Args:
        program: As `redis_program`'s.
        port: None: a free one.
        most_bytes: What it keeps, the entries used last; 0: all.
    """

    def __init__(self, program: str, folder: Path, *, port: int | None = None, most_bytes: int = 0) -> None:
        self.port = free_port() if port is None else port
        self.url = f"valkey://127.0.0.1:{self.port}/0"
        command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        if most_bytes:
            command += ["--maxmemory", str(most_bytes), "--maxmemory-policy", "allkeys-lru"]
        super().__init__(command, log=folder / "redis.log")

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
            s.sendall(b"PING\r\n")
            return s.recv(16).startswith(b"+PONG")
        return False
