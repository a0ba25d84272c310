"""What the service shows at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cornplug.metrics import WAIT_BUCKETS_S


class Meters:
    """Counters of one service, in a registry of its own."""

    def __init__(self, waiting: Callable[[], float]) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        Gauge(
            "cornplug_encoder_waiting", "Requests admitted and not answered yet.", registry=registry
        ).set_function(waiting)
        self.batch_items = Histogram(
            "cornplug_encoder_batch_items",
            "Media in one tower pass.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.tower_passes = Counter(
            "cornplug_encoder_tower_passes_total", "Media that a tower was run for.", registry=registry
        )
        self.answers = Counter(
            "cornplug_encoder_answers_total",
            "Embeddings answered, by who ran the tower (ran, joined, reused) and class of service.",
            ("app", "tower", "qos"),
            registry=registry,
        )
        self.refusals = Counter(
            "cornplug_encoder_refusals_total",
            "Requests refused, by reason and class of service.",
            ("reason", "qos"),
            registry=registry,
        )
        self.seconds = Histogram(
            "cornplug_encoder_seconds",
            "Seconds from receipt to answer.",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self.store_failures = Counter(
            "cornplug_encoder_store_failures_total",
            "Calls of the store that failed; the embedding was served all the same.",
            ("reason",),
            registry=registry,
        )

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
