"""Embeddings that the scheduler half has received, from the store or in a reply, and keeps for the
workers."""

from __future__ import annotations

from cornplug.engine_common.embedding_fetch import ExpectedEmbedding
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CodecError
from cornplug.store.payload import get_payload, get_payload_into
from cornplug.vllm_connector.ec.metadata import ArrivedEmbedding, CornplugECWorkerMetadata
from cornplug.vllm_connector.ec.row_memory import RowMemory, RowPlace


class Arrivals:
    """Received embeddings of one engine core. Used by its thread. An embedding is in the memory that the
    workers map. If that is full or not available, its bytes are sent in the metadata of a step."""

    def __init__(self, runtime: EngineRuntime, memory: RowMemory | None) -> None:
        self._store, self._deadline_s = runtime.store, runtime.deadline_s
        self._memory = memory

    @property
    def address(self) -> str:
        """Address of the memory for the workers, or "" once all have mapped it."""
        return "" if self._memory is None else self._memory.address

    def read(self, identifier: str, expected: ExpectedEmbedding, size_bytes: int) -> ArrivedEmbedding | None:
        """Return a verified copy of an entry of `size_bytes`, or None if the store does not have it in
        memory. A read from disk is then started.

        Raises StoreError, and CodecError with another reason than "wrong_shape" for a damaged entry.
        """
        # A read from disk takes longer. The service, which is requested in the meantime, waits for it.
        how = {"deadline_s": self._deadline_s, "recall_s": 0.0}
        room = None if self._memory is None else self._memory.room(size_bytes)
        if self._memory is None or room is None:
            found = get_payload(self._store, expected.key, **how)
            if found is None:
                return None
            header, data = found
            expected.check(header.dtype, header.shape, len(data))
            return ArrivedEmbedding(identifier, header.dtype, header.shape, data)
        arrived = None
        try:
            into = get_payload_into(self._store, expected.key, self._memory.view(room), **how)
            if into is not None:
                expected.check(into.dtype, into.shape, size_bytes)
                arrived = ArrivedEmbedding(identifier, into.dtype, into.shape, room)
        except ValueError as e:
            raise CodecError(str(e), reason="wrong_shape") from e
        finally:
            if arrived is None:
                self._memory.free(room)
        return arrived

    def hold(self, data: bytes) -> bytearray | RowPlace:
        """Return the place of rows that arrived by value, or a copy of them if the memory is full."""
        if self._memory is None or (room := self._memory.room(len(data))) is None:
            return bytearray(data)
        self._memory.view(room)[:] = data
        return room

    def send(self, arrived: ArrivedEmbedding) -> None:
        """Record that the workers are notified of it in this step."""
        if self._memory is not None and isinstance(arrived.data, RowPlace):
            self._memory.send(arrived.data)

    def drop(self, arrived: ArrivedEmbedding | None) -> None:
        """Drop an embedding of which no worker is notified."""
        if self._memory is not None and arrived is not None and isinstance(arrived.data, RowPlace):
            self._memory.free(arrived.data)

    def acknowledged(self, acks: CornplugECWorkerMetadata) -> None:
        """Record that workers have mapped the memory, or have copied their rows."""
        if self._memory is not None:
            for rank in acks.mapped:
                self._memory.note_mapped(rank)
            for rank, offset in acks.copied_rows:
                self._memory.note_copied(rank, offset)

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
