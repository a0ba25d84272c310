"""Replicas: executors that run batches in another process. If the process ends, it is started again.

    starting ─ReplicaReady─> ready ─the process ends, or hangs─> lost ─backoff─> starting

When the process ends, `run` immediately raises `ReplicaLost` for the batches in the process. The dispatcher
then runs them on another replica.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cornplug.encoder_service.execution.executor import BatchResult, EncodeBatch
from cornplug.encoder_service.model_loader import LoadedModel
from cornplug.encoder_service.replica_messages import (
    BatchReply,
    DropModel,
    FromReplica,
    LoadModel,
    MediaTensors,
    ModelSpec,
    OpenModels,
    ReplicaFailed,
    ReplicaReady,
    RunBatch,
    SharedBuffer,
    receive,
    send,
)
from cornplug.errors import CheckpointError, ConfigError, ReplicaLost

_MIN_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 30.0
_STABLE_RUN_S: Final = 60.0
"""Run time in seconds after which the pause before the next restart is reset to the minimum."""

log = logging.getLogger(__name__)
START_TIMEOUT_S: Final = 900.0
"""Maximum seconds for loading a replica's models."""
RUN_TIMEOUT_S: Final = 600.0
"""Maximum seconds for one batch. No request waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings that all replicas of a service share. Each replica has its own device."""

    dtype: str
    threads: int
    """Number of torch threads of each replica."""
    compile: bool = False


class ReplicaExecutor:
    """Runs batches in another process, and starts the process again if it ends."""

    def __init__(self, device: str, settings: ReplicaSettings) -> None:
        self.device: Final = device
        self.uncompiled_towers = 0
        """Number of towers that the process could not compile."""
        self.problem = ""
        """Reason why the replica is not ready or lacks a model, or "" if it is ready and has all models."""
        self.exit_counts: Counter[str] = Counter()
        """Number of times that the process ended unexpectedly, by reason: "died", "not_loaded" or
        "not_started"."""
        self._settings = settings
        self._lock = threading.Lock()  # guards the control socket and the fields below
        self._models: dict[bytes, ModelSpec] = {}
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
        """Start the process, which then loads the models. Returns immediately."""
        self._models = {model.identity: model for model in map(_model_spec, models)}
        self._supervisor.start()

    def wait_started(self) -> None:
        """Wait until the first process is ready. Raises CheckpointError if it cannot load every model."""
        if not self._attempted.wait(START_TIMEOUT_S) or not self._ready.is_set() or self.problem:
            raise CheckpointError(f"replica on {self.device}: {self.problem}", reason="replica")

    def is_ready(self) -> bool:
        return self._ready.is_set()

    def wait_ready(self, timeout_s: float) -> bool:
        return self._ready.wait(timeout_s)

    def run(self, batch: EncodeBatch) -> BatchResult:
        process = self._process
        if process is None or not self._ready.is_set():
            raise ReplicaLost(f"replica on {self.device}: {self.problem}")
        try:
            channel = process.idle_channels.get(timeout=RUN_TIMEOUT_S)
        except queue.Empty:
            raise ReplicaLost(f"replica on {self.device}: busy for {RUN_TIMEOUT_S:g} s") from None
        if channel is None:
            process.idle_channels.put(None)
            raise ReplicaLost(f"replica on {self.device}: {self.problem}")
        try:
            result, self.uncompiled_towers = channel.run(batch)
        except OSError as e:
            # This thread may notice the error before the supervisor does. Kill the process, because it may
            # only hang.
            self._ready.clear()
            process.popen.kill()
            raise ReplicaLost(f"replica on {self.device} was lost: {e}") from e
        finally:
            process.idle_channels.put(channel)
        return result

    def load(self, models: Sequence[LoadedModel]) -> None:
        new = tuple(map(_model_spec, models))
        with self._lock:
            reply = self._send_control(LoadModel(new))
            problem = reply.message if isinstance(reply, ReplicaFailed) else reply.problem if reply else ""
            if problem:
                self._send_control(
                    DropModel(tuple(m.identity for m in new if m.identity not in self._models))
                )
                raise CheckpointError(f"replica on {self.device}: {problem}", reason="replica")
            # A process that is not ready now will load these models when it starts.
            self._models |= {model.identity: model for model in new}

    def unload(self, models: Sequence[LoadedModel]) -> None:
        with self._lock:
            gone = tuple(loaded.served.identity for loaded in models)
            self._models = {k: v for k, v in self._models.items() if k not in gone}
            self._send_control(DropModel(gone))

    def close(self) -> None:
        self._closing.set()
        process = self._process
        if process is not None:
            process.popen.kill()
        if self._supervisor.is_alive():
            self._supervisor.join()

    def _send_control(self, message: LoadModel | DropModel) -> FromReplica | None:
        """Send a control message to the process and return the reply. Return None if the process is not ready
        or does not reply."""
        process = self._process
        if process is None or not self._ready.is_set():
            return None
        try:
            return process.send_control(message)
        except OSError as e:
            log.warning("replica on %s does not reply: %s", self.device, e)
            self._ready.clear()
            process.popen.kill()
            return None

    def _supervise(self) -> None:
        pause_s = _MIN_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            reason = self._run_process()
            self._attempted.set()
            if self._closing.is_set():
                return
            steady = time.monotonic() - began > _STABLE_RUN_S
            pause_s = _MIN_PAUSE_S if steady else min(2 * pause_s, _MAX_PAUSE_S)
            log.error("replica on %s: %s; restarting it in %g s", self.device, self.problem, pause_s)
            self.exit_counts[reason] += 1
            self._closing.wait(pause_s)

    def _run_process(self) -> str:
        """Start a process and wait until it ends. Return the reason why it ended, as a key of
        `exit_counts`."""
        try:
            # Create one additional lane (socket pair and thread) for urgent batches, which run between
            # layers.
            process = ReplicaProcess(self.lanes + 1)
        except OSError as e:
            self.problem = f"cannot start a process: {e}"
            return "not_started"
        with self._lock:
            self._process = process
            opened = self._load_models(process)
            if opened:
                self._ready.set()
        if opened:
            self._attempted.set()
            self.problem = _exit_reason(process.popen.wait())
            self._ready.clear()
        with self._lock:
            self._process = None
        process.terminate()
        return "died" if opened else "not_loaded"

    def _load_models(self, process: ReplicaProcess) -> bool:
        wanted = tuple(self._models.values())
        settings = self._settings
        try:
            reply = process.send_control(
                OpenModels(wanted, settings.dtype, self.device, settings.threads, settings.compile)
            )
        except OSError as e:
            self.problem = f"it ended or hung while it loaded: {e}"
            return False
        self.problem = reply.message if isinstance(reply, ReplicaFailed) else reply.problem
        return isinstance(reply, ReplicaReady)


