"""Executor that runs batches in another process, and restarts the process when it ends.

    starting ─ReplicaReady─> ready ─the process ends, or hangs─> lost ─backoff─> starting

When the process ends, `run` raises `ReplicaLost` immediately for the batches in the process, and the
dispatcher runs them on another replica.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.encoder_service.execution.executor import BatchResult, EncodeBatch
from cornplug.encoder_service.models.loader import LoadedModel
from cornplug.encoder_service.replicas import ipc
from cornplug.encoder_service.replicas.process import RUN_S, START_S, ReplicaProcess
from cornplug.errors import CheckpointError, ReplicaLost

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 30.0
_STEADY_S: Final = 60.0
"""Run time in seconds after which the pause before the next restart is reset to the shortest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings with which all replicas of a service start. Each replica has its own device."""

    dtype: str
    threads: int
    """Number of torch threads of each replica."""
    compile: bool = False


class ReplicaExecutor:
    """Executor that runs batches in another process, which is restarted when it ends."""

    def __init__(self, device: str, settings: ReplicaSettings) -> None:
        self.device: Final = device
        self.uncompiled = 0
        """Number of towers that the process could not compile."""
        self.problem = ""
        """Reason why the replica is not ready or lacks a model, or "" if it has all models and is ready."""
        self.ends: Counter[str] = Counter()
        """Number of times that the process ended unexpectedly, by reason: "died", "not_loaded",
        "not_started"."""
        self._settings = settings
        self._lock = threading.Lock()  # guards the control socket and the fields below
        self._models: dict[bytes, ipc.ModelSpec] = {}
        self._process: ReplicaProcess | None = None
        self._ready = threading.Event()
        self._attempted = threading.Event()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(
            target=self._supervise, name=f"cornplug-replica-{device}", daemon=True
        )

    @property
    def lanes(self) -> int:
        return 2 if self.device.startswith("cuda") else 1

    @property
    def pid(self) -> int | None:
        """Id of the process, or None if no process is running."""
        process = self._process
        return None if process is None else process.popen.pid

    def start(self, models: Sequence[LoadedModel]) -> None:
        """Start the process, which loads the models, without waiting for it."""
        self._models = {model.identity: model for model in map(_model, models)}
        self._supervisor.start()

    def wait_started(self) -> None:
        """Wait until the first process is ready. Raises CheckpointError if it cannot load every model."""
        if not self._attempted.wait(START_S) or not self._ready.is_set() or self.problem:
            raise CheckpointError(f"replica on {self.device}: {self.problem}", reason="replica")

    def ready(self) -> bool:
        return self._ready.is_set()

    def wait_ready(self, timeout_s: float) -> bool:
        return self._ready.wait(timeout_s)

    def run(self, batch: EncodeBatch) -> BatchResult:
        process = self._process
        if process is None or not self._ready.is_set():
            raise ReplicaLost(f"replica on {self.device}: {self.problem}")
        try:
            channel = process.idle.get(timeout=RUN_S)
        except queue.Empty:
            raise ReplicaLost(f"replica on {self.device}: busy for {RUN_S:g} s") from None
        if channel is None:
            process.idle.put(None)
            raise ReplicaLost(f"replica on {self.device}: {self.problem}")
        try:
            result, self.uncompiled = channel.run(batch)
        except OSError as e:
            # This thread may notice before the supervisor does. Kill the process, because it may only hang.
            self._ready.clear()
            process.popen.kill()
            raise ReplicaLost(f"replica on {self.device} was lost: {e}") from e
        finally:
            process.idle.put(channel)
        return result

    def load(self, models: Sequence[LoadedModel]) -> None:
        new = tuple(map(_model, models))
        with self._lock:
            answer = self._ask(ipc.LoadModel(new))
            problem = (
                answer.message if isinstance(answer, ipc.ReplicaFailed) else answer.problem if answer else ""
            )
            if problem:
                self._ask(ipc.DropModel(tuple(m.identity for m in new if m.identity not in self._models)))
                raise CheckpointError(f"replica on {self.device}: {problem}", reason="replica")
            # A process that is not ready now loads these models when it starts.
            self._models |= {model.identity: model for model in new}

    def drop(self, models: Sequence[LoadedModel]) -> None:
        with self._lock:
            gone = tuple(loaded.served.identity for loaded in models)
            self._models = {k: v for k, v in self._models.items() if k not in gone}
            self._ask(ipc.DropModel(gone))

    def close(self) -> None:
        self._closing.set()
        process = self._process
        if process is not None:
            process.popen.kill()
        if self._supervisor.is_alive():
            self._supervisor.join()

    def _ask(self, message: ipc.LoadModel | ipc.DropModel) -> ipc.FromReplica | None:
        """Send a control message to the process. Return the reply, or None if the process is not ready or
        does not reply."""
        process = self._process
        if process is None or not self._ready.is_set():
            return None
        try:
            return process.ask(message)
        except OSError as e:
            log.warning("replica on %s does not reply: %s", self.device, e)
            self._ready.clear()
            process.popen.kill()
            return None

    def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            reason = self._run_process()
            self._attempted.set()
            if self._closing.is_set():
                return
            steady = time.monotonic() - began > _STEADY_S
            pause_s = _FIRST_PAUSE_S if steady else min(2 * pause_s, _LONGEST_PAUSE_S)
            log.error("replica on %s: %s; restarting it in %g s", self.device, self.problem, pause_s)
            self.ends[reason] += 1
            self._closing.wait(pause_s)

    def _run_process(self) -> str:
        """Start a process and wait until it ends. Return the reason why it ended, as a key of `ends`."""
        try:
            # Create one extra lane for urgent batches, which run between the layers of other batches.
            process = ReplicaProcess(self.lanes + 1)
        except OSError as e:
            self.problem = f"cannot start a process: {e}"
            return "not_started"
        with self._lock:
            self._process = process
            opened = self._open(process)
            if opened:
                self._ready.set()
        if opened:
            self._attempted.set()
            self.problem = _exit_reason(process.popen.wait())
            self._ready.clear()
        with self._lock:
            self._process = None
        process.end()
        return "died" if opened else "not_loaded"

    def _open(self, process: ReplicaProcess) -> bool:
        wanted = tuple(self._models.values())
        settings = self._settings
        try:
            answer = process.ask(
                ipc.OpenModels(wanted, settings.dtype, self.device, settings.threads, settings.compile)
            )
        except OSError as e:
            self.problem = f"it ended or hung while it loaded: {e}"
            return False
        self.problem = answer.message if isinstance(answer, ipc.ReplicaFailed) else answer.problem
        return isinstance(answer, ipc.ReplicaReady)


def _model(loaded: LoadedModel) -> ipc.ModelSpec:
    return ipc.ModelSpec(str(loaded.checkpoint.path), loaded.served.identity)


def _exit_reason(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status}"
    return f"it was ended by {signal.Signals(-status).name}"
