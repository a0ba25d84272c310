"""A steady stream of requests to one engine, beside which a test does what it is about."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from integration.stack import ASKS, COUNTED_S, has_forgotten

from devkit.engines import Answer, EngineServer


@dataclass
class Seen:
    """Answers and errors of a stream of requests."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    timeout_s: float = 60.0
    """Of a request."""
    _turns: threading.Condition = field(default_factory=threading.Condition)
    _asking: int = 0
    _held: bool = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """One request; not while somebody is `alone`."""
        with self._turns:
            assert self._turns.wait_for(lambda: not self._held, 2 * self.timeout_s)
            self._asking += 1
        try:
            yield
        finally:
            with self._turns:
                self._asking -= 1
                self._turns.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The engine has no request of the stream meanwhile: it forgets its prefixes only then."""
        with self._turns:
            assert self._turns.wait_for(lambda: not self._held, 2 * self.timeout_s)
            self._held = True
        try:
            with self._turns:
                assert self._turns.wait_for(lambda: not self._asking, 2 * self.timeout_s)
            yield
        finally:
            with self._turns:
                self._held = False
                self._turns.notify_all()


@contextmanager
def stream(server: EngineServer, name: str, timeout_s: float = 60.0) -> Iterator[Seen]:
    """Ask all the time, from two threads: known prompts under the shared salt and, so that there
    is always new work for store and encoder, under new salts. Those are asked twice: an engine that
    is never idle saves a prompt at its second use."""
    seen = Seen(timeout_s=timeout_s)
    stop = threading.Event()

    def run(thread: int) -> None:
        turn = 0
        while not stop.is_set():
            index = (turn + thread) % len(ASKS)
            salt = f"{name}-{thread}-{turn}" if turn % 2 else None
            try:
                for _ in range(2 if salt else 1):
                    with seen.asking():
                        seen.answers.append((index, ASKS[index].put(server, salt=salt, timeout_s=timeout_s)))
                if turn % 5 == 4:
                    with seen.alone():
                        has_forgotten(server)  # not beside a copy: often enough
            except BaseException as e:  # noqa: BLE001 - the test must show any error
                seen.errors.append(e)
                return
            turn += 1

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=2 * timeout_s)


def answered(seen: Seen, at_least: int, deadline_s: float = 2 * COUNTED_S) -> None:
    """Wait until that many more requests have been answered since now."""
    target = len(seen.answers) + at_least
    end = time.monotonic() + deadline_s
    while len(seen.answers) < target and not seen.errors:
        assert time.monotonic() < end, f"only {len(seen.answers)} answers in {deadline_s} s"
        time.sleep(0.05)
