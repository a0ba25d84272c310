"""Main module of a replica's process, which loads towers and computes batches.

`ReplicaProcess` starts the process with the descriptors of its sockets and memfds (`replica_messages`). Each
lane (socket pair and thread) runs one batch at a time. The process ends when its control socket closes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from cornplug.encoder_service.execution.executor import BatchExecutor, EncodeBatch, InProcessExecutor
from cornplug.encoder_service.model_loader import (
    CompiledTower,
    LoadedModel,
    WeightPlacement,
    load_model,
    read_checkpoint,
)
from cornplug.encoder_service.replica_messages import (
    BatchDone,
    DropModel,
    ModelSpec,
    OpenModels,
    ReplicaFailed,
    ReplicaReady,
    RunBatch,
    SharedBuffer,
    ToReplica,
    receive,
    send,
)
from cornplug.encoder_service.towers.base import TowerItem
from cornplug.errors import CheckpointError, ReplicaLost

log = logging.getLogger(__name__)


class ReplicaModels:
    """Loaded models by identity. Lanes may look up models while the control thread loads or removes
    models."""

    def __init__(self, request: OpenModels) -> None:
        self._placement = WeightPlacement(
            dtype=request.dtype, device=torch.device(request.device), compile=request.compile
        )
        self._loaded: dict[bytes, LoadedModel] = {}

    def load(self, models: Sequence[ModelSpec]) -> None:
        """Load additional models. Raises CheckpointError for the first model that cannot be loaded, or whose
        weights on disk have changed."""
        for model in models:
            if model.identity in self._loaded:
                continue
            checkpoint, found = read_checkpoint(model.path, self._placement.dtype)
            if found.identity != model.identity:
                raise CheckpointError(
                    f"the weights in {model.path} differ from the weights that are served. "
                    "Send the service SIGHUP to load them.",
                    reason="changed",
                )
            loaded = load_model(checkpoint, found, self._placement, reuse_from=self._loaded.values())
            self._loaded = {**self._loaded, model.identity: loaded}

    def unload(self, identities: Sequence[bytes]) -> None:
        """Remove the models with these identities."""
        self._loaded = {k: v for k, v in self._loaded.items() if k not in identities}

    def identities(self) -> tuple[bytes, ...]:
        return tuple(self._loaded)

    def get(self, identity: bytes) -> LoadedModel:
        """Return the part of a model with this identity.

        Raises ReplicaLost if this replica has not loaded the model. Another replica may have it.
        """
        parts = (part for loaded in self._loaded.values() for part in loaded.iter_parts())
        found = next((part for part in parts if part.identity == identity), None)
        if found is None:
            raise ReplicaLost(f"the replica does not have model {identity.hex()[:12]}")
        return found


class WorkerLoop:
    """Runs the batches of one lane, one after another."""

    def __init__(self, models: ReplicaModels, executor: BatchExecutor, fds: Sequence[int]) -> None:
        self._models = models
        self._executor = executor
        self._sock = socket.socket(fileno=fds[0])
        self._inputs, self._outputs = SharedBuffer(fds[1]), SharedBuffer(fds[2])

    def serve(self) -> None:
        """Run batches until the service disconnects."""
        # Towers run in this pool, so that the future catches their exceptions. The lane sends an exception to
        # the service and continues.
        with ThreadPoolExecutor(1, "cornplug-compute") as threads:
            while True:
                run = receive(self._sock, RunBatch)
                done = threads.submit(self._run_batch, run)
                error = done.exception()
                send(self._sock, done.result() if error is None else _failure_reply(error))

    def _run_batch(self, run: RunBatch) -> BatchDone:
        result = self._executor.run(self._build_batch(run))
        places = list(result.features)
        rows = self._outputs.write([*result.embeddings, *(result.features[i] for i in places)])
        count = len(result.embeddings)
        return BatchDone(
            embeddings=tuple(rows[:count]),
            features=tuple(zip(places, rows[count:], strict=True)),
            uncompiled=CompiledTower.failures,
        )

    def _build_batch(self, run: RunBatch) -> EncodeBatch:
        view = self._inputs.view
        return EncodeBatch(
            items=tuple(
                TowerItem(tensors=tuple(map(view, m.tensors)), tokens=m.tokens, geometry=m.geometry)
                for m in run.media
            ),
            features=tuple(None if m.features is None else view(m.features) for m in run.media),
            targets=tuple((self._models.get(identity), index) for identity, index in run.wanted),
            returns_features=run.keep,
            urgent=run.urgent,
            share=run.share,
        )


def main(argv: Sequence[str]) -> None:
    """Run the process. `argv` has the control socket's descriptor, then three descriptors per lane."""
    # A terminal or supervisor sends signals to all processes, but the service ends this process after
    # draining.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    control, *rest = map(int, argv)
    threading.Thread(target=_serve_control, args=(socket.socket(fileno=control), rest), daemon=True).start()
    threading.Event().wait()


def _serve_control(sock: socket.socket, fds: Sequence[int]) -> None:
    try:
        opened = receive(sock, OpenModels)
        torch.set_num_threads(opened.threads)
        models = ReplicaModels(opened)
        executor = InProcessExecutor(torch.device(opened.device))
        send(sock, _load_models(models, opened.models))
        for at in range(0, len(fds), 3):
            worker = WorkerLoop(models, executor, fds[at : at + 3])
            threading.Thread(target=worker.serve, name=f"cornplug-lane-{at // 3}", daemon=True).start()
        while True:
            message: ToReplica = receive(sock, ToReplica)
            if isinstance(message, DropModel):
                models.unload(message.identities)
                send(sock, ReplicaReady(models.identities()))
            else:
                send(sock, _load_models(models, message.models))
    finally:
        # End the process after any error. The service then restarts it instead of waiting for a reply.
        os._exit(0)


def _load_models(models: ReplicaModels, specs: Sequence[ModelSpec]) -> ReplicaReady | ReplicaFailed:
    """Load as many of the models as possible, because a replica can run batches even if a model is missing.

    Returns ReplicaFailed if none of the models is loaded.
    """
    problems: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        for model in specs:
            error = threads.submit(models.load, [model]).exception()
            if error is not None:
                log.error("cannot load %s", model.path, exc_info=error)
                problems.append(str(error))
    if specs and not set(models.identities()) & {model.identity for model in specs}:
        return ReplicaFailed("checkpoint", "; ".join(problems))
    return ReplicaReady(models.identities(), "; ".join(problems))


def _failure_reply(error: BaseException) -> ReplicaFailed:
    return ReplicaFailed(
        "absent" if isinstance(error, ReplicaLost) else "error", f"{type(error).__name__}: {error}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
