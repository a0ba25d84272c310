"""Requests to the daemon whose answers are taken later: an engine's scheduler goes on with its step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from cornplug.errors import StoreUnavailable
from cornplug.store import messages
from cornplug.store.base import Reservation, ReserveRefusal, Store, WriterPart
from cornplug.store.connection import DaemonConnection, StoreSlow, Waiter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Posted(Protocol[T_co]):
    """A request that was sent."""

    def take(self) -> T_co | None:
        """The answer once it is there, None until then. Never waits.

        Raises StoreUnavailable where none has come within the request's deadline, or none can come: what a
        late answer grants is given back."""


@runtime_checkable
class PostingStore(Store, Protocol):
    """A `Store` that can send requests without waiting for their answers."""

    def post_reserve(
        self,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        deadline_s: float,
        part: WriterPart | None = None,
        only_seen: bool = False,
    ) -> Posted[list[Reservation | ReserveRefusal]]:
        """`reserve`, answered later."""

    def post_commit(
        self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float
    ) -> Posted[list[bool]]:
        """`commit`, answered later."""


class Answered(Generic[T]):
    """The answer of a store that has answered already."""

    def __init__(self, answer: T) -> None:
        self._answer = answer

    def take(self) -> T:
        return self._answer


@contextlib.contextmanager
def as_unavailable() -> Iterator[None]:
    """Raises StoreUnavailable with its reason for what a connection raises."""
    try:
        yield
    except StoreSlow as e:
        raise StoreUnavailable(str(e), reason="store_slow") from None
    except TimeoutError:
        raise StoreUnavailable("the store did not answer in time", reason="store_timeout") from None
    except OSError as e:
        raise gone(e) from e


def gone(why: OSError) -> StoreUnavailable:
    """The error of a store whose connection has ended."""
    return StoreUnavailable(f"the store is gone: {why}", reason="store_down")


class _Request:
    """One message and its answer. Raises what its connection raises."""

    def __init__(
        self, connection: DaemonConnection, request: messages.Request, end_s: float, deadline_s: float
    ) -> None:
        self._connection, self._end_s, self._deadline_s = connection, end_s, deadline_s
        self._waiter: Waiter = connection.post(request, deadline_s)

    def take(self) -> messages.Reply | None:
        reply = self._connection.taken(self._waiter, self._end_s, self._deadline_s)
        if isinstance(reply, messages.RequestFault):
            raise StoreUnavailable(f"the store did not do it: {reply.message}", reason="store_fault")
        return reply


class PostedReserve:
    """A posted `reserve`. The daemon cuts long answers: the rest is asked for when they are there."""

    def __init__(
        self,
        connection: DaemonConnection,
        entries: Sequence[tuple[bytes, int]],
        request_of: Callable[[Sequence[tuple[bytes, int]]], messages.Request],
        give_back: Callable[[list[int]], None],
        deadline_s: float,
    ) -> None:
        self._connection, self._entries, self._request_of = connection, entries, request_of
        self._give_back = give_back
        self._deadline_s, self._end_s = deadline_s, time.monotonic() + deadline_s
        self._answers: list[Reservation | str] = []
        self._asked = self._ask()

    def _ask(self) -> _Request:
        first = len(self._answers)
        request = self._request_of(self._entries[first : first + messages.MAX_KEYS])
        return _Request(self._connection, request, self._end_s, self._deadline_s)

    def take(self) -> list[Reservation | ReserveRefusal] | None:
        try:
            with as_unavailable():
                reply = self._asked.take()
                if reply is None:
                    return None
                if not isinstance(reply, messages.ReserveReply) or not reply.answers:
                    raise StoreUnavailable("the store answered for too few keys", reason="store_fault")
                self._answers += reply.answers
                if len(self._answers) < len(self._entries):
                    self._asked = self._ask()
                    return None
        except StoreUnavailable:
            with contextlib.suppress(StoreUnavailable):
                self._give_back([each.token for each in self._answers if isinstance(each, Reservation)])
            raise
        return [ReserveRefusal(each) if isinstance(each, str) else each for each in self._answers]


class PostedCommit:
    """A posted `commit`, in as many messages as its size needs."""

    def __init__(
        self, connection: DaemonConnection, requests: Sequence[messages.CommitRequest], deadline_s: float
    ) -> None:
        end_s = time.monotonic() + deadline_s
        self._asked = [_Request(connection, request, end_s, deadline_s) for request in requests]
        self._done: list[bool] = []

    def take(self) -> list[bool] | None:
        with as_unavailable():
            while self._asked:
                reply = self._asked[0].take()
                if reply is None:
                    return None
                if not isinstance(reply, messages.CommitReply):
                    raise StoreUnavailable(f"the store answered {type(reply).__name__}", reason="store_fault")
                self._done += reply.done
                del self._asked[0]
            return self._done
