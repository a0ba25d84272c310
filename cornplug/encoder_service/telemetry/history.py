"""The last fifteen minutes in steps of one second: differences of `ServiceMetrics` between two samples."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final

import msgspec
from prometheus_client import Counter, Histogram

from cornplug.encoder_service.telemetry.service_metrics import ServiceMetrics

PERIOD_S: Final = 1.0
KEPT: Final = 900

Series = dict[tuple[str, ...], float]


class HistorySample(msgspec.Struct, frozen=True):
    """Counts of the `seconds` before `at_s`. Queue lengths are those at the end."""

    seq: int
    at_s: float
    """Unix time."""
    seconds: float
    answers: dict[str, int]
    """Results by origin: computed, coalesced, cached."""
    refusals: dict[str, int]
    """Refusals by class."""
    queue: dict[str, int]
    """Requests waiting for a batch, by class."""
    waiting: int
    batches: int
    media: int
    """Media computed by a tower."""
    tokens: int
    """Tokens computed by a tower."""
    busy_s: float
    """Compute seconds of the batches that ended. Divided by `seconds` and executors, this is the
    utilisation."""
    p50_s: float | None
    """Median seconds from receipt to reply, None without replies."""
    p95_s: float | None
    store_failures: int


class ServiceHistory:
    """Ring of at most `kept` samples. For one event loop."""

    def __init__(
        self,
        meters: ServiceMetrics,
        *,
        period_s: float = PERIOD_S,
        kept: int = KEPT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.period_s: Final = period_s
        self._meters = meters
        self._clock = clock
        self._samples: deque[HistorySample] = deque(maxlen=kept)
        self._seq = 0
        self._last_s = clock()
        kinds = ("answers", "refusals", "computed", "failures")
        self._before: dict[str, Series] = {kind: {} for kind in kinds}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that takes a sample once per period."""
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    def since(self, seq: int) -> Sequence[HistorySample]:
        """Return the samples after number `seq`, oldest first. With 0, returns all kept samples."""
        return [sample for sample in self._samples if sample.seq > seq]

    def sample(self) -> HistorySample:
        """Take and keep one sample."""
        meters = self._meters
        now = self._clock()
        answers = self._new("answers", totals(meters.answers))
        refusals = self._new("refusals", totals(meters.refusals))
        computed = self._new(
            "computed",
            {
                ("media",): sum(totals(meters.tower_passes).values()),
                ("tokens",): sum(totals(meters.tower_tokens).values()),
                ("batches",): _of(meters.tower_seconds, "_count"),
                ("busy_s",): _of(meters.tower_seconds, "_sum"),
            },
        )
        failures = self._new("failures", totals(meters.store_failures))
        latest = sorted(meters.recent_s.popleft() for _ in range(len(meters.recent_s)))
        self._seq += 1
        sample = HistorySample(
            seq=self._seq,
            at_s=now,
            seconds=max(now - self._last_s, 0.001),
            answers=_by(answers, place=1),
            refusals=_by(refusals, place=1),
            queue={qos: requests for qos, (requests, _) in meters.gauges.queue().items()},
            waiting=int(meters.gauges.waiting()),
            batches=int(computed["batches",]),
            media=int(computed["media",]),
            tokens=int(computed["tokens",]),
            busy_s=round(computed["busy_s",], 6),
            p50_s=quantile(latest, 0.5),
            p95_s=quantile(latest, 0.95),
            store_failures=int(sum(failures.values())),
        )
        self._last_s = now
        self._samples.append(sample)
        return sample

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.period_s)
            self.sample()

    def _new(self, name: str, now: Series) -> Series:
        before, self._before[name] = self._before[name], now
        return {labels: value - before.get(labels, 0.0) for labels, value in now.items()}


def totals(counter: Counter) -> Series:
    """Return a counter's values by its label values."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def quantile(ordered: Sequence[float], part: float) -> float | None:
    """Return the nearest-rank quantile of sorted values, or None if there are none."""
    if not ordered:
        return None
    return round(ordered[max(math.ceil(part * len(ordered)) - 1, 0)], 6)


def _of(histogram: Histogram, suffix: str) -> float:
    samples = (sample for family in histogram.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith(suffix))


def _by(series: Series, *, place: int) -> dict[str, int]:
    out: dict[str, int] = {}
    for labels, value in series.items():
        if value:
            out[labels[place]] = out.get(labels[place], 0) + int(value)
    return out


def largest(values: Iterable[tuple[str, int]], limit: int) -> list[tuple[str, int]]:
    """Return the pairs with the `limit` largest values, in descending order."""
    return sorted(values, key=lambda pair: (-pair[1], pair[0]))[:limit]
