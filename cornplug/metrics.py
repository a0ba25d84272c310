"""One table of metric names for every room, and the tally that fills them.

Engine halves cannot own a Prometheus registry (Prometheus does not scrape their process), so they count into
a `Tally`, which the engine's own connector hooks carry to its `/metrics`. The encoder service's names are in
`encoder_service/telemetry/service_metrics.py`; the store fills its own table from copies of its counts
(`store/daemon/metrics_endpoint.py`). `script/docs` makes docs/metrics.md of all.
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
    "cornplug_staged_pages_total": Metric(
        "counter",
        "KV pages that a CPU copied on their way to or from a GPU of vLLM, as its driver did not reach the "
        "store's memory; a growing store has some.",
        ("app",),
    ),
    "cornplug_saved_tokens_total": Metric(
        "counter", "Prompt tokens whose prefill was skipped thanks to pages.", ("app",)
    ),
    "cornplug_saved_tower_passes_total": Metric(
        "counter", "Media for which this engine ran no tower.", ("app",)
    ),
    "cornplug_early_prefills_total": Metric(
        "counter",
        "Media on their way that vLLM did not wait for: it prefilled the tokens before them.",
        ("app",),
    ),
    "cornplug_wait_seconds": Metric(
        "histogram", "Seconds that a request waited for shared bytes.", ("app", "what")
    ),
}

STORE_METRICS: Mapping[str, Metric] = {
    "cornplug_store_capacity_bytes": Metric(
        "gauge", "Upper bound of payload bytes, on disk of the bytes of files.", ("tier",)
    ),
    "cornplug_store_memory_bytes": Metric("gauge", "Shared memory that the store has set aside so far.", ()),
    "cornplug_store_used_bytes": Metric(
        "gauge", "Memory that entries, reservations and quarantined rooms have.", ()
    ),
    "cornplug_store_bytes": Metric(
        "gauge", "Room that a namespace's entries and reservations have.", ("namespace", "tier")
    ),
    "cornplug_store_share_bytes": Metric("gauge", "Room that a namespace is guaranteed.", ("namespace",)),
    "cornplug_store_ceiling_bytes": Metric("gauge", "Room that a namespace never exceeds.", ("namespace",)),
    "cornplug_store_app_bytes": Metric(
        "gauge",
        'Room that an app\'s entries and reservations have: of the 256 largest, the others as "(others)".',
        ("app",),
    ),
    "cornplug_store_entries": Metric(
        "gauge", "Entries; those in memory and on disk count in both.", ("namespace", "tier")
    ),
    "cornplug_store_leases": Metric("gauge", "Leases that readers hold.", ()),
    "cornplug_store_open_reservations": Metric("gauge", "Entries that are being written.", ()),
    "cornplug_store_clients": Metric("gauge", "Connected processes.", ()),
    "cornplug_store_hits_total": Metric(
        "counter",
        "Entries read, by lease or by copy; copies are counted by their readers.",
        ("namespace", "tier"),
    ),
    "cornplug_store_misses_total": Metric(
        "counter", "Keys asked for by lease or copy that were absent: no entry names their namespace.", ()
    ),
    "cornplug_store_lookups_total": Metric(
        "counter",
        "Keys that clients looked up in the shared table before they decide on a read; an engine looks up a "
        "waiting request again at each step.",
        ("result",),
    ),
    "cornplug_store_reservations_total": Metric(
        "counter", "Keys for which a writer asked for room, by answer.", ("namespace", "answer")
    ),
    "cornplug_store_removals_total": Metric(
        "counter", "Entries that left the store, by cause.", ("namespace", "tier", "cause")
    ),
    "cornplug_store_eviction_age_seconds": Metric(
        "histogram", "Seconds from an evicted entry's last use to its eviction.", ("namespace", "tier")
    ),
    "cornplug_store_disk_used_bytes": Metric("gauge", "Bytes of the disk's files.", ()),
    "cornplug_store_disk_queued": Metric("gauge", "Entries that wait to be written to disk.", ()),
    "cornplug_store_disk_writes_total": Metric(
        "counter", "Entries that were to be written to disk, by outcome.", ("write",)
    ),
    "cornplug_store_disk_reads_total": Metric(
        "counter", "Entries that were recalled from disk into memory, by outcome.", ("read",)
    ),
    "cornplug_store_far_up": Metric(
        "gauge", "1 while a far store answers; 0: nothing is asked of it for now.", ("far",)
    ),
    "cornplug_store_far_queued": Metric("gauge", "Entries that wait to be written to a far store.", ("far",)),
    "cornplug_store_far_lookups_total": Metric(
        "counter", "Keys for which a far store was asked, by answer.", ("far", "found")
    ),
    "cornplug_store_far_reads_total": Metric(
        "counter", "Entries that were to be read from a far store into memory, by outcome.", ("far", "fetch")
    ),
    "cornplug_store_far_writes_total": Metric(
        "counter", "Entries that were to be written to a far store, by outcome.", ("far", "put")
    ),
    "cornplug_store_far_bytes_total": Metric(
        "counter", "Bytes of sealed records that came from a far store, or went there.", ("far", "way")
    ),
    "cornplug_store_answer_seconds": Metric(
        "histogram", "Seconds of the store's thread for one answer.", ("request",)
    ),
}
"""Of the store, at its own `/metrics` (`store.metrics`)."""

LABELS: Mapping[str, str] = {
    "app": "The app: `engine.app` of an engine, `x-cornplug-app` of an HTTP request. The service counts apps "
    'beyond the 64th as "other".',
    "what": '"kv_page" or "embedding".',
    "source": '"store", or the service, with the origin: "service_computed", "service_coalesced", '
    '"service_cached", "service_epd" (SGLang\'s protocol).',
    "reason": "Why; docs/troubleshooting.md has every value.",
    "direction": '"load" or "save".',
    "outcome": "The result; docs/troubleshooting.md has every value.",
    "namespace": "A namespace of the store "
    "([settings](deploy-one-host.md#divide-resources-between-applications)); "
    '"" where an entry was gone before the store learned of its reading.',
    "tier": 'Where the bytes lie: "memory", or "disk" of a store that has one. Hits on disk are entries that '
    "came back into memory; their reads count in memory too.",
    "write": '"written"; "gone": evicted or deleted before its turn; "dropped": too many waited; '
    '"too_large"; "disk_full", "disk_readonly", "disk_error": the disk refused it, and writes pause for 5 s; '
    '"ceiling": its pinned namespace is at its ceiling.',
    "read": '"read"; "full", "too_large" or "pending": no room in memory, or a writer has some; "refused": '
    'too many at once; "damaged": its seal is not right, and it is forgotten; "disk_error"; "late": deleted '
    "meanwhile.",
    "far": "The far store's URL, without user and password.",
    "found": '"found"; "absent"; "error": it did not answer; "dropped": too many waited.',
    "fetch": '"read"; "gone": it has it no longer, or `ttl_s` is over; "damaged": its seal is not right; '
    '"error"; "refused": too many at once; "late": deleted meanwhile; or as for `read`.',
    "put": '"written"; "present": another host wrote it; "gone": evicted before its turn; "dropped": too '
    'many waited; "too_large" for this kind of far store; "error".',
    "way": '"read" or "written".',
    "result": '"found" or "absent".',
    "answer": '"given", "present", "pending", "growing", "first_sight", "full" or "too_large".',
    "cause": '"evicted", "expired" (`ttl_s` of its namespace), "deleted", "purged" (`cornplug store purge`), '
    '"damaged" (on disk).',
    "request": "The kind of message.",
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
