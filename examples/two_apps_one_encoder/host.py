"""A separate host for the demo: folders, sockets and processes that meet no other user's.

Everything lives below one temporary folder. Each process that the demo starts, and each that
those start (the store, which belongs to no engine), inherits that folder in its environment;
by it the last of them is found and ended, however the demo ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from checkpoints import DTYPE, App

from cornplug.config import STORE_PROTOCOL, StoreConfig
from cornplug.store.client import PoolStore
from cornplug.store.stats.store_stats import StoreStat
from devkit.engines import EncoderProcess, VllmServer

_ENGINE_FLAGS: Final = ("--dtype", DTYPE, "--max-model-len", "2048", "--block-size", "32", "--seed", "0")
# On a busy machine an answer may come late. Engines and service would then do without: the same
# answers, but not the counts that the demo is there to show. So they wait longer here.
_STORE_TIMEOUT_S: Final = 5
_SHARING_FLAGS: Final = (
    *("--kv-connector", "cornplug", "--cornplug-store-size", str(1 << 30)),
    *("--cornplug-store-deadline", str(_STORE_TIMEOUT_S), "--cornplug-encoder-deadline", "60"),
)
_STARTING_S: Final = 300.0


class Engine(VllmServer):
    """`vllm serve` of one app."""

    def __init__(self, app: App, *args: str, log: Path) -> None:
        super().__init__(app.model, *_ENGINE_FLAGS, *args, log=log, ready_s=_STARTING_S)
        self.app = app


class Host:
    """The private folder and its processes. A context manager: exit ends and removes it all."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cornplug-demo-"))
        self.keep = False
        """Leave the folder, with its logs, when the demo ends."""
        self._run = self.folder / "run"
        self.store_socket = self._run / "cornplug" / f"store-{STORE_PROTOCOL}.sock"
        self.encoder_socket = self._run / "cornplug" / "encoder.sock"

    def __enter__(self) -> Self:
        # A user's own settings could name a user's own store.
        for name in [name for name in os.environ if name.startswith("CORNPLUG_")]:
            del os.environ[name]
        self._run.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(self._run)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        os.environ["CORNPLUG_STORE_BACKGROUND_TIMEOUT_S"] = str(_STORE_TIMEOUT_S)
        # These models are so small that computing is mostly cheaper: the demo shows the sharing.
        os.environ["CORNPLUG_STORE_LOAD_WHEN"] = "always"
        os.environ["CORNPLUG_ENCODER_DEADLINE_FLOOR_S"] = "60"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not stop the one thing that is left to do.
        before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
        end_all(self.folder)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)

    def engines(self, stack: ExitStack, apps: Sequence[App], *, shared: bool) -> list[Engine]:
        """Start engines side by side and wait until each serves.

        Raises ProcessFailed when one ends or is not ready in time.
        """
        side = "shared" if shared else "stock"
        engines = []
        for app in apps:
            flags = [*_SHARING_FLAGS, "--cornplug-app", app.name] if shared else []
            log = self.folder / "logs" / f"{app.name}-{side}-{time.time_ns()}.log"
            engine = Engine(app, *flags, log=log)
            stack.callback(engine.stop)
            engine.spawn()
            engines.append(engine)
        while not all(engine.serves() for engine in engines):
            time.sleep(0.2)
        return engines

    def encoder(self, apps: Sequence[App]) -> EncoderProcess:
        """`cornplug encoder` for all apps' models."""
        models = [app.model for app in apps]
        log = self.folder / "logs" / "encoder.log"
        # As many as vLLM gives itself here: one core is for the other processes that have to answer.
        threads = ("--threads", str(max(1, len(os.sched_getaffinity(0)) - 1)))
        return EncoderProcess(models, *threads, socket=self.encoder_socket, dtype=DTYPE, log=log)

    def store_pid(self) -> int | None:
        """Process id of the store that answers at the demo's socket, None when none does."""
        with socket.socket(socket.AF_UNIX) as s:
            if s.connect_ex(str(self.store_socket)) != 0:
                return None
            pid: int = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return pid

    def store_stat(self) -> StoreStat:
        """Size and content of the store. Raises StoreUnavailable when it does not answer."""
        store = PoolStore(StoreConfig(socket=self.store_socket), autostart=False)
        try:
            return store.stat(deadline_s=5)
        finally:
            store.close()


def end_all(folder: Path) -> None:
    """End every process that carries `folder` in its environment or command line.

    SIGTERM first; SIGKILL after five seconds. Looks twice before it believes that none is
    left: a store may just be between fork and exec.
    """
    mark = os.fsencode(folder)
    kill_at = time.monotonic() + 5
    clean = 0
    while clean < 2:
        late = time.monotonic() > kill_at
        found = _carrying(mark)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            except ProcessLookupError:
                continue
        clean = 0 if found else clean + 1
        time.sleep(0.1)


def _carrying(mark: bytes) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # A zombie's both are empty.
            if mark in (entry / "environ").read_bytes() or mark in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return pids
