"""Parts, expiry and quarantine in any order: nobody is given room where another may be writing."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cornplug import codec
from cornplug.codec import PayloadKind
from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms, WriterPart
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.testing.store import key_of

CAPACITY, SIZE = 64 * 12, 64 * 2
QUARANTINE_S, RESERVATION_S, RECLAIM_S = 5.0, 30.0, 600.0
GROUP = b"g" * 16
OWNERS, PARTS = st.integers(1, 3), st.integers(0, 1)


@dataclass
class _Writer:
    owner: int
    room: Reservation
    part: int
    begun_s: float
    committed: bool = False
    safe_from_s: float = 1e9
    """When it is sure to write no more."""


@dataclass
class _Draft:
    begun_s: float
    writers: list[_Writer] = field(default_factory=list)


class PartsInAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.index = StoreIndex(
            b"\1" * 16,
            CAPACITY,
            times=ReservationTimes(QUARANTINE_S, RESERVATION_S, RECLAIM_S),
            grow=lambda missing: missing,
        )
        self.drafts: dict[int, _Draft] = {}
        self.writers: list[_Writer] = []

    def expired(self) -> None:
        self.index.sweep(self.now_s)
        for name, draft in list(self.drafts.items()):
            if self.now_s - draft.begun_s >= RESERVATION_S:
                self.end(name)

    def end(self, name: int) -> None:
        for writer in self.drafts.pop(name).writers:
            if not writer.committed:
                writer.safe_from_s = min(writer.safe_from_s, self.now_s + RECLAIM_S)

    @rule(owner=OWNERS, name=st.integers(0, 3), part=PARTS)
    def reserve(self, owner: int, name: int, part: int) -> None:
        (answer,) = self.index.reserve(
            owner, [(key_of(name), SIZE)], ReserveTerms("a", WriterPart(GROUP, part, 2)), now_s=self.now_s
        )
        draft = self.drafts.get(name)
        if self.index.contains([key_of(name)]) == b"\1":
            assert answer is ReserveRefusal.PRESENT
        elif draft is not None and any(writer.part == part for writer in draft.writers):
            assert answer is ReserveRefusal.PENDING
        elif isinstance(answer, Reservation):
            draft = self.drafts.setdefault(name, _Draft(self.now_s))
            assert all(writer.room.location == answer.location for writer in draft.writers)
            if not draft.writers:
                self.check_nobody_writes_there(answer)
            writer = _Writer(owner, answer, part, self.now_s)
            draft.writers.append(writer)
            self.writers.append(writer)
        else:
            assert draft is None
            assert answer is ReserveRefusal.FULL

    def check_nobody_writes_there(self, room: Reservation) -> None:
        mine = range(room.location.offset, room.location.offset + SIZE)
        for writer in self.writers:
            theirs = writer.room.location.offset
            if mine.start < theirs + SIZE and theirs < mine.stop:
                assert writer.safe_from_s <= self.now_s, "given away under a writer"

    @rule(which=st.integers(0, 8), good=st.booleans())
    def commit(self, which: int, good: bool) -> None:
        if not self.writers:
            return
        writer = self.writers[which % len(self.writers)]
        name = next((n for n, draft in self.drafts.items() if writer in draft.writers), None)
        meta = codec.encode_partial_header(
            PayloadKind.KV_PAGE, writer.room.key, "float16", (64,), 2, {writer.part: 1}
        )
        done = self.index.commit(writer.owner, writer.room.token, meta if good else b"no part")
        writer.safe_from_s = min(writer.safe_from_s, self.now_s)
        if name is None or writer.committed:
            assert not done
            return
        draft = self.drafts[name]
        writer.committed = True
        if len(draft.writers) < 2 or not all(each.committed for each in draft.writers):
            assert done
            if not good:
                # Found when the parts are joined; here: give it up.
                self.index.release(writer.owner, [writer.room.token], now_s=self.now_s)
                self.end(name)
            return
        assert done == good
        assert self.index.contains([key_of(name)]) == bytes([good])
        self.end(name)

    @rule(which=st.integers(0, 8))
    def release(self, which: int) -> None:
        if not self.writers:
            return
        writer = self.writers[which % len(self.writers)]
        self.index.release(writer.owner, [writer.room.token], now_s=self.now_s)
        self.lose(writer)

    def lose(self, writer: _Writer) -> None:
        if not writer.committed:
            writer.safe_from_s = min(writer.safe_from_s, self.now_s + QUARANTINE_S)
        for name, draft in list(self.drafts.items()):
            if writer in draft.writers:
                self.end(name)

    @rule(owner=OWNERS)
    def end_owner(self, owner: int) -> None:
        while not self.index.end_owner(owner, now_s=self.now_s, limit=1):
            pass
        for writer in self.writers:
            if writer.owner == owner:
                self.lose(writer)

    @rule(seconds=st.sampled_from([1.0, 6.0, 31.0, 601.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.expired()

    @rule(name=st.integers(0, 3))
    def delete(self, name: int) -> None:
        self.index.delete([key_of(name)])

    @invariant()
    def counts_agree(self) -> None:
        assert self.index.stat().reservations == len(self.drafts)

    def teardown(self) -> None:
        for passed_s in (RESERVATION_S + 1.0, RECLAIM_S + 1.0):
            self.now_s += passed_s
            self.index.sweep(self.now_s)
        self.index.delete([key_of(name) for name in range(4)])
        stat = self.index.stat()
        assert (stat.used_bytes, stat.reservations, stat.bytes_by_app) == (0, 0, {})


TestPartsInAnyOrder = PartsInAnyOrder.TestCase
TestPartsInAnyOrder.settings = settings(max_examples=150, stateful_step_count=30)
