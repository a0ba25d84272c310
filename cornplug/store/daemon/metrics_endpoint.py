"""Prometheus endpoint of the store, served by its own thread.

The daemon's loop provides a snapshot of its counts twice a second, and a scrape renders the latest snapshot.
If the address is in use, the daemon logs an error and serves engines without metrics.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cornplug.metrics import STORE_METRICS
from cornplug.settings import parse_metrics_address
from cornplug.store.daemon.store_counters import (
    AGE_BUCKETS_S,
    REQUEST_BUCKETS_S,
    HistogramSamples,
    StoreSnapshot,
)
from cornplug.store.store_stats import DiskStat, FarStat

MEMORY: Final = "memory"
"""Tier of entries in shared memory."""
DISK: Final = "disk"
"""Tier of entries on disk, whether or not they are also in memory."""
_log = logging.getLogger("cornplug.store")


class MetricsEndpoint:
    """HTTP server for `/metrics` at "HOST:PORT" or "PORT". The reply is empty until the first snapshot.

    Raises OSError if it cannot listen on the address.
    """

    def __init__(self, address: str) -> None:
        self._latest: StoreSnapshot | None = None
        host, port = parse_metrics_address(address)
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(port, host, registry)
        self.port: int = self._server.server_port

    def publish(self, snapshot: StoreSnapshot) -> None:
        """Serve this snapshot from now on."""
        self._latest = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. prometheus_client calls this for each scrape."""
        if self._latest is not None:
            yield from metric_families(self._latest)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def open_endpoint(address: str) -> MetricsEndpoint | None:
    """Open the endpoint. If it cannot listen on the address, log an error and return None."""
    try:
        endpoint = MetricsEndpoint(address)
    except OSError as e:
        _log.error(
            "store.metrics: cannot listen on %s: %s. The store runs without metrics; use a free port",
            address, e.strerror or e,
        )  # fmt: skip
        return None
    _log.info(
        "Prometheus metrics are at http://%s:%d/metrics", parse_metrics_address(address)[0], endpoint.port
    )
    return endpoint


def metric_families(now: StoreSnapshot) -> Iterator[Metric]:
    """Yield all metrics of `STORE_METRICS`, in its order."""
    values = _values(now)
    for name, metric in STORE_METRICS.items():
        if metric.kind == "histogram":
            bounds, samples = _histograms(now)[name]
            yield _histogram(name, bounds, samples)
            continue
        family: CounterMetricFamily | GaugeMetricFamily
        if metric.kind == "counter":
            family = CounterMetricFamily(name, metric.help, labels=metric.labels)
        else:
            family = GaugeMetricFamily(name, metric.help, labels=metric.labels)
        for labels, value in values[name].items():
            family.add_metric(labels, value)
        yield family


def _values(now: StoreSnapshot) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    stat, spaces = now.stat, now.stat.namespaces.items()
    hits: dict[tuple[str, ...], float] = {(name, MEMORY): one.hits for name, one in spaces}
    hits["", MEMORY] = stat.hits - sum(hits.values())
    reserved: dict[tuple[str, ...], float] = {
        (name, outcome): count for name, one in spaces for outcome, count in one.reservations.items()
    }
    removed: dict[tuple[str, ...], float] = {
        (name, MEMORY, cause): count for name, one in spaces for cause, count in one.removals.items()
    }
    series: dict[str, dict[tuple[str, ...], float]] = {
        "cornplug_store_capacity_bytes": {(MEMORY,): stat.capacity_bytes},
        "cornplug_store_memory_bytes": {(): now.memory_bytes},
        "cornplug_store_used_bytes": {(): stat.used_bytes},
        "cornplug_store_bytes": {(name, MEMORY): one.used_bytes for name, one in spaces},
        "cornplug_store_share_bytes": {(name,): one.share_bytes for name, one in spaces},
        "cornplug_store_ceiling_bytes": {(name,): one.ceiling_bytes for name, one in spaces},
        "cornplug_store_app_bytes": {(app,): size for app, size in stat.bytes_by_app.items()},
        "cornplug_store_entries": {(name, MEMORY): one.entries for name, one in spaces},
        "cornplug_store_leases": {(): stat.leases},
        "cornplug_store_open_reservations": {(): stat.reservations},
        "cornplug_store_clients": {(): now.clients},
        "cornplug_store_hits_total": hits,
        "cornplug_store_misses_total": {(): stat.misses},
        "cornplug_store_lookups_total": {("found",): stat.found, ("absent",): stat.absent},
        "cornplug_store_reservations_total": reserved,
        "cornplug_store_removals_total": removed,
        "cornplug_store_disk_used_bytes": {},
        "cornplug_store_disk_queued": {},
        "cornplug_store_disk_writes_total": {},
        "cornplug_store_disk_reads_total": {},
    }
    series |= _far_values(stat.far)
    if stat.disk is not None:
        for name, values in _disk_values(stat.disk).items():
            series[name] |= values
    return series


