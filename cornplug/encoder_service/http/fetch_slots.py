"""Limits concurrent URL fetches. Each service class has reserved slots and a bounded queue.

Each class reserves its share of the slots, and may also use the unreserved slots. If one class fetches from a
slow host, this does not delay other classes. The time limit of a fetch starts when the fetch gets its slot.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from cornplug.errors import EncoderRefused
from cornplug.qos import ServiceClass

_MEAN_DECAY: Final = 0.9
"""Weight of the previous average in the moving average of fetch times."""
_MIN_RETRY_S: Final = 0.1


class FetchSlot:
    """One slot. It stays occupied until all futures passed to `keep_until` are done, even after a
    cancellation."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[Any]] = []

    def keep_until(self, future: asyncio.Future[Any]) -> None:
        """Keep the slot until `future` is done."""
        self._futures.append(future)

    async def wait_done(self) -> None:
        """Wait until all futures passed to `keep_until` are done."""
        await asyncio.gather(*self._futures, return_exceptions=True)

    @property
    def is_free(self) -> bool:
        return all(done.done() for done in self._futures)


class FetchSlots:
    """Slots of all classes. Use them from one event loop."""

    def __init__(self, classes: Sequence[ServiceClass], slots: int, *, max_waiting: int) -> None:
        """Create the slots. At most `max_waiting` fetches may wait. This number is divided among the classes
        by their shares.
        """
        # Every class has at least one slot and one position in the queue.
        self._reserved: Mapping[ServiceClass, int] = {q: max(1, math.floor(q.share * slots)) for q in classes}
        self._slots = max(slots, sum(self._reserved.values()))
        self._max_waiting = {q: max(1, math.floor(q.share * max_waiting)) for q in classes}
        self._used_slots: Counter[ServiceClass] = Counter()
        self._queues: dict[ServiceClass, deque[asyncio.Future[None]]] = {
            q: deque() for q in sorted(classes, key=lambda q: q.rank, reverse=True)
        }
        self._mean_s = 0.0
        self._releasing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def acquire(self, qos: ServiceClass, field: str, *, deadline_s: float) -> AsyncIterator[FetchSlot]:
        """Wait for a slot, and occupy it for the duration of the context. `field` is used in error messages.

        Raises EncoderRefused("fetches_full") if the queue is full, or if no slot becomes free in time.
        """
        await self._wait_for_slot(qos, field, deadline_s)
        slot = FetchSlot()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            yield slot
        finally:
            self._mean_s = _MEAN_DECAY * self._mean_s + (1 - _MEAN_DECAY) * (loop.time() - began_s)
            if slot.is_free:
                self._release(qos)
            else:
                leaving = asyncio.create_task(self._release_after(qos, slot.wait_done()))
                self._releasing.add(leaving)
                leaving.add_done_callback(self._releasing.discard)

    async def _wait_for_slot(self, qos: ServiceClass, field: str, deadline_s: float) -> None:
        queue = self._queues[qos]
        if not queue and self._has_free_slot(qos):
            self._used_slots[qos] += 1
            return
        expected_s = self._mean_s * (len(queue) + 1) / self._reserved[qos]
        if len(queue) >= self._max_waiting[qos]:
            raise _queue_full_error(
                f"{field}: the queue for fetches is full with {len(queue)} URLs", expected_s / 2
            )
        if expected_s > deadline_s:
            raise _queue_full_error(
                f"{field}: the fetch would start in {expected_s:.3g} s, after the deadline",
                expected_s - deadline_s,
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(deadline_s):
                await turn
        except BaseException as e:
            if turn.done() and not turn.cancelled():
                self._release(qos)  # The slot was assigned just before the exception.
            else:
                queue.remove(turn)
            if isinstance(e, TimeoutError):
                problem = f"{field}: the fetch did not start within {deadline_s:.3g} s"
                raise _queue_full_error(problem, expected_s) from None
            raise

    def _has_free_slot(self, qos: ServiceClass) -> bool:
        kept = sum(max(0, own - self._used_slots[q]) for q, own in self._reserved.items() if q != qos)
        return self._used_slots.total() + kept < self._slots

    def _release(self, qos: ServiceClass) -> None:
        self._used_slots[qos] -= 1
        # Serve the highest-ranked class first. Skipped classes still have their reserved slots.
        for waiting, queue in self._queues.items():
            while queue and self._has_free_slot(waiting):
                self._used_slots[waiting] += 1
                queue.popleft().set_result(None)

    async def _release_after(self, qos: ServiceClass, done: Awaitable[None]) -> None:
        await done
        self._release(qos)


def _queue_full_error(message: str, retry_after_s: float) -> EncoderRefused:
    return EncoderRefused(message, reason="fetches_full", retry_after_s=max(_MIN_RETRY_S, retry_after_s))
