"""Embeddings that came to the scheduler half: read from the store or a reply, and held for the workers."""

from __future__ import annotations

from cornplug.engine_common.embedding_fetch import ExpectedEmbedding
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CodecError
from cornplug.store.payload import get_payload, get_payload_into
from cornplug.vllm_connector.ec.metadata import ArrivedEmbedding, CornplugECWorkerMetadata
from cornplug.vllm_connector.ec.row_memory import RowMemory, RowPlace


class Arrivals:
    """One per engine core, used by its thread. An embedding lies in the memory that the workers map, or its
    bytes travel in the metadata of a step where there is no room, or no such memory."""

    def __init__(self, runtime: EngineRuntime, memory: RowMemory | None) -> None:
        self._store, self._deadline_s = runtime.store, runtime.deadline_s
        self._memory = memory

    @property
    def address(self) -> str:
        """Where the workers find the memory; "" once all have mapped it."""
        return "" if self._memory is None else self._memory.address

    def read(self, identifier: str, expected: ExpectedEmbedding, size_bytes: int) -> ArrivedEmbedding | None:
        """A verified copy of an entry of so many bytes; None where the store has none in memory, after which
        one on disk comes there.

        Raises StoreError; CodecError of another reason than "wrong_shape" for an entry that is not whole.
        """
        # From a disk it comes later: the service, which is asked meanwhile, waits for it.
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
        """The place of rows that came by value, or a copy of them where there is no room."""
        if self._memory is None or (room := self._memory.room(len(data))) is None:
            return bytearray(data)
        self._memory.view(room)[:] = data
        return room

    def send(self, arrived: ArrivedEmbedding) -> None:
        """The workers are told of it in this step."""
        if self._memory is not None and isinstance(arrived.data, RowPlace):
            self._memory.send(arrived.data)

    def drop(self, arrived: ArrivedEmbedding | None) -> None:
        """No worker is told of it."""
        if self._memory is not None and arrived is not None and isinstance(arrived.data, RowPlace):
            self._memory.free(arrived.data)

    def acknowledged(self, acks: CornplugECWorkerMetadata) -> None:
        """Workers have mapped the memory, or have their rows."""
        if self._memory is not None:
            for rank in acks.mapped:
                self._memory.note_mapped(rank)
            for rank, offset in acks.copied_rows:
                self._memory.note_copied(rank, offset)

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory.close()
