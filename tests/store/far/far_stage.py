"""A host with a daemon, Mooncake's master, and a client of a Redis or Valkey server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from valkey import Valkey

from cornplug.config import StoreConfig
from cornplug.host import free_port
from cornplug.processes import ManagedProcess
from cornplug.store.client import PoolStore
from cornplug.store.far.open_far import label_of
from cornplug.store.store_stats import FarStat
from cornplug.testing.store import DEADLINE_S
from devkit.far_servers import RedisServer

from ..conftest import answers, eventually


class Host:
    """A daemon with far stores, as a process, and a client of it.

    Args:
        answer: Wait until the far stores answer.
        inside: A command that runs the daemon's command, in namespaces for example.
    """

    def __init__(
        self,
        folder: Path,
        urls: Sequence[str],
        secret: bytes,
        size_bytes: int,
        *,
        answer: bool = True,
        inside: Sequence[str] = (),
    ) -> None:
        self._urls, self._folder, self._size_bytes = urls, folder, size_bytes
        secret_file = folder / "secret"
        secret_file.write_bytes(secret)
        secret_file.chmod(0o600)
        self.config = StoreConfig(
            socket=folder / "s.sock", size_bytes=size_bytes, secret_file=secret_file, autostart=False
        )
        command = [*inside, sys.executable, "-m", "cornplug.store.daemon.main", "--size", str(size_bytes)]
        command += ["--socket", str(self.config.socket), "--secret-file", str(secret_file)]
        for url in urls:
            command += ["--far", url]
        self.daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        eventually(lambda: self.daemon.poll() is not None or answers(self.config.socket))
        self.store = PoolStore(self.config, connect_timeout_s=10)
        eventually(lambda: self.store.is_connected)
        if answer:
            eventually(lambda: all(self.far(number).answers for number in range(len(urls))))

    def far(self, number: int = 0) -> FarStat:
        """The counts of one of its far stores."""
        found: dict[str, FarStat] = self.store.stat(deadline_s=DEADLINE_S).far
        return found[label_of(self._urls[number])]

    def written(self, entries: int) -> bool:
        """Whether so many entries are there by this host, and none waits."""
        far = self.far()
        return (far.writes.get("written", 0), far.queued) == (entries, 0)

    def end(self) -> None:
        self.store.close()
        if self.daemon.poll() is None:
            self.daemon.terminate()
        self.daemon.communicate(timeout=30)


def answers_at(port: int) -> bool:
    """Whether a server of this host takes connections at a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class MooncakeMaster(ManagedProcess):
    """A master on this host; the daemons of the URL give its memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}?segment=64MiB"
        command = [sys.executable, "-m", "mooncake.cli", f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"]
        command += [f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1", "--client_ttl=2"]
        super().__init__(command, log=folder / "mooncake.log")

    def is_ready(self) -> bool:
        return answers_at(self.port)


def client_of(redis: RedisServer) -> Valkey:
    return Valkey(port=redis.port, socket_timeout=5)


class SlowWire:
    """A way to a server that passes on what clients send only after `delay_s`."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port, self._delay_s = port, delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for source, sink, delay_s in ((client, server, self._delay_s), (server, client, 0.0)):
                    threading.Thread(target=self._pass_on, args=(source, sink, delay_s), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, delay_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
