"""One process that computes, from its start to its end: its control socket, and its lanes."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import time
from typing import Final

from cornplug.encoder_service.execution.executor import BatchResult, EncodeBatch
from cornplug.encoder_service.replicas import ipc as wire
from cornplug.errors import ReplicaLost

START_S: Final = 900.0
"""Longest that a replica may take to load its models."""
RUN_S: Final = 600.0
"""Longest that one batch may take: no request waits longer."""


class WorkerChannel:
    """One socket pair and two memfds."""

    def __init__(self) -> None:
        self._sock, self._theirs = socket.socketpair()
        self._sock.settimeout(RUN_S)
        self._inputs, self._outputs = wire.SharedBuffer.new(), wire.SharedBuffer.new()
        self.fds = (self._theirs.fileno(), self._inputs.fd, self._outputs.fd)

    def started(self) -> None:
        """The process has its end now: ours must not keep it open."""
        self._theirs.close()

    def ask(self, task: EncodeBatch) -> tuple[BatchResult, int]:
        """The result, and how many towers could not be compiled. Raises OSError, RuntimeError."""
        tensors = [t for item in task.items for t in item.tensors]
        kept = [f for f in task.features if f is not None]
        rows = iter(self._inputs.write([*tensors, *kept]))
        own = [tuple(next(rows) for _ in item.tensors) for item in task.items]
        media = tuple(
            wire.MediumTensors(
                own[i], item.tokens, item.geometry, None if task.features[i] is None else next(rows)
            )
            for i, item in enumerate(task.items)
        )
        wanted = tuple((model.served.identity, index) for model, index in task.wanted)
        wire.send(self._sock, wire.RunBatch(media, wanted, task.keep))
        answer: wire.Computed = wire.receive(self._sock, wire.Computed)
        if isinstance(answer, wire.ReplicaFailed):
            raise ReplicaLost(answer.message) if answer.kind == "absent" else RuntimeError(answer.message)
        # Copied: the next task writes over it.
        made = BatchResult(
            embeddings=tuple(self._outputs.view(row).clone() for row in answer.embeddings),
            features={i: self._outputs.view(row).clone() for i, row in answer.features},
        )
        return made, answer.uncompiled

    def close(self) -> None:
        self._sock.close()
        self._theirs.close()
        self._inputs.close()
        self._outputs.close()


class ReplicaProcess:
    """One process, from its start to its end."""

    def __init__(self, lanes: int) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        self._all = [WorkerChannel() for _ in range(lanes)]
        self.idle: queue.SimpleQueue[WorkerChannel | None] = queue.SimpleQueue()
        fds = [theirs.fileno(), *(fd for lane in self._all for fd in lane.fds)]
        self.process = subprocess.Popen(
            # -P: the packages of this process, whatever lies in the working directory.
            [sys.executable, "-P", "-m", "cornplug.encoder_service.replicas.worker_main", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.started_s = time.monotonic()
        theirs.close()
        for lane in self._all:
            lane.started()
            self.idle.put(lane)

    def ask(self, message: wire.OpenModels | wire.LoadModel | wire.DropModel) -> wire.FromReplica:
        """Raises OSError when the process has ended or does not answer."""
        wire.send(self._control, message)
        answer: wire.FromReplica = wire.receive(self._control, wire.FromReplica)
        return answer

    def end(self) -> None:
        """Kill it, and take every lane back from those who wait for its answer."""
        self.process.kill()
        self.process.wait()
        self._control.close()
        for _ in self._all:
            self.idle.get()
        self.idle.put(None)
        for lane in self._all:
            lane.close()