def _model_spec(loaded: LoadedModel) -> ModelSpec:
    return ModelSpec(str(loaded.checkpoint.path), loaded.served.identity)


def _exit_reason(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status}"
    return f"it was ended by {signal.Signals(-status).name}"


class WorkerChannel:
    """Service's end of one lane. A lane consists of a socket pair and two memfds."""

    def __init__(self) -> None:
        self._sock, self._child_end = socket.socketpair()
        self._sock.settimeout(RUN_TIMEOUT_S)
        self._inputs, self._outputs = SharedBuffer.new(), SharedBuffer.new()
        self.fds = (self._child_end.fileno(), self._inputs.fd, self._outputs.fd)

    def close_child_end(self) -> None:
        """Close this process's copy of the child's end, after the child has inherited it. Otherwise the
        socket would stay open after the child has ended.
        """
        self._child_end.close()

    def run(self, batch: EncodeBatch) -> tuple[BatchResult, int]:
        """Run a batch in the process. Return (result, number of towers that the process could not compile).

        Raises OSError if the process has ended, ReplicaLost if it does not have one of the batch's models,
        and RuntimeError for an error of the tower.
        """
        tensors = [t for item in batch.items for t in item.tensors]
        kept = [f for f in batch.features if f is not None]
        rows = iter(self._inputs.write([*tensors, *kept]))
        inputs = [tuple(next(rows) for _ in item.tensors) for item in batch.items]
        media = tuple(
            MediaTensors(
                inputs[i], item.tokens, item.geometry, None if batch.features[i] is None else next(rows)
            )
            for i, item in enumerate(batch.items)
        )
        wanted = tuple((model.identity, index) for model, index in batch.targets)
        send(
            self._sock,
            RunBatch(media, wanted, batch.returns_features, batch.urgent, batch.share),
        )
        reply: BatchReply = receive(self._sock, BatchReply)
        if isinstance(reply, ReplicaFailed):
            raise ReplicaLost(reply.message) if reply.kind == "absent" else RuntimeError(reply.message)
        # Copy the tensors, because the next batch overwrites their memory.
        result = BatchResult(
            embeddings=tuple(self._outputs.view(row).clone() for row in reply.embeddings),
            features={i: self._outputs.view(row).clone() for i, row in reply.features},
        )
        return result, reply.uncompiled

    def close(self) -> None:
        self._sock.close()
        self._child_end.close()
        self._inputs.close()
        self._outputs.close()


