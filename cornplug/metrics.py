"""One table of metric names for every room, and the tally that fills them.

Engine halves cannot own a Prometheus registry (Prometheus does not scrape their process), so they count into
a `Tally`, which the engine's own connector hooks carry to its `/metrics`. The encoder service's names are in
`encoder_service/telemetry/service_metrics.py`. `script/docs` makes docs/metrics.md of both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Labels = tuple[str, ...]


class Metric(NamedTuple):
    kind: Literal["counter", "histogram"]
    help: str
    labels: Labels


WAIT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

METRICS: Mapping[str, Metric] = {
    "cornplug_hits_total": Metric(
        "counter",
        "Items that the engine took from outside: KV pages or embeddings, by source.",
        ("app", "what", "source"),
    ),
    "cornplug_misses_total": Metric(
        "counter",
        "Items that the engine computes itself although cornplug was asked, by reason.",
        ("app", "what", "reason"),
    ),
    "cornplug_bytes_total": Metric(
        "counter", "Payload bytes moved, by direction (load, save).", ("app", "what", "direction")
    ),
    "cornplug_saves_total": Metric(
        "counter", "Items offered to the store, by outcome.", ("app", "what", "outcome")
    ),
    "cornplug_saved_tokens_total": Metric(
        "counter", "Prompt tokens whose prefill was skipped thanks to pages.", ("app",)
    ),
    "cornplug_saved_tower_passes_total": Metric(
        "counter", "Media for which this engine ran no tower.", ("app",)
    ),
    "cornplug_wait_seconds": Metric(
        "histogram", "Seconds that a request waited for shared bytes.", ("app", "what")
    ),
}

LABELS: Mapping[str, str] = {
    "app": "The app: `engine.app` of an engine, `x-cornplug-app` of an HTTP request. The service counts apps "
    'beyond the 64th as "other".',
    "what": '"kv_page" or "embedding".',
    "source": '"store", or the service, with the origin: "service_computed", "service_coalesced", '
    '"service_cached", "service_epd" (SGLang\'s protocol).',
    "reason": "Why; docs/troubleshooting.md has every value.",
    "direction": '"load" or "save".',
    "outcome": "The result; docs/troubleshooting.md has every value.",
    "qos": "The class of service.",
    "origin": '"computed" for this request, "coalesced" with another request in flight, or "cached".',
    "stage": '"preprocess", "prepare", "queue", "compute" or "publish".',
    "state": '"alive" or "dead".',
    "replica": "The number of the replica, from 0.",
    "device": "The device of the replica.",
    "model": "The model's name, as the service was started with.",
    "family": "The model's family.",
    "identity": "The model identity: digest of tower, projector and settings.",
    "tower_fp": "The tower's fingerprint.",
    "projector_fp": "The projector's fingerprint.",
    "spec_fp": "The fingerprint of the settings that change the result.",
    "dtype": "The dtype in which the tower runs.",
    "epoch": "The number of reloads of the model.",
}
"""Label -> its meaning."""


class Tally:
    """Thread-safe counts until the next drain. Keys are (metric, label values)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        self._samples: dict[tuple[str, Labels], list[float]] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add `by` to a counter. Raises KeyError or ValueError for a name or labels unknown here."""
        self._check(name, labels, "counter")
        with self._lock:
            self._counts[name, labels] = self._counts.get((name, labels), 0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one sample to a histogram."""
        self._check(name, labels, "histogram")
        with self._lock:
            self._samples.setdefault((name, labels), []).append(value)

    def drain(self) -> dict[str, list[tuple[Labels, list[float]]]]:
        """Everything since the last drain, in a form that msgpack and pickle-free IPC carry:
        metric -> [(label values, [increment] or samples)]."""
        with self._lock:
            counts, self._counts = self._counts, {}
            samples, self._samples = self._samples, {}
        out: dict[str, list[tuple[Labels, list[float]]]] = {}
        for (name, labels), value in counts.items():
            out.setdefault(name, []).append((labels, [value]))
        for (name, labels), values in samples.items():
            out.setdefault(name, []).append((labels, values))
        return out

    @staticmethod
    def _check(name: str, labels: Iterable[str], kind: str) -> None:
        metric = METRICS[name]
        if metric.kind != kind or len(tuple(labels)) != len(metric.labels):
            raise ValueError(f"{name} is a {metric.kind} with labels {metric.labels}")
