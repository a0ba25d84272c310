"""A separate host for the demo: folders, sockets and processes that no other user shares.

Everything is below one temporary folder. All processes of the demo, and the store that an engine starts,
have that folder in their environment, by which they are found and ended in any case.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cornplug.config import STORE_PROTOCOL, StoreConfig
from cornplug.processes import ManagedProcess
from cornplug.store.client import PoolStore
from devkit.engines import EncoderProcess, EngineServer, VllmServer
from devkit.sglang_engine import SglangServer

DTYPE: Final = "float32"
"""Dtype of weights and engines: answers can then be compared token by token."""
_THREADS: Final = max(1, len(os.sched_getaffinity(0)) // 2)
"""Compute threads of each engine and of the encoder service. The other cores are for their helpers."""
_VLLM_FLAGS: Final = ("--dtype", DTYPE, "--max-model-len", "2048", "--max-num-batched-tokens", "2048")
_SGLANG_FLAGS: Final = ("--dtype", DTYPE, "--max-total-tokens", "8192", "--chunked-prefill-size", "2048")
# On a busy machine answers come late. An engine would then compute by itself, and the demo would show that.
_PATIENT: Final = ("--cornplug-store-deadline", "2", "--cornplug-encoder-deadline", "120")
_STARTING_S: Final = 400.0
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": str(_THREADS),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "CORNPLUG_STORE_LOAD_WHEN": "always",
}


class Host:
    """The private folder and its processes. A context manager: exit ends and removes everything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cornplug-demo-"))
        self.keep = False
        """Leave the folder, with its logs, when the demo ends."""
        self._run = self.folder / "run"
        self.store_socket = self._run / f"store-{STORE_PROTOCOL}.sock"
        self.encoder_socket = self._run / "encoder.sock"

    def __enter__(self) -> Self:
        # A user's own settings could name a user's own store.
        for name in [name for name in os.environ if name.startswith("CORNPLUG_")]:
            del os.environ[name]
        self._run.mkdir(mode=0o700)
        os.environ["CORNPLUG_RUNTIME_DIR"] = str(self._run)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        os.environ.update(_ENVIRONMENT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not stop the clean-up.
        before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
        end_all(self.folder)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)

    def engine(self, name: str, model: Path, *, sglang: bool = False, app: str = "") -> EngineServer:
        """An engine, not started. With `app` it uses cornplug under that name."""
        log = self.folder / "logs" / f"{name}.log"
        shared = ("--cornplug-app", app, "--cornplug-store-size", str(1 << 30), *_PATIENT) if app else ()
        if sglang:
            flags = (*_SGLANG_FLAGS, *(("--enable-cornplug", *shared) if app else ()))
            return SglangServer(model, *flags, log=log, env=_ENVIRONMENT, ready_s=_STARTING_S)
        flags = (*_VLLM_FLAGS, *(("--kv-connector", "cornplug", *shared) if app else ()))
        return VllmServer(model, *flags, log=log, env=_ENVIRONMENT, ready_s=_STARTING_S)

    def encoder(self, models: Sequence[Path]) -> EncoderProcess:
        """`cornplug encoder` for these models, not started."""
        log = self.folder / "logs" / "encoder.log"
        threads = ("--threads", str(_THREADS))
        return EncoderProcess(
            models, *threads, socket=self.encoder_socket, dtype=DTYPE, log=log, ready_s=_STARTING_S
        )

    def store_pid(self) -> int | None:
        """Process id of the store that answers at the demo's socket; None if none does."""
        with socket.socket(socket.AF_UNIX) as s:
            if s.connect_ex(str(self.store_socket)) != 0:
                return None
            pid: int = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return pid

    def wait_saved(self, quiet_s: float = 0.6, longest_s: float = 30) -> int:
        """Wait until nobody has written to the store for `quiet_s`. Returns its number of entries."""
        store = PoolStore(StoreConfig(socket=self.store_socket), autostart=False)
        try:
            end, entries, since = time.monotonic() + longest_s, -1, time.monotonic()
            while (now := time.monotonic()) < end and now - since < quiet_s:
                stat = store.stat(deadline_s=5)
                if stat.entries != entries or stat.reservations:
                    entries, since = stat.entries, now
                time.sleep(0.05)
            return entries
        finally:
            store.close()


def start(processes: Mapping[str, ManagedProcess]) -> None:
    """Start processes side by side and wait until each serves. Raises ProcessFailed."""
    for process in processes.values():
        process.spawn()
    while not all(process.check_ready() for process in processes.values()):
        time.sleep(0.2)


def end_all(folder: Path) -> None:
    """End every process that has `folder` in its environment or command line.

    SIGTERM first; SIGKILL after five seconds. A store may just be between fork and exec, so the processes
    are listed until two lists in a row are empty.
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
            # Both are empty for a zombie.
            if mark in (entry / "environ").read_bytes() or mark in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return pids
