"""Choice of the engine for a request: the engine that would have the KV of the request's prompt first.

The price of an engine is the sum of three times: the prefill of tokens that no engine on its host has
processed, the loading of tokens that another engine on its host has processed (they share a store), and the
wait in its queue.

A prompt is represented by a chain of hashes, one per `STEP_BYTES` of text, and compared with the prompts that
this client sent to each engine. The hashes only select an engine. The engine's own keys decide which KV is
valid, so a wrong guess only costs time. Queue lengths are read from the engines' Prometheus metrics.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec
import xxhash

from cornplug.encoder_service.client import endpoints
from cornplug.encoder_service.client.retry import CircuitBreakers
from cornplug.errors import ConfigError
from cornplug.host import tls_context
from cornplug.planner.observed_load import PRESENT_METRICS, WAITING_METRICS

INTERVAL_S: Final = 1.0
_TIMEOUT_S: Final = 1.0
_MAX_METRICS_BYTES: Final = 8 << 20
_LOAD_SAMPLE: Final = re.compile(rf"^({'|'.join(PRESENT_METRICS)})(?:\{{.*\}})? (\S+)", re.MULTILINE)
"""Pattern for a line with one of the four gauges that are read. Parsing all lines of the response takes a
hundred times as long."""
STEP_BYTES: Final = 512
STEP_TOKENS: Final = 128
"""Estimated number of tokens in one step, with four bytes of text per token."""
_STEPS_PER_MEDIA_ITEM: Final = 2
"""Number of steps that represent one image, audio clip or video."""
_HEAD_FIELDS: Final = ("model", "cache_salt", "tools", "chat_template_kwargs")
"""Fields of a request that change the first tokens of its prompt."""
MAX_STEPS: Final = 65_536
"""Maximum number of steps that are remembered per engine: 8 million tokens, in about 8 MB of memory."""
_RUNNING_TOKENS: Final = 16.0
"""Number of prefill tokens that delay a new request as much as the decode steps of one running request."""
_INITIAL_TOKENS: Final = 512.0
_NEWEST_WEIGHT: Final = 0.1
"""Weight of the newest request in the moving average of tokens that an engine must compute for a request."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Numbers of waiting and running requests in one engine, from all clients."""

    waiting: float
    running: float


def parse_load(text: str) -> EngineLoad | None:
    """Return the load that a metrics response contains, or None if the response has none of the gauges."""
    found = [(name, float(value)) for name, value in _LOAD_SAMPLE.findall(text)]
    if not found:
        return None
    waiting = sum(value for name, value in found if name in WAITING_METRICS)
    return EngineLoad(waiting, sum(value for _, value in found) - waiting)


Report = Callable[[Mapping[str, EngineLoad]], None]


class LoadPoller:
    """Reads the load from the engines' metrics while requests arrive, and passes it to `report`.

    An engine that does not respond is missing from the report.
    """

    def __init__(self, report: Report, *, interval_s: float = INTERVAL_S) -> None:
        self._report = report
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._thread: threading.Thread | None = None

    def refresh(self, engines: Collection[str]) -> None:
        """Read the metrics in a thread if the last reading is older than the interval. Returns
        immediately."""
        with self._lock:
            now = time.monotonic()
            busy = self._thread is not None and self._thread.is_alive()
            if busy or now < self._next_s:
                return
            self._next_s = now + self._interval_s
            self._thread = threading.Thread(
                target=self._read, args=(tuple(engines),), name="cornplug-load", daemon=True
            )
            self._thread.start()

    def _read(self, engines: Collection[str]) -> None:
        found: dict[str, EngineLoad] = {}
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=tls_context()) as http:
            for engine in engines:
                load = _fetch_load(http, engine)
                if load is not None:
                    found[engine] = load
        self._report(found)


