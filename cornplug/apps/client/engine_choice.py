"""Choice of the engine for a request: the engine at which the KV of its prompt is available first.

The price of an engine is the sum of three times: prefill of tokens that no engine has processed, loading of
tokens that another engine on the same host has processed (they share a store), and its queue.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from cornplug.apps.client.engine_load import EngineLoad
from cornplug.apps.client.prefix_memory import PrefixMemory
from cornplug.apps.client.prompt_prefix import STEP_TOKENS, PromptPrefix
from cornplug.encoder_service.client import rendezvous
from cornplug.encoder_service.client.retry import CircuitBreakers
from cornplug.errors import ConfigError

_RUNNING_TOKENS: Final = 16.0
"""Prefill tokens that a running request counts as. Its decode steps take that part of a new request's
time."""
_FIRST_GUESS_TOKENS: Final = 512.0
_NEW_SHARE: Final = 0.1
"""Weight of the newest request in the moving average of computed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissPrice:
    """Speeds used to compare a cache miss with a longer queue. `cornplug plan` and engine logs report
    them."""

    prefill_tokens_per_s: float = 5_000.0
    load_tokens_per_s: float = 50_000.0
    """Tokens per second that are loaded from the host's store."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "load_tokens_per_s"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ConfigError(
                    f"price.{name}", f"{value} is not a valid speed", "Set tokens per second above 0."
                )


class EngineChooser:
    """State of each engine as this client sees it, and the choice among them. Thread-safe."""

    def __init__(
        self,
        price: MissPrice | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.clock = clock
        self._price = price or MissPrice()
        self._lock = threading.Lock()
        self._memory = PrefixMemory()
        self._circuits = CircuitBreakers((), uniform)
        self._sent: Counter[str] = Counter()
        """Requests of this client in progress."""
        self._loads: Mapping[str, EngineLoad] = {}
        self._sent_then: Mapping[str, int] = {}
        """`_sent` at the last reading of loads, which includes those requests."""
        self._typical_tokens = _FIRST_GUESS_TOKENS

    def take(self, engines: Mapping[str, float], prefix: PromptPrefix, now: float) -> str | None:
        """Return the engine for a request, or None if every engine has failed or requested a pause.

        Ties are decided by the conversation's digest and the weights, in the same way in every process.
        """
        with self._lock:
            self._circuits.watch(engines)
            self._memory.keep(engines)
            ready = [engine for engine in engines if not self._circuits.is_open(engine, now)]
            if not ready:
                return None
            order = rendezvous.ranking(prefix.conversation, engines)
            prices = {engine: self._price_s(engine, engines, prefix) for engine in ready}
            chosen = min(ready, key=lambda engine: (round(prices[engine], 6), order.index(engine)))
            self._circuits.take(chosen, now)
            self._note_sent(chosen, prefix)
            return chosen

    def take_first(self, engines: Mapping[str, float], prefix: PromptPrefix) -> str:
        """Return the engine whose pause ends first, for a request that cannot wait that long."""
        with self._lock:
            chosen = min(engines, key=self._circuits.opens_at)
            self._note_sent(chosen, prefix)
            return chosen

    def opens_at(self, engines: Collection[str]) -> float:
        """Return the time from which one of these engines accepts requests."""
        with self._lock:
            self._circuits.watch(engines)
            return min(map(self._circuits.opens_at, engines))

    def ended(self, engine: str) -> None:
        """Record that a request that `take` assigned to this engine is over."""
        with self._lock:
            self._sent[engine] -= 1

    def answered(self, engine: str, prefix: PromptPrefix) -> None:
        """Record that the engine accepted the request, and now has its prompt."""
        with self._lock:
            self._circuits.answered(engine)
            self._memory.remember(engine, prefix.steps)

    def refused(self, engine: str, now: float, pause_s: float | None) -> None:
        """Record that the engine requested a pause, None if it gave no duration."""
        with self._lock:
            self._circuits.refused(engine, now, pause_s)

    def failed(self, engine: str, now: float, *, sent: float) -> None:
        """Record that the engine did not respond to the request sent at `sent`. If its process restarts,
        it has no prefixes."""
        with self._lock:
            self._circuits.failed(engine, now, sent=sent)
            self._memory.forget(engine)

    def loaded(self, loads: Mapping[str, EngineLoad]) -> None:
        """Store a reading of loads. The load of engines that are missing in it is unknown."""
        with self._lock:
            self._loads = loads
            self._sent_then = {engine: self._sent[engine] for engine in loads}

    def _note_sent(self, engine: str, prefix: PromptPrefix) -> None:
        self._sent[engine] += 1
        missing = self._missing_tokens(engine, prefix)
        self._typical_tokens += _NEW_SHARE * (missing - self._typical_tokens)

    def _missing_tokens(self, engine: str, prefix: PromptPrefix) -> float:
        return prefix.tokens - STEP_TOKENS * self._memory.known(engine, prefix.steps)

    def _price_s(self, engine: str, engines: Mapping[str, float], prefix: PromptPrefix) -> float:
        host = urlsplit(engine).hostname
        missing = self._missing_tokens(engine, prefix)
        near = [one for one in self._memory.engines() if urlsplit(one).hostname == host]
        computed = min((self._missing_tokens(one, prefix) for one in near), default=missing)
        computed = min(computed, missing)
        price = self._price
        return (
            computed / price.prefill_tokens_per_s
            + (missing - computed) / price.load_tokens_per_s
            + self._queue_tokens(engine)
            / price.prefill_tokens_per_s
            / (engines[engine] / max(engines.values()))
        )

    def _queue_tokens(self, engine: str) -> float:
        """Return the prefill tokens ahead of a new request."""
        load = self._loads.get(engine, EngineLoad(0.0, 0.0))
        since = max(self._sent[engine] - self._sent_then.get(engine, 0), 0)
        return (load.waiting + since) * max(self._typical_tokens, 1.0) + load.running * _RUNNING_TOKENS
