"""Metrics of the service, which `/metrics` returns.

The number of label values is bounded. Classes come from the configuration, and reasons from the code. Clients
choose app names, so only the first `APPS_MAX` names get their own series. All other names are counted as
"other".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from cornplug.encoder_service.formats.messages import ServedModel
from cornplug.metrics import WAIT_BUCKETS_S

Stage = Literal["preprocess", "prepare", "queue", "compute", "publish"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
OTHER: Final = "other"
APPS_MAX: Final = 64
_ITEMS: Final = (1, 2, 4, 8, 16, 32, 64)
_TOKENS: Final = (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

Queue = Mapping[str, tuple[int, int]]
"""(number of requests that wait, their number of tokens), by class."""


class BoundedLabels:
    """Limits the number of label values that clients choose. Values in `known` and further values, up to
    `limit` in total, keep their name. All other values become "other"."""

    def __init__(self, limit: int, known: Iterable[str] = ()) -> None:
        self._limit = limit
        self._seen = set(known)
        self._lock = threading.Lock()

    def label_for(self, value: str) -> str:
        """Return the label under which `value` is counted."""
        with self._lock:
            if value in self._seen:
                return value
            if len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(value)
            return value


@dataclass(frozen=True, slots=True)
class ServiceGauges:
    """Functions that return current values of one service. They are called at each scrape and must not
    block."""

    waiting_requests: Callable[[], float]
    queue_by_class: Callable[[], Queue] = dict
    predicted_s_by_class: Callable[[], Mapping[str, float]] = dict
    decode_queue_by_class: Callable[[], Queue] = dict
    prepared_bytes: Callable[[], int] = lambda: 0
    models: Callable[[], Sequence[ServedModel]] = tuple
    executors: Callable[[], tuple[int, int]] = lambda: (1, 1)
    """(number of ready executors, total number of executors)."""


class ServiceMetrics:
    """Gauges, counters and histograms of one service, in a separate registry. Thread-safe."""

    def __init__(
        self,
        gauges: ServiceGauges,
        *,
        classes: Sequence[str] = ("default",),
        known_apps: Iterable[str] = (),
    ) -> None:
        registry = CollectorRegistry()
        self.registry: Final = registry
        self.gauges: Final = gauges
        self.classes: Final = tuple(classes)
        self._apps = BoundedLabels(APPS_MAX, known_apps)
        registry.register(_LiveGauges(self))
        self.batch_items = Histogram(
            "cornplug_encoder_batch_items", "Media per batch.", buckets=_ITEMS, registry=registry
        )
        self.batch_tokens = Histogram(
            "cornplug_encoder_batch_tokens", "Tokens per batch.", buckets=_TOKENS, registry=registry
        )
        self.tower_passes = Counter(
            "cornplug_encoder_tower_passes_total",
            "Number of media items that towers computed.",
            registry=registry,
        )
        self.tower_tokens = Counter(
            "cornplug_encoder_tower_tokens_total", "Number of tokens that towers computed.", registry=registry
        )
        self.tower_seconds = Histogram(
            "cornplug_encoder_tower_seconds",
            "Seconds per batch in tower and projectors.",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self.replies = Counter(
            "cornplug_encoder_answers_total",
            "Embeddings returned.",
            ("app", "origin", "qos"),
            registry=registry,
        )
        self.refusals = Counter(
            "cornplug_encoder_refusals_total",
            "Requests refused.",
            ("reason", "qos"),
            registry=registry,
        )
        self.seconds = Histogram(
            "cornplug_encoder_seconds",
            "Seconds from the receipt of a request to its reply.",
            ("qos",),
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self.stages = Histogram(
            "cornplug_encoder_stage_seconds",
            "Seconds per stage: preprocess (HTTP only), prepare, queue (wait for a batch), compute (tower, "
            "projectors), publish (save in store).",
            ("stage",),
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self.store_failures = Counter(
            "cornplug_encoder_store_failures_total",
            "Number of failed calls to the store. The embedding was returned anyway.",
            ("reason",),
            registry=registry,
        )
        self.decoders_killed = Counter(
            "cornplug_encoder_decoders_killed_total",
            "Number of decoding processes that ended during an item: too_slow (30 s), too_late (deadline), "
            "gone (client disconnected), crashed, stopping.",
            ("reason",),
            registry=registry,
        )
        # Create these series with value 0, because Prometheus' rate() needs a first value.
        for stage in STAGES:
            self.stages.labels(stage)
        for qos in self.classes:
            self.seconds.labels(qos)

    def count_reply(self, app: str, qos: str, origin: str, seconds: float) -> None:
        """Count one embedding that was returned `seconds` after the receipt of its request."""
        self.replies.labels(self._apps.label_for(app), origin, qos).inc()
        self.seconds.labels(qos).observe(seconds)

    def count_refusal(self, reason: str, qos: str = "default") -> None:
        """Count one refused request."""
        self.refusals.labels(reason, qos).inc()

    def count_batch(self, items: int, tokens: int, seconds: float) -> None:
        """Count one batch of a tower."""
        self.batch_items.observe(items)
        self.batch_tokens.observe(tokens)
        self.tower_passes.inc(items)
        self.tower_tokens.inc(tokens)
        self.tower_seconds.observe(seconds)

    def render_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LiveGauges:
    """Gauges that are read at each scrape, so that the series of an unloaded model disappear."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        meters = self._metrics
        yield GaugeMetricFamily(
            "cornplug_encoder_waiting",
            "Number of admitted requests without a reply.",
            value=meters.gauges.waiting_requests(),
        )
        requests = GaugeMetricFamily(
            "cornplug_encoder_queue_requests", "Number of requests that wait for a batch.", labels=("qos",)
        )
        tokens = GaugeMetricFamily(
            "cornplug_encoder_queue_tokens", "Number of tokens that wait for a batch.", labels=("qos",)
        )
        waiting = {**dict.fromkeys(meters.classes, (0, 0)), **meters.gauges.queue_by_class()}
        for qos, (count, size) in waiting.items():
            requests.add_metric((qos,), count)
            tokens.add_metric((qos,), size)
        yield requests
        yield tokens
        preparing = GaugeMetricFamily(
            "cornplug_encoder_preparing_requests",
            "Number of media items that wait to be decoded.",
            labels=("qos",),
        )
        for qos, (count, _) in {
            **dict.fromkeys(meters.classes, (0, 0)),
            **meters.gauges.decode_queue_by_class(),
        }.items():
            preparing.add_metric((qos,), count)
        yield preparing
        yield GaugeMetricFamily(
            "cornplug_encoder_prepared_bytes",
            "Bytes of preprocessed media.",
            value=meters.gauges.prepared_bytes(),
        )
        predicted = GaugeMetricFamily(
            "cornplug_encoder_predicted_seconds",
            "Predicted seconds until the reply for an item like the last item of its class. 0 if the class "
            "had no item in the last 10 s.",
            labels=("qos",),
        )
        for qos, seconds in meters.gauges.predicted_s_by_class().items():
            predicted.add_metric((qos,), seconds)
        yield predicted
        executors = GaugeMetricFamily(
            "cornplug_encoder_executors", "Number of executors, which run batches.", labels=("state",)
        )
        alive, total = meters.gauges.executors()
        executors.add_metric(("alive",), alive)
        executors.add_metric(("dead",), total - alive)
        yield executors
        yield _model_info(meters.gauges.models())

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _model_info(models: Sequence[ServedModel]) -> Metric:
    names = ("model", "family", "identity", "tower_fp", "projector_fp", "spec_fp", "dtype", "epoch")
    info = GaugeMetricFamily(
        "cornplug_encoder_model_info", "1 for each served model, with fingerprints in hex.", labels=names
    )
    for m in models:
        digests = (digest.hex() for digest in (m.identity, m.tower_fp, m.projector_fp, m.spec_fp))
        info.add_metric((m.name, m.family, *digests, m.dtype, str(m.epoch)), 1)
    return info


def counter_totals(counter: Counter) -> dict[tuple[str, ...], float]:
    """Return the values of a counter, by label values."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
