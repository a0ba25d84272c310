"""Leases of stored embeddings, from the lookup until every rank has copied the rows.

    absent ──lease──> leased ──mark_sent──> sent to the ranks ──copied by every rank──> released
                        └── release: no request needs it any more

The scheduler half only leases. Each worker copies the rows from the store's memory and verifies its copy. A
lease expires after `LEASE_S`, so a lease that is not used soon is renewed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from cornplug.engine_common.embeddings import ExpectedEmbedding
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreError
from cornplug.store.payload import LEASE_S, get_payload, lease_payload
from cornplug.vllm_connector.media.encoder_requests import PendingEmbedding
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECWorkerMetadata,
    LeasedRows,
)

MAX_AGE_S: Final = LEASE_S / 2
"""Age in seconds from which a lease is renewed before it is sent. The ranks then have as much time to copy
the rows."""
_MAX_OUT_OF_REACH: Final = 3
"""Number of consecutive embeddings that a rank cannot access after which the rows' bytes are sent instead of
their lease. After a restart of the store, a rank may need a moment to map the new memory."""


@dataclass(slots=True)
class _SentLease:
    item: PendingEmbedding
    ranks: set[int]
    """Ranks that have not copied the rows yet."""
    miss: str = ""
    """Reason why a rank could not load the rows, or ""."""


class EmbeddingLeases:
    """Leases of the embeddings that one engine core loads. Used by the engine's thread.

    Args:
        ranks: number of workers that load embeddings.
    """

    def __init__(self, runtime: EngineRuntime, ranks: int) -> None:
        self._store, self._deadline_s = runtime.store, runtime.deadline_s
        self._ranks: Final = frozenset(range(ranks))
        self._sent: dict[int, _SentLease] = {}
        """Leases that were sent to the ranks, by token."""
        self._out_of_reach: tuple[bytes, int] = (b"", 0)
        """(arena id, number of consecutive embeddings in this arena that a rank could not access)."""

    def lease(self, identifier: str, expected: ExpectedEmbedding) -> ArrivedEmbedding | None:
        """Lease the stored embedding `expected`. Returns None if the store does not have it in memory. If the
        store has it on disk, this call starts a read from disk.

        Raises StoreError. Raises CodecError if the entry's header is damaged, with reason "wrong_shape" if it
        does not match `expected`.
        """
        # Do not wait for a read from disk. A request is sent to the encoder service in the meantime, and the
        # service waits for this read.
        found = lease_payload(self._store, expected.key, deadline_s=self._deadline_s)
        if found is None:
            return None
        lease, header = found
        with contextlib.ExitStack() as release:
            release.callback(self._release_token, lease.token)
            expected.check(header.dtype, header.shape, lease.location.size)
            if self._out_of_reach != (lease.location.arena_id, _MAX_OUT_OF_REACH):
                release.pop_all()
                rows = LeasedRows(lease.token, lease.location, header.checksums)
                return ArrivedEmbedding(identifier, header.dtype, header.shape, rows)
            # A rank on another host cannot copy the rows, so send their bytes.
            read = get_payload(self._store, expected.key, deadline_s=self._deadline_s)
            if read is None:
                return None
            return ArrivedEmbedding(identifier, header.dtype, header.shape, read[1])

    def release(self, arrived: ArrivedEmbedding | None) -> None:
        """Release the lease of an embedding that is not sent to the ranks."""
        if arrived is not None and isinstance(arrived.data, LeasedRows):
            self._release_token(arrived.data.token)

    def mark_sent(self, item: PendingEmbedding) -> bool:
        """Record that an embedding is sent to every rank in this step. Return whether the ranks report the
        end of its copies."""
        if item.arrived is None or not isinstance(item.arrived.data, LeasedRows):
            return False
        self._sent[item.arrived.data.token] = _SentLease(item, set(self._ranks))
        return True

    def handle_acks(self, acks: CornplugECWorkerMetadata) -> list[tuple[PendingEmbedding, str]]:
        """Release the leases whose rows every rank has copied. Return (embedding, reason why a rank could not
        load it, or "") for each released lease."""
        for token, reason in acks.lost:
            sent = self._sent.get(token)
            if sent is not None and not sent.miss:
                sent.miss = reason
                self._handle_loss(sent.item, reason)
        ended = []
        for rank, token in acks.copied:
            sent = self._sent.get(token)
            if sent is None:
                continue
            sent.ranks.discard(rank)
            if not sent.ranks:
                del self._sent[token]
                self._release_token(token)
                ended.append((sent.item, sent.miss))
                if not sent.miss:
                    self._out_of_reach = b"", 0
        return ended

    def _handle_loss(self, item: PendingEmbedding, reason: str) -> None:
        assert item.arrived is not None
        assert isinstance(item.arrived.data, LeasedRows)
        if reason == "stale_location":
            arena_id, losses = self._out_of_reach
            here = item.arrived.data.location.arena_id
            self._out_of_reach = here, min(losses + 1, _MAX_OUT_OF_REACH) if here == arena_id else 1
        elif reason == "corrupt":
            with contextlib.suppress(StoreError):
                self._store.delete([item.expected.key], deadline_s=self._deadline_s)

    def _release_token(self, token: int) -> None:
        # If the store has ended, the lease has ended too.
        with contextlib.suppress(StoreError):
            self._store.release([token], deadline_s=self._deadline_s)
