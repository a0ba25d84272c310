"""Faults that engines of several test files meet, and answers that the engine under test owes."""

from __future__ import annotations

import io
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from integration.request_streams import Seen, answered, stream
from integration.stack import (
    ASKS,
    COUNTED_S,
    ENCODER_DEADLINE_S,
    MACHINE_NOISE_S,
    STORE_DEADLINE_S,
    Ask,
    Stack,
    count,
    forget_prefixes,
    settle_saves,
    wait_for_more,
)

from devkit.engines import EngineServer, wait_until

UNSEEN = 8
"""An image that no ask shows."""
_ARENA_BYTES: Final = 64 << 20
"""Bytes at the beginning of the arena, more than the engines of a test fill."""
_STRETCH_BYTES: Final = 64 << 10
_FLIPPED: Final = bytes(byte ^ 1 for byte in range(256))
"""Table for `bytes.translate` that flips the lowest bit of each byte."""


@dataclass(frozen=True)
class Subject:
    """The engine under test."""

    server: EngineServer
    model: str
    stock: str
    """The name of the stock engine that it has to answer like."""
    neighbour: str
    """The engine that is killed beside it, last of all."""
    noise_s: float | None = MACHINE_NOISE_S
    """Time that the machine may add to a request; None: durations are not checked."""


def check(stack: Stack, seen: Seen, subject: Subject) -> None:
    """Every request was answered with stock's output, and unless `noise_s` is None in time: stock's time and
    the deadlines."""
    assert not seen.errors, seen.errors[0]
    assert len(seen.answers) >= 10
    for index, answer in seen.answers:
        stack.same_as_stock(subject.stock, index, answer)
        if subject.noise_s is None:
            continue
        stock = stack.stock[subject.stock, index].total_s
        # An image may wait for the encoder once, and each of a few store calls once.
        images = len(ASKS[index].images)
        limit = stock + images * ENCODER_DEADLINE_S + 3 * STORE_DEADLINE_S + subject.noise_s
        assert answer.total_s <= limit, f"ask {index}: {answer.total_s:.1f} s, stock {stock:.1f} s"


def sharing_resumes(engine: EngineServer, what: str, source: str) -> None:
    """Hits grow again; only the failed process was restarted."""
    before = count(engine, "hits_total", kind=what, source=source)
    wait_for_more(engine, "hits_total", above=before, kind=what, source=source)


def store_killed(stack: Stack, subject: Subject) -> None:
    """The store is killed and started again, empty."""
    assert stack.store is not None
    missed = count(subject.server, "misses_total", reason="store_down")
    with stream(subject.server, "store-killed") as seen:
        answered(seen, 5)
        stack.store.kill()
        wait_for_more(subject.server, "misses_total", above=missed, reason="store_down")
        answered(seen, 10)
        stack.start_store()
        sharing_resumes(subject.server, "kv_page", "store")
        answered(seen, 5)
    check(stack, seen, subject)


def store_hung(stack: Stack, subject: Subject) -> None:
    """The store is stopped by SIGSTOP for a while."""
    assert stack.store is not None
    engine = subject.server

    def late() -> float:
        """Number of lookups and saves that met a late store.

        While a request is unanswered, further ones are not sent and count as "store_slow"."""
        return sum(
            engine.metric("cornplug_misses_total", reason=reason)
            + engine.metric("cornplug_saves_total", outcome=reason)
            for reason in ("store_timeout", "store_slow")
        )

    before = late()
    with stream(engine, "store-stopped") as seen:
        answered(seen, 5)
        stack.store.freeze()
        try:
            wait_until(lambda: late() > before, deadline_s=COUNTED_S, what="a counted late store")
            answered(seen, 10)
        finally:
            stack.store.resume()
        sharing_resumes(engine, "kv_page", "store")
    check(stack, seen, subject)


def arena_corrupted(stack: Stack, subject: Subject) -> None:
    """A bit in each byte of the arena flips."""
    assert stack.store is not None
    for i, ask in enumerate(ASKS):
        stack.same_as_stock(subject.stock, i, ask.put(subject.server))
    # Bits that were flipped for another engine are right once more after a second time: have whole pages.
    settle_saves(subject.server, stack.store)
    corrupt = count(subject.server, "misses_total", kind="kv_page", reason="corrupt")
    with stream(subject.server, "corrupt") as seen:
        answered(seen, 5)
        flip_everything(stack.store.pid)
        with seen.alone():
            forget_prefixes(subject.server)
        wait_for_more(subject.server, "misses_total", above=corrupt, kind="kv_page", reason="corrupt")
        answered(seen, 15)
        sharing_resumes(subject.server, "kv_page", "store")
    check(stack, seen, subject)


def encoder_killed(stack: Stack, subject: Subject) -> None:
    """The encoder service is killed and started again; meanwhile the engine encodes `UNSEEN`."""
    down = count(subject.server, "misses_total", kind="embedding", reason="encoder_down")
    with stream(subject.server, "encoder-killed") as seen:
        answered(seen, 5)
        stack.encoder.kill()
        wait_for_more(subject.server, "misses_total", above=down, kind="embedding", reason="encoder_down")
        answered(seen, 10)
        Ask("What did the engine see itself?", (UNSEEN,)).put(subject.server)
        stack.encoder.start()
        sharing_resumes(subject.server, "embedding", "service_computed")
    check(stack, seen, subject)


def flip_everything(pid: int) -> None:
    """Flip a bit in each of the arena's first bytes, through the daemon's own descriptor."""
    with _arena(pid) as arena:
        data = arena.read(_ARENA_BYTES)
        arena.seek(0)
        arena.write(data.translate(_FLIPPED))


def flip_some(pid: int, share: float, seed: int) -> None:
    """Flip a bit in each byte of some stretches of 64 KiB, which are `share` of the arena's first bytes.

    `seed` decides which.
    """
    chance = random.Random(seed)
    with _arena(pid) as arena:
        for at in range(0, _ARENA_BYTES, _STRETCH_BYTES):
            if chance.random() < share:
                arena.seek(at)
                data = arena.read(_STRETCH_BYTES)
                arena.seek(at)
                arena.write(data.translate(_FLIPPED))


def _arena(pid: int) -> io.FileIO:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:cornplug-store" in os.readlink(link):
            return link.open("r+b", buffering=0)
    raise AssertionError("the store has no arena")
