"""Names and help texts of metrics, and the `Tally` that counts in engine processes.

Prometheus does not scrape the engine processes in which the connectors run. The connectors therefore count
into a `Tally`, and the engine's connector API carries the counts to the engine's `/metrics`. The store fills
`STORE_METRICS` from snapshots of its counters (`store/daemon/metrics_endpoint.py`). Metrics of the encoder
service are in `encoder_service/service_metrics.py`. `script/docs` generates docs/metrics.md from all tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Labels = tuple[str, ...]


class Metric(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Labels
    values: str = ""
    """Values of the label `outcome` or `reason`, unless docs/troubleshooting.md explains the values."""


WAIT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

METRICS: Mapping[str, Metric] = {
    "cornplug_hits_total": Metric(
        "counter",
        "KV pages or embeddings that the engine did not compute itself.",
        ("app", "kind", "source"),
    ),
    "cornplug_misses_total": Metric(
        "counter",
        "KV pages or embeddings that the engine computes itself.",
        ("app", "kind", "reason"),
    ),
    "cornplug_bytes_total": Metric("counter", "Payload bytes loaded or saved.", ("app", "kind", "direction")),
    "cornplug_saves_total": Metric(
        "counter",
        "KV pages and embeddings that the engine offered to the store.",
        ("app", "kind", "outcome"),
    ),
    "cornplug_staged_pages_total": Metric(
        "counter",
        "KV pages that vLLM copied through a CPU buffer, because the GPU driver could not access the store. "
        "A few such pages are normal while the store grows.",
        ("app",),
    ),
    "cornplug_saved_tokens_total": Metric(
        "counter", "Prompt tokens that were loaded instead of prefilled.", ("app",)
    ),
    "cornplug_saved_tower_passes_total": Metric(
        "counter", "Media for which this engine did not run its tower.", ("app",)
    ),
    "cornplug_early_prefills_total": Metric(
        "counter",
        "Media that arrived after vLLM prefilled the tokens before them.",
        ("app",),
    ),
    "cornplug_wait_seconds": Metric(
        "histogram", "Seconds that a request waited for shared data.", ("app", "kind")
    ),
}

STORE_METRICS: Mapping[str, Metric] = {
    "cornplug_store_capacity_bytes": Metric("gauge", "Maximum bytes in memory or on disk.", ("tier",)),
    "cornplug_store_memory_bytes": Metric("gauge", "Shared memory allocated so far.", ()),
    "cornplug_store_used_bytes": Metric("gauge", "Memory used, including reservations of dead writers.", ()),
    "cornplug_store_bytes": Metric("gauge", "Bytes used by a namespace.", ("namespace", "tier")),
    "cornplug_store_share_bytes": Metric("gauge", "Bytes guaranteed to a namespace.", ("namespace",)),
    "cornplug_store_ceiling_bytes": Metric(
        "gauge", "Maximum bytes that a namespace can use.", ("namespace",)
    ),
    "cornplug_store_app_bytes": Metric(
        "gauge",
        'Bytes used by an app. Apps beyond the 256 largest are summed as "(others)".',
        ("app",),
    ),
    "cornplug_store_entries": Metric(
        "gauge", "Number of entries. An entry can be in both tiers.", ("namespace", "tier")
    ),
    "cornplug_store_leases": Metric("gauge", "Leases held by readers.", ()),
    "cornplug_store_open_reservations": Metric("gauge", "Entries that are being written.", ()),
    "cornplug_store_clients": Metric("gauge", "Connected processes.", ()),
    "cornplug_store_hits_total": Metric(
        "counter",
        "Entries read.",
        ("namespace", "tier"),
    ),
    "cornplug_store_misses_total": Metric("counter", "Absent keys that a client tried to read.", ()),
    "cornplug_store_lookups_total": Metric(
        "counter",
        "Keys looked up in the shared table. An engine repeats the lookup of a waiting request in each step.",
        ("outcome",),
        '"found", "absent".',
    ),
    "cornplug_store_reservations_total": Metric(
        "counter",
        "Requests for memory to write an entry.",
        ("namespace", "outcome"),
        '"given", "present", "pending", "growing", "first_sight", "full", "too_large".',
    ),
    "cornplug_store_removals_total": Metric(
        "counter",
        "Entries removed.",
        ("namespace", "tier", "reason"),
        '"evicted", "expired" (`ttl_s`), "deleted", "purged", "damaged" (on disk).',
    ),
    "cornplug_store_eviction_age_seconds": Metric(
        "histogram", "Seconds from an entry's last use to its eviction.", ("namespace", "tier")
    ),
    "cornplug_store_disk_used_bytes": Metric("gauge", "Bytes of the files on disk.", ()),
    "cornplug_store_disk_queued": Metric("gauge", "Entries waiting to be written.", ()),
    "cornplug_store_disk_writes_total": Metric(
        "counter",
        "Attempts to write to disk.",
        ("outcome",),
        '"written"; "gone": evicted or deleted before; "dropped": the queue was full; "too_large"; '
        '"disk_full", "disk_readonly", "disk_error": an error, after which writes pause for 5 s; "ceiling": '
        "the pinned namespace is full.",
    ),
    "cornplug_store_disk_reads_total": Metric(
        "counter",
        "Attempts to read from disk into memory.",
        ("outcome",),
        '"read"; "full", "too_large": no memory; "pending": the entry is being written; "refused": too many '
        'concurrent reads; "damaged": the record failed authentication and was discarded; "disk_error"; '
        '"late": the entry was deleted during the read.',
    ),
    "cornplug_store_far_up": Metric("gauge", "1 if the far store responds, else 0.", ("far",)),
    "cornplug_store_far_queued": Metric("gauge", "Entries waiting to be written.", ("far",)),
    "cornplug_store_far_lookups_total": Metric(
        "counter",
        "Keys looked up.",
        ("far", "outcome"),
        '"found"; "absent"; "error": no response; "dropped": the queue was full.',
    ),
    "cornplug_store_far_reads_total": Metric(
        "counter",
        "Attempts to read from a far store into memory.",
        ("far", "outcome"),
        '"gone": no longer in the far store, or older than `ttl_s`; "error"; others as for reads from disk.',
    ),
    "cornplug_store_far_writes_total": Metric(
        "counter",
        "Attempts to write to a far store.",
        ("far", "outcome"),
        '"written"; "present": another host wrote it; "gone": evicted before; "dropped": the queue was full; '
        '"too_large" for this type of far store; "error".',
    ),
    "cornplug_store_far_bytes_total": Metric(
        "counter", "Encrypted bytes read or written.", ("far", "direction")
    ),
    "cornplug_store_request_seconds": Metric(
        "histogram", "Seconds that the store's thread spent on one request.", ("request",)
    ),
}
"""Metrics of the store, at its own `/metrics` (`store.metrics`)."""

LABELS: Mapping[str, str] = {
    "app": "`engine.app`, or `x-cornplug-app` of an HTTP request. The encoder service counts apps beyond the "
    '64th as "other".',
    "kind": '"kv_page" or "embedding".',
    "source": '"store", or the origin of the encoder service: "service_computed", "service_coalesced", '
    '"service_cached", "service_epd" (SGLang\'s protocol).',
    "reason": "Reason. The values are explained beside the series or in docs/troubleshooting.md.",
    "direction": '"load" or "save"; for far stores "read" or "write".',
    "outcome": "Result. The values are explained beside the series or in docs/troubleshooting.md.",
    "namespace": "[Namespace](deploy-one-host.md#divide-resources-between-applications) of the store, or "
    '"" if it is unknown.',
    "tier": '"memory" or "disk". A hit on disk loads the entry into memory, and then counts as a hit there '
    "too.",
    "far": "URL of the far store, without user and password.",
    "request": "Type of message.",
    "qos": "Class of service.",
    "origin": '"computed" for this request, "coalesced" with another request in flight, or "cached".',
    "stage": '"preprocess", "prepare", "queue", "compute" or "publish".',
    "state": '"alive" or "dead".',
    "replica": "Number of the replica, from 0.",
    "device": "Device of the replica.",
    "model": "Name of the model, as passed to the service.",
    "family": "Family of the model.",
    "identity": "Digest of tower, projector and settings.",
    "tower_fp": "Fingerprint of the tower.",
    "projector_fp": "Fingerprint of the projector.",
    "spec_fp": "Fingerprint of the settings that change the result.",
    "dtype": "Dtype in which the tower runs.",
    "epoch": "Number of times that the model was reloaded.",
}
"""Meaning of each label."""


class Tally:
    """Thread-safe counters and histogram samples since the last `drain`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        self._samples: dict[tuple[str, Labels], list[float]] = {}

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add `amount` to a counter.

        Raises KeyError for an unknown metric, and ValueError for a wrong number of labels or another kind.
        """
        self._check_metric(name, labels, "counter")
        with self._lock:
            self._counts[name, labels] = self._counts.get((name, labels), 0) + amount

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one sample to a histogram."""
        self._check_metric(name, labels, "histogram")
        with self._lock:
            self._samples.setdefault((name, labels), []).append(value)

    def drain(self) -> dict[str, list[tuple[Labels, list[float]]]]:
        """Return and reset the counts: metric -> [(label values, [increment] or samples)].

        The result can be encoded by msgpack and sent over IPC without pickle.
        """
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
    def _check_metric(name: str, labels: Iterable[str], kind: str) -> None:
        metric = METRICS[name]
        if metric.kind != kind or len(tuple(labels)) != len(metric.labels):
            raise ValueError(f"{name} is a {metric.kind} with labels {metric.labels}")
