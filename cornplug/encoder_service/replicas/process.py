"""Handle of a replica's process in the service: its control socket and its lanes."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import time
from typing import Final

from cornplug.encoder_service.execution.executor import BatchResult, EncodeBatch
from cornplug.encoder_service.replicas import ipc
from cornplug.errors import ReplicaLost

START_S: Final = 900.0
"""Maximum time in seconds for loading a replica's models."""
RUN_S: Final = 600.0
"""Maximum seconds for one batch, because no request waits longer."""


class WorkerChannel:
    """Service's end of one lane, which consists of a socket pair and two memfds."""

    def __init__(self) -> None:
        self._sock, self._child_end = socket.socketpair()
        self._sock.settimeout(RUN_S)
        self._inputs, self._outputs = ipc.SharedBuffer.new(), ipc.SharedBuffer.new()
        self.fds = (self._child_end.fileno(), self._inputs.fd, self._outputs.fd)

    def started(self) -> None:
        """Close this process's copy of the child's end, after the child has inherited it. Otherwise the
        socket would stay open after the child ends.
        """
        self._child_end.close()

    def run(self, batch: EncodeBatch) -> tuple[BatchResult, int]:
        """Run a batch in the process. Return the result, and the number of towers that the process could not
        compile.

        Raises OSError if the process has ended, ReplicaLost if it does not have a model of the batch, and
        RuntimeError for an error of the tower.
        """
        tensors = [t for item in batch.items for t in item.tensors]
        kept = [f for f in batch.features if f is not None]
        rows = iter(self._inputs.write([*tensors, *kept]))
        inputs = [tuple(next(rows) for _ in item.tensors) for item in batch.items]
        media = tuple(
            ipc.MediumTensors(
                inputs[i], item.tokens, item.geometry, None if batch.features[i] is None else next(rows)
            )
            for i, item in enumerate(batch.items)
        )
        wanted = tuple((model.identity, index) for model, index in batch.wanted)
        ipc.send(self._sock, ipc.RunBatch(media, wanted, batch.keep, batch.urgent, batch.share))
        answer: ipc.Computed = ipc.receive(self._sock, ipc.Computed)
        if isinstance(answer, ipc.ReplicaFailed):
            raise ReplicaLost(answer.message) if answer.kind == "absent" else RuntimeError(answer.message)
        # Copy the tensors, because the next batch overwrites the memory.
        result = BatchResult(
            embeddings=tuple(self._outputs.view(row).clone() for row in answer.embeddings),
            features={i: self._outputs.view(row).clone() for i, row in answer.features},
        )
        return result, answer.uncompiled

    def close(self) -> None:
        self._sock.close()
        self._child_end.close()
        self._inputs.close()
        self._outputs.close()


class ReplicaProcess:
    """Process of a replica. It is started when the object is created."""

    def __init__(self, lanes: int) -> None:
        self._control, child_end = socket.socketpair()
        self._control.settimeout(START_S)
        self._channels = [WorkerChannel() for _ in range(lanes)]
        self.idle: queue.SimpleQueue[WorkerChannel | None] = queue.SimpleQueue()
        fds = [child_end.fileno(), *(fd for channel in self._channels for fd in channel.fds)]
        self.popen = subprocess.Popen(
            # -P: use the packages of this process, not modules in the working directory.
            [sys.executable, "-P", "-m", "cornplug.encoder_service.replicas.worker_main", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.started_s = time.monotonic()
        child_end.close()
        for channel in self._channels:
            channel.started()
            self.idle.put(channel)

    def ask(self, message: ipc.OpenModels | ipc.LoadModel | ipc.DropModel) -> ipc.FromReplica:
        """Send a control message and return the reply. Raises OSError if the process has ended or does not
        reply.
        """
        ipc.send(self._control, message)
        answer: ipc.FromReplica = ipc.receive(self._control, ipc.FromReplica)
        return answer

    def end(self) -> None:
        """Kill the process, and wait for the threads that use its lanes."""
        self.popen.kill()
        self.popen.wait()
        self._control.close()
        for _ in self._channels:
            self.idle.get()
        self.idle.put(None)
        for channel in self._channels:
            channel.close()