def _fetch_load(http: httpx.Client, engine: str) -> EngineLoad | None:
    try:
        with http.stream("GET", f"{engine}/metrics") as page:
            if page.status_code != 200:
                return None
            text, end_s = b"", time.monotonic() + _TIMEOUT_S
            for chunk in page.iter_bytes():
                text += chunk
                if len(text) > _MAX_METRICS_BYTES or time.monotonic() > end_s:
                    return None
        return parse_load(text.decode(errors="replace"))
    except (httpx.HTTPError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Hashes of a prompt's leading steps, with which it is compared with other prompts."""

    steps: tuple[int, ...]
    """Hashes of the prompt's first 1, 2, ... steps."""
    conversation: bytes
    """Digest of the prompt up to the user's first message, which is the same in all turns of a
    conversation."""
    tokens: int
    """Estimated number of tokens in the complete prompt."""


NO_PREFIX: Final = PromptPrefix((), b"", 0)
"""Prefix of a request without a prompt."""


def prompt_prefix(body: Mapping[str, Any]) -> PromptPrefix:
    """Return the prefix of the prompt in a chat or completion request."""
    head = _encode_json({name: body[name] for name in _HEAD_FIELDS if body.get(name) is not None})
    parts, first = [head], None
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else [body.get("prompt")]:
        parts.append(_encode_json(_shorten_media(message)))
        if first is None and (not isinstance(message, dict) or message.get("role") == "user"):
            first = len(parts)
    conversation = xxhash.xxh3_128_digest(b"".join(parts[:first])[: 64 * STEP_BYTES])
    text = b"".join(parts)
    return PromptPrefix(tuple(_step_hashes(text)), conversation, -(-len(text) * STEP_TOKENS // STEP_BYTES))


def _step_hashes(text: bytes) -> Iterator[int]:
    running = xxhash.xxh3_64()
    for start in range(0, len(text) - STEP_BYTES + 1, STEP_BYTES):
        running.update(text[start : start + STEP_BYTES])
        yield running.intdigest()


def _encode_json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _shorten_media(value: Any) -> Any:
    """Replace each medium in a message by a repeated digest with the length of `_STEPS_PER_MEDIA_ITEM`
    steps."""
    if isinstance(value, str) and value.startswith("data:"):
        return xxhash.xxh3_128_hexdigest(value.encode()) * (_STEPS_PER_MEDIA_ITEM * STEP_BYTES // 32)
    if isinstance(value, list):
        return [_shorten_media(one) for one in value]
    if isinstance(value, dict):
        if isinstance(sound := value.get("input_audio"), dict) and isinstance(sound.get("data"), str):
            return {**value, "input_audio": _shorten_media(f"data:{sound['data']}")}
        return {name: _shorten_media(one) for name, one in value.items()}
    return value


class PrefixMemory:
    """Remembers the steps of prompts that this client sent to each engine, up to a limit per engine.

    Not thread-safe. `EngineChooser` holds the lock.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._steps: dict[str, OrderedDict[int, None]] = {}

    def engines(self) -> tuple[str, ...]:
        """Return the engines that have received any step."""
        return tuple(self._steps)

    def retain(self, engines: Container[str]) -> None:
        """Remove all engines except `engines`, because a launch has stopped the other engines."""
        for engine in [one for one in self._steps if one not in engines]:
            del self._steps[engine]

    def count_known_steps(self, engine: str, steps: Sequence[int]) -> int:
        """Return the number of leading steps that this engine has received."""
        found = self._steps.get(engine, ())
        for number, step in enumerate(steps):
            if step not in found:
                return number
        return len(steps)

    def remember(self, engine: str, steps: Sequence[int]) -> None:
        """Record that this engine now has the KV of prompts with these steps."""
        found = self._steps.setdefault(engine, OrderedDict())
        # Add steps in reverse order, so that the end of a prompt is forgotten before its beginning.
        for step in reversed(steps):
            found[step] = None
            found.move_to_end(step)
        while len(found) > self._max_steps:
            found.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Forget the steps of an engine whose process ended."""
        self._steps.pop(engine, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissPrice:
    """Speeds with which a client compares a cache miss with a longer queue.

    `cornplug plan` and engine logs report them.
    """

    prefill_tokens_per_s: float = 5_000.0
    load_tokens_per_s: float = 50_000.0
    """Number of tokens per second that an engine loads from the host's store."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "load_tokens_per_s"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ConfigError(
                    f"price.{name}", f"{value} is not a valid speed", "Set tokens per second above 0."
                )


class EngineChooser:
    """Chooses engines from their prefixes, queues and failures as this client observes them. Thread-safe."""

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
        """Number of this client's requests in progress, by engine."""
        self._loads: Mapping[str, EngineLoad] = {}
        self._sent_at_reading: Mapping[str, int] = {}
        """Value of `_sent` when `_loads` was read. The loads include these requests."""
        self._typical_tokens = _INITIAL_TOKENS

    def choose(self, engines: Mapping[str, float], prefix: PromptPrefix, now: float) -> str | None:
        """Choose the engine for a request. Returns None if every engine has failed or requested a pause.

        Among engines with equal prices, the conversation's digest and the weights decide, so that every
        process chooses the same engine.
        """
        with self._lock:
            self._circuits.add_services(engines)
            self._memory.retain(engines)
            ready = [engine for engine in engines if not self._circuits.is_open(engine, now)]
            if not ready:
                return None
            order = endpoints.rank_services(prefix.conversation, engines)
            prices = {engine: self._price_s(engine, engines, prefix) for engine in ready}
            chosen = min(ready, key=lambda engine: (round(prices[engine], 6), order.index(engine)))
            self._circuits.try_use(chosen, now)
            self._record_sent(chosen, prefix)
            return chosen

    def choose_earliest(self, engines: Mapping[str, float], prefix: PromptPrefix) -> str:
        """Choose the engine whose pause ends first, for a request that cannot wait until then."""
        with self._lock:
            chosen = min(engines, key=self._circuits.retry_at)
            self._record_sent(chosen, prefix)
            return chosen

    def opens_at(self, engines: Collection[str]) -> float:
        """Return the time from which one of these engines accepts requests."""
        with self._lock:
            self._circuits.add_services(engines)
            return min(map(self._circuits.retry_at, engines))

    def record_end(self, engine: str) -> None:
        """Record the end of a request that `choose` or `choose_earliest` assigned to this engine."""
        with self._lock:
            self._sent[engine] -= 1

    def record_accepted(self, engine: str, prefix: PromptPrefix) -> None:
        """Record that the engine accepted the request, and now has its prompt."""
        with self._lock:
            self._circuits.record_response(engine)
            self._memory.remember(engine, prefix.steps)

    def record_pause(self, engine: str, now: float, pause_s: float | None) -> None:
        """Record that the engine requested a pause of `pause_s` seconds. None: the engine stated no
        duration."""
        with self._lock:
            self._circuits.record_refusal(engine, now, pause_s)

    def record_failure(self, engine: str, now: float, *, sent: float) -> None:
        """Record that the engine did not respond to the request sent at `sent`.

        Its prefixes are forgotten, because its process may have restarted.
        """
        with self._lock:
            self._circuits.record_failure(engine, now, sent_at=sent)
            self._memory.forget(engine)

    def update_loads(self, loads: Mapping[str, EngineLoad]) -> None:
        """Set the engines' loads from a new reading. Engines that are not in `loads` have no measured
        load."""
        with self._lock:
            self._loads = loads
            self._sent_at_reading = {engine: self._sent[engine] for engine in loads}

    def _record_sent(self, engine: str, prefix: PromptPrefix) -> None:
        self._sent[engine] += 1
        missing = self._missing_tokens(engine, prefix)
        self._typical_tokens += _NEWEST_WEIGHT * (missing - self._typical_tokens)

    def _missing_tokens(self, engine: str, prefix: PromptPrefix) -> float:
        return prefix.tokens - STEP_TOKENS * self._memory.count_known_steps(engine, prefix.steps)

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
        """Return the number of prefill tokens that an engine processes before a new request."""
        load = self._loads.get(engine, EngineLoad(0.0, 0.0))
        since = max(self._sent[engine] - self._sent_at_reading.get(engine, 0), 0)
        return (load.waiting + since) * max(self._typical_tokens, 1.0) + load.running * _RUNNING_TOKENS