def _disk_values(disk: DiskStat) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    spaces = disk.namespaces.items()
    removed: dict[tuple[str, ...], float] = {
        (name, DISK, cause): count for name, one in spaces for cause, count in one.removals.items()
    }
    return {
        "cornplug_store_capacity_bytes": {(DISK,): disk.capacity_bytes},
        "cornplug_store_bytes": {(name, DISK): one.used_bytes for name, one in spaces},
        "cornplug_store_entries": {(name, DISK): one.entries for name, one in spaces},
        "cornplug_store_hits_total": {(name, DISK): one.hits for name, one in spaces},
        "cornplug_store_removals_total": removed,
        "cornplug_store_disk_used_bytes": {(): disk.used_bytes},
        "cornplug_store_disk_queued": {(): disk.queued},
        "cornplug_store_disk_writes_total": _by_outcome(disk.writes, "written"),
        "cornplug_store_disk_reads_total": _by_outcome(disk.reads, "read"),
    }


def _far_values(far: Mapping[str, FarStat]) -> dict[str, dict[tuple[str, ...], float]]:
    def counted(counts: Callable[[FarStat], Mapping[str, int]], success: str) -> dict[tuple[str, ...], float]:
        return {
            (label, *outcome): count
            for label, one in far.items()
            for outcome, count in _by_outcome(counts(one), success).items()
        }

    return {
        "cornplug_store_far_up": {(label,): float(one.answers) for label, one in far.items()},
        "cornplug_store_far_queued": {(label,): one.queued for label, one in far.items()},
        "cornplug_store_far_lookups_total": counted(lambda one: one.asks, "found"),
        "cornplug_store_far_reads_total": counted(lambda one: one.reads, "read"),
        "cornplug_store_far_writes_total": counted(lambda one: one.writes, "written"),
        "cornplug_store_far_bytes_total": counted(
            lambda one: {"read": one.read_bytes, "write": one.written_bytes}, "read"
        ),
    }


def _by_outcome(counts: Mapping[str, int], success: str) -> Mapping[tuple[str, ...], float]:
    """Return counts by outcome, with 0 for success, so that `rate()` works from the first count."""
    counted: dict[tuple[str, ...], float] = {(success,): 0.0}
    return counted | {(outcome,): float(count) for outcome, count in counts.items()}


def _histograms(
    now: StoreSnapshot,
) -> Mapping[str, tuple[Sequence[float], Mapping[tuple[str, ...], HistogramSamples]]]:
    return {
        "cornplug_store_eviction_age_seconds": (
            AGE_BUCKETS_S,
            {(name, MEMORY): samples for name, samples in now.eviction_ages.items()},
        ),
        "cornplug_store_request_seconds": (
            REQUEST_BUCKETS_S,
            {(request,): samples for request, samples in now.request_times.items()},
        ),
    }


def _histogram(
    name: str, bounds_s: Sequence[float], samples: Mapping[tuple[str, ...], HistogramSamples]
) -> HistogramMetricFamily:
    metric = STORE_METRICS[name]
    family = HistogramMetricFamily(name, metric.help, labels=metric.labels)
    ends = [*map(str, bounds_s), "+Inf"]
    for labels, (counts, sum_s) in samples.items():
        family.add_metric(labels, list(zip(ends, itertools.accumulate(counts), strict=True)), sum_s)
    return family