class ReplicaProcess:
    """Process of a replica. Creating the object starts the process."""

    def __init__(self, lanes: int) -> None:
        self._control, child_end = socket.socketpair()
        self._control.settimeout(START_TIMEOUT_S)
        self._channels = [WorkerChannel() for _ in range(lanes)]
        self.idle_channels: queue.SimpleQueue[WorkerChannel | None] = queue.SimpleQueue()
        fds = [child_end.fileno(), *(fd for channel in self._channels for fd in channel.fds)]
        self.popen = subprocess.Popen(
            # -P: import the same packages as this process, not modules in the working directory.
            [sys.executable, "-P", "-m", "cornplug.encoder_service.replica_main", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.started_s = time.monotonic()
        child_end.close()
        for channel in self._channels:
            channel.close_child_end()
            self.idle_channels.put(channel)

    def send_control(self, message: OpenModels | LoadModel | DropModel) -> FromReplica:
        """Send a control message and return the reply. Raises OSError if the process has ended or does not
        reply.
        """
        send(self._control, message)
        reply: FromReplica = receive(self._control, FromReplica)
        return reply

    def terminate(self) -> None:
        """Kill the process, and wait for the threads that use its lanes."""
        self.popen.kill()
        self.popen.wait()
        self._control.close()
        for _ in self._channels:
            self.idle_channels.get()
        self.idle_channels.put(None)
        for channel in self._channels:
            channel.close()


class ReplicaMetrics(Collector):
    """Collects the replicas' metrics for `/metrics`."""

    def __init__(self, replicas: Sequence[ReplicaExecutor]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Return the current values. prometheus_client calls this at each scrape."""
        ready = GaugeMetricFamily(
            "cornplug_encoder_replica_ready",
            "1 if the replica is ready, else 0.",
            labels=("replica", "device"),
        )
        plain = GaugeMetricFamily(
            "cornplug_encoder_replica_uncompiled_towers",
            "Number of towers that --compile could not compile.",
            labels=("replica",),
        )
        ends = CounterMetricFamily(
            "cornplug_encoder_replica_ends",
            "Number of replica processes that ended unexpectedly.",
            labels=("replica", "reason"),
        )
        for number, replica in enumerate(map(str, range(len(self._replicas)))):
            one = self._replicas[number]
            ready.add_metric((replica, one.device), float(one.is_ready()))
            plain.add_metric((replica,), one.uncompiled_towers)
            for reason in ("died", "not_loaded", "not_started"):
                ends.add_metric((replica, reason), one.exit_counts[reason])
        yield from (ready, plain, ends)


def replica_devices(device: str, replicas: int) -> list[str]:
    """Return the device of each replica. Raises ConfigError if there are fewer devices than replicas."""
    if device.startswith("cuda"):
        if ":" in device:
            raise ConfigError("--replicas", f"--device {device} is a single GPU", "Set --device cuda.")
        have, what = torch.cuda.device_count(), "GPUs"
    else:
        have, what = count_cores(), "cores"
    if not 1 <= replicas <= have:
        raise ConfigError(
            "--replicas",
            f"{replicas} were requested, but this host has {have} {what}",
            f"Set a number from 1 to {have}, or 0.",
        )
    return [f"cuda:{i}" for i in range(replicas)] if what == "GPUs" else [device] * replicas


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def open_replicas(
    devices: Sequence[str], settings: ReplicaSettings, models: Sequence[LoadedModel]
) -> list[ReplicaExecutor]:
    """Start one replica on each device and wait until all replicas are ready. Raises CheckpointError."""
    replicas = [ReplicaExecutor(device, settings) for device in devices]
    try:
        for replica in replicas:
            replica.start(models)
        for replica in replicas:
            replica.wait_started()
    except CheckpointError:
        for replica in replicas:
            replica.close()
        raise
    return replicas
