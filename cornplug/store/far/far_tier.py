"""Far tier of a store. It finds entries that other hosts wrote, marks these entries as on disk, and recalls
them into memory.

    a client recalls an absent key ──> looked up in all peers           ──> the table shows it as on disk only
    all peers have replied, or failed                                   ──> the table shows the ticket
    a client recalls that entry    ──> fetched, opened into memory      ──> an entry in memory as any other
    committed                      ──> written to each peer, in the background

A peer is a far store. Only the daemon's loop calls the tier, and no call blocks. Engines see only marks for
entries on disk, and recall entries in far stores like entries on disk.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.disk.disk_workers import FAR_OWNER, DiskFailure, DiskWorkers, MemoryTier, TieredEntry
from cornplug.store.disk.record_format import FarRecord, FarSealer, RecordDamaged, RecordHead
from cornplug.store.far.far_peer import FarPeer, WriteFunction
from cornplug.store.far.open_far import FarStore, OpenedFar
from cornplug.store.store_stats import FarStat

MAX_SHOWN: Final = 1 << 15
"""Maximum number of entries that the tier shows in the table. If there are more, the oldest are removed."""
MAX_RECALLED: Final = 1024
"""Maximum number of entries that wait to be fetched. Recalls of further entries are refused."""
_MAX_FETCHES: Final = 4
"""Maximum number of records that are being fetched or wait for memory."""
_HIDDEN_PER_STEP: Final = 256
"""Number of entries that one iteration of the loop removes from the table when no peer responds."""


class FarTier:
    """Far tier of one daemon.

    Args:
        is_on_disk: Function that returns whether an entry is on this host's disk.
        show_far_up: Function that shows in the table whether a far store responds.
        show_ticket: Function that shows in the table that the lookup with a ticket is complete.
    """

    def __init__(
        self,
        far: OpenedFar,
        memory_tier: MemoryTier,
        *,
        is_on_disk: Callable[[bytes], bool],
        show_far_up: Callable[[bool], None],
        show_ticket: Callable[[int], None],
    ) -> None:
        self._sealer = FarSealer(far.secret, far.sealing_secrets)
        self._peers = [FarPeer(label, store, self._sealer, self._on_found) for label, store in far.stores]
        self._index, self._rules, self._marks = memory_tier.index, memory_tier.rules, memory_tier.marks
        self._memory = memory_tier.memory
        self._is_on_disk, self._show_far_up, self._show_ticket = is_on_disk, show_far_up, show_ticket
        self._shown: OrderedDict[bytes, FarPeer] = OrderedDict()
        self._waiting: OrderedDict[bytes, FarPeer] = OrderedDict()
        self._fetching: dict[bytes, FarPeer] = {}
        self._arrived: deque[tuple[bytes, FarRecord]] = deque()
        self._is_up = False
        show_far_up(False)

    @property
    def wakeup_sources(self) -> list[DiskWorkers]:
        """Descriptors that are readable when `step` has work."""
        return [workers for peer in self._peers for workers in peer.wakeup_sources]

    @property
    def has_pending_work(self) -> bool:
        """Whether `step` has more to do immediately."""
        return not self._is_up and bool(self._shown)

    def on_added(self, entry: TieredEntry) -> None:
        """Offer an entry in memory to each peer."""
        self._shown.pop(entry.key, None)
        for peer in self._peers:
            peer.offer(entry.key)

    def on_read(self, entries: Iterable[TieredEntry]) -> None:
        """Handle reads of entries in memory. Each entry is written to the peers that do not have it."""
        for entry in entries:
            for peer in self._peers:
                peer.ensure_stored(entry.key, entry.location.size)

    def on_removed(self, key: bytes, cause: str) -> None:
        """Handle the removal of an entry from memory."""
        if cause != "evicted":
            self.delete(key)
            return
        peer = next((one for one in self._peers if one.is_up and one.is_stored(key)), None)
        if peer is not None:
            self._show(key, peer)

    def delete(self, key: bytes) -> bool:
        """Stop reading a deleted or expired entry from the peers, and delete it from the peers that are known
        to have it. Return whether the table showed the entry because of this tier."""
        for peer in self._peers:
            peer.delete(key)
        self._waiting.pop(key, None)
        return self._hide(key)

    def recall(self, keys: Sequence[bytes], ticket: int = 0) -> None:
        """Start to read into memory the entries that this tier shows in the table, and look up the remaining
        keys in the peers.

        Args:
            ticket: Ticket to show when each peer has replied or failed. 0: no ticket.
        """
        unknown = []
        for key in keys:
            if self._index.find(key) is not None or self._is_on_disk(key):
                continue
            peer = self._shown.get(key)
            if peer is None:
                unknown.append(key)
            elif key not in self._waiting and key not in self._fetching:
                if len(self._waiting) < MAX_RECALLED:
                    self._waiting[key] = peer
                else:
                    peer.read_counts["refused"] += 1
        if unknown or ticket:
            left = len(self._peers)

            def over() -> None:
                nonlocal left
                left -= 1
                if ticket and not left:
                    self._show_ticket(ticket)

            for peer in self._peers:
                peer.look_up(unknown, over)

    def step(self) -> None:
        """Process the results of the threads, and start more work."""
        for peer in self._peers:
            peer.step(self._make_write)
        is_up = any(peer.is_up for peer in self._peers)
        if is_up != self._is_up:
            self._is_up = is_up
            self._show_far_up(is_up)
        if not is_up:
            for key in list(self._shown)[:_HIDDEN_PER_STEP]:
                self._waiting.pop(key, None)
                self._hide(key)
        self._open_arrived()
        while self._waiting and len(self._fetching) < _MAX_FETCHES:
            key, peer = self._waiting.popitem(last=False)
            if not peer.is_up:
                self._fail_fetch(key, peer, "error")
            elif self._index.find(key) is None:
                self._fetching[key] = peer
                peer.fetch(key, functools.partial(self._on_fetched, key))

    def stat(self) -> dict[str, FarStat]:
        """Return a snapshot of each peer's statistics."""
        return {peer.label: peer.stat() for peer in self._peers}

    def close(self) -> None:
        """Close the peers. Waiting entries are not written."""
        for peer in self._peers:
            peer.close()

    def _on_found(self, peer: FarPeer, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._index.find(key) is None:
                self._show(key, peer)

    def _show(self, key: bytes, peer: FarPeer) -> None:
        if key in self._shown or self._is_on_disk(key):
            return
        self._marks.show_on_disk(key)
        self._shown[key] = peer
        if len(self._shown) > MAX_SHOWN:
            self._hide(next(iter(self._shown)))

    def _hide(self, key: bytes) -> bool:
        if self._shown.pop(key, None) is None:
            return False
        if not self._is_on_disk(key):
            self._marks.hide_on_disk(key)
        return True

    def _on_fetched(self, key: bytes, record: FarRecord | DiskFailure | None) -> None:
        peer = self._fetching[key]
        if isinstance(record, FarRecord):
            ttl_s = self._rules.ttl_s(record.head.app)
            if ttl_s is None or time.time() - record.head.written_s < ttl_s:
                self._arrived.append((key, record))
                return
            self._fail_fetch(key, peer, "gone", until_rewritten=True)
        elif record is None:
            self._fail_fetch(key, peer, "gone")
        elif isinstance(record, RecordDamaged):
            self._fail_fetch(key, peer, "damaged", until_rewritten=True)
        else:
            self._fail_fetch(key, peer, "error")

    def _fail_fetch(self, key: bytes, peer: FarPeer, outcome: str, *, until_rewritten: bool = False) -> None:
        """End a fetch that did not produce an entry, and stop showing the entry, so that clients do not wait
        for it."""
        self._fetching.pop(key, None)
        peer.read_counts[outcome] += 1
        peer.forget(key, until_rewritten=until_rewritten)
        self._hide(key)

    def _open_arrived(self) -> None:
        """Start to open fetched records, as far as memory is available."""
        while self._arrived:
            key, record = self._arrived[0]
            head = record.head
            reservation = self._index.reserve(
                FAR_OWNER, [(key, head.payload_bytes)], ReserveTerms(head.app, cost_s=head.cost_s),
                now_s=time.monotonic(), is_promotion=True,
            )[0]  # fmt: skip
            if reservation is ReserveRefusal.GROWING:
                return
            self._arrived.popleft()
            peer = self._fetching[key]
            if isinstance(reservation, Reservation):
                work = functools.partial(self._open_record, record, reservation)
                peer.run_on_reader(work, functools.partial(self._on_opened, key, record, reservation))
            else:
                # The table keeps showing the entry, because memory may be available later.
                del self._fetching[key]
                peer.read_counts[reservation.value] += 1

    def _open_record(self, record: FarRecord, reservation: Reservation) -> bool:
        """Open a record into the reserved memory. Return False if the reservation has already ended. Runs on
        a worker thread."""
        if not self._memory.may_write(reservation.location):
            return False
        record.open_into(self._memory.view(reservation.location))
        return True

    def _on_opened(
        self, key: bytes, record: FarRecord, reservation: Reservation, result: bool | DiskFailure
    ) -> None:
        peer = self._fetching.pop(key)
        age_s = max(0.0, time.time() - record.head.written_s)
        if result is True and peer.was_stored(key):
            done = self._index.commit(FAR_OWNER, reservation.token, record.head.meta, age_s=age_s)
            peer.read_counts["read" if done else "late"] += 1
            return
        self._index.release(FAR_OWNER, [reservation.token], now_s=time.monotonic())
        if isinstance(result, RecordDamaged):
            self._fail_fetch(key, peer, "damaged", until_rewritten=True)
        else:
            peer.read_counts["late"] += 1

    def _make_write(self, key: bytes) -> WriteFunction | None:
        """Return a function that writes an entry to a peer, or None if the entry has left memory."""
        entry = self._index.find(key)
        if entry is None:
            return None
        written_s = time.time() - (time.monotonic() - entry.written_s)
        head = RecordHead(entry.app, entry.cost_s, written_s, entry.location.size, entry.meta)
        payload = self._memory.view(entry.location)
        return functools.partial(self._write_record, entry, head, payload)

    def _write_record(
        self, entry: TieredEntry, head: RecordHead, payload: memoryview, store: FarStore, replace: bool
    ) -> tuple[str, int]:
        """Write an entry to a far store, and return the outcome and the number of bytes written. If `replace`
        is set, an existing record is replaced. Runs on a worker thread."""
        if self._sealer.sealed_bytes(head) > store.max_bytes:
            return "too_large", 0
        name = self._sealer.record_name(entry.key)
        if not replace and store.exists([name])[0]:
            return "present", 0
        record = self._sealer.seal(entry.key, head, payload)
        # The entry has no lease, so its memory may have been reused.
        if not entry.visible:
            return "gone", 0
        store.put(name, record)
        return "written", len(record)
