"""Requests to the daemon whose replies are read later, so that a scheduler can continue its step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from cornplug.errors import StoreUnavailable
from cornplug.store import messages
from cornplug.store.base import Posted, Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.connection import DaemonConnection


class PostedReserve(Posted[list[Reservation | ReserveRefusal]]):
    """Posted `reserve`. The daemon truncates long replies. When a truncated reply arrives, the remaining
    entries are requested."""

    def __init__(
        self,
        connection: DaemonConnection,
        entries: Sequence[tuple[bytes, int]],
        terms: ReserveTerms,
        deadline_s: float,
    ) -> None:
        self._connection, self._entries, self._terms = connection, entries, terms
        self._deadline_s, self._end_s = deadline_s, time.monotonic() + deadline_s
        self._answers: list[Reservation | str] = []
        self._ask()

    def _ask(self) -> None:
        wanted = self._entries[len(self._answers) :][: messages.MAX_KEYS]
        keys, sizes = b"".join([key for key, _ in wanted]), [size for _, size in wanted]
        terms = self._terms
        request = messages.ReserveRequest(keys, sizes, terms.app, terms.part, terms.only_seen, terms.cost_s)
        self._waiter = self._connection.post(request, self._deadline_s)

    def take(self) -> list[Reservation | ReserveRefusal] | None:
        try:
            reply = self._connection.taken(self._waiter, messages.ReserveReply, self._end_s)
            return None if reply is None or not self._whole(reply) else self._given()
        except StoreUnavailable:
            self._give_back()
            raise

    def wait(self) -> list[Reservation | ReserveRefusal]:
        """Wait for the reply until the deadline, and return it."""
        try:
            while not self._whole(self._connection.awaited(self._waiter, messages.ReserveReply, self._end_s)):
                pass
        except StoreUnavailable:
            self._give_back()
            raise
        return self._given()

    def _whole(self, reply: messages.ReserveReply) -> bool:
        """Add a reply to the result and return whether the result is complete. If not, request the remaining
        entries."""
        if not reply.answers and self._entries:
            raise StoreUnavailable("the store's reply covers too few keys", reason="store_fault")
        self._answers += reply.answers
        if len(self._answers) >= len(self._entries):
            return True
        self._ask()
        return False

    def _given(self) -> list[Reservation | ReserveRefusal]:
        return [ReserveRefusal(each) if isinstance(each, str) else each for each in self._answers]

    def _give_back(self) -> None:
        tokens = [each.token for each in self._answers if isinstance(each, Reservation)]
        with contextlib.suppress(StoreUnavailable):
            self._connection.release(tokens)


class PostedCommit(Posted[list[bool]]):
    """Posted `commit`, split into several messages if it is large."""

    def __init__(
        self, connection: DaemonConnection, written: Sequence[tuple[Reservation, bytes]], deadline_s: float
    ) -> None:
        self._connection, self._end_s = connection, time.monotonic() + deadline_s
        self._asked = [
            connection.post(
                messages.CommitRequest([r.token for r, _ in some], [meta for _, meta in some]), deadline_s
            )
            for some in messages.commit_batches(written)
        ]
        self._done: list[bool] = []

    def take(self) -> list[bool] | None:
        while self._asked:
            reply = self._connection.taken(self._asked[0], messages.CommitReply, self._end_s)
            if reply is None:
                return None
            self._done += reply.done
            del self._asked[0]
        return self._done

    def wait(self) -> list[bool]:
        """Wait for the reply until the deadline, and return it."""
        for asked in self._asked:
            self._done += self._connection.awaited(asked, messages.CommitReply, self._end_s).done
        return self._done
