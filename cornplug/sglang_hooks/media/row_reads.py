"""Reads of stored embeddings on separate threads of a scheduler process.

    request arrives ──start──> copied and verified into host memory ──take, send──> device
                                  (pinned, if the device is a GPU)

A read begins when the request arrives. When the model needs the rows, they are usually in host memory
already, and the GPU copies them while the model's thread continues."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch

from cornplug.codec import PayloadHeader
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.stored_rows import RowCopies
from cornplug.errors import StoreUnavailable

MAX_HELD_BYTES: Final = 256 << 20
"""Maximum total size in bytes of rows that were read and not taken. Above this limit, the oldest rows are
dropped. The model's thread then reads them again."""
MAX_STARTED: Final = 64
"""Maximum number of reads that were started and not taken."""
_THREADS: Final = 2

StoredRows = tuple[PayloadHeader, torch.Tensor]


class RowReads:
    """Reads of embeddings for one scheduler process. `start` and `take` are called by the scheduler's
    thread."""

    def __init__(self, runtime: EngineRuntime, device: torch.device) -> None:
        self._store, self._deadline_s = runtime.store, runtime.deadline_s
        self._timeout_s = runtime.background_timeout_s
        self._copies = RowCopies(device)
        self._threads = ThreadPoolExecutor(
            _THREADS, "cornplug-rows", initializer=_enter_device, initargs=(device,)
        )
        self._started: OrderedDict[bytes, Future[StoredRows | None]] = OrderedDict()

    def start(self, key: bytes) -> None:
        """Start to read the embedding with this key. Returns immediately."""
        if key in self._started:
            return
        while self._started and (len(self._started) >= MAX_STARTED or self._held_bytes() > MAX_HELD_BYTES):
            self._started.popitem(last=False)[1].cancel()
        self._started[key] = self._submit(key)

    def take(self, key: bytes) -> StoredRows | None:
        """Return the header and the verified bytes of an embedding in host memory. Waits for its read.
        Returns None if the store does not have the embedding in memory.

        Raises CornplugError if the read failed or takes too long.
        """
        read = self._started.pop(key, None) or self._submit(key)
        try:
            return read.result(self._timeout_s)
        except TimeoutError as e:
            read.cancel()
            raise StoreUnavailable("an embedding was not read in time", reason="load_timeout") from e

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows from `take` on the device. Does not wait for a GPU's copy."""
        return self._copies.send(rows)

    def close(self) -> None:
        """Finish the current reads and drop all others."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, key: bytes) -> Future[StoredRows | None]:
        return self._threads.submit(self._copies.fetch, self._store, key, deadline_s=self._deadline_s)

    def _held_bytes(self) -> int:
        held = 0
        for read in self._started.values():
            if read.done() and read.exception() is None and (rows := read.result()) is not None:
                held += rows[1].nbytes
        return held


def _enter_device(device: torch.device) -> None:
    if device.type == "cuda":
        # A new thread uses device 0 by default, and pinned memory would create a CUDA context there.
        torch.cuda.set_device(device)
