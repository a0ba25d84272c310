"""Reports cornplug's counters through vLLM's connector hooks on the engine's `/metrics`.

The KV connector and the encoder-cache (EC) connector report the same metric names, so both share one set of
Prometheus collectors. vLLM passes the classes for the collectors: Prometheus's own classes, or Ray's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from cornplug.metrics import METRICS, WAIT_BUCKETS_S, Tally


class _TallyStats:
    """Base class of `KVStats` and `ECStats`. `data` has the form that `Tally.drain` returns."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> Any:
        for name, rows in other.data.items():
            self.data.setdefault(name, []).extend(rows)
        return self

    def reduce(self) -> dict[str, int | float]:
        totals: dict[str, int | float] = {}
        for name, rows in self.data.items():
            if METRICS[name].kind == "counter":
                for labels, values in rows:
                    key = f"{name.removeprefix('cornplug_').removesuffix('_total')}{{{','.join(labels[1:])}}}"
                    totals[key] = totals.get(key, 0) + sum(values)
        return totals

    def is_empty(self) -> bool:
        return not self.data


class KVStats(_TallyStats, KVConnectorStats):
    """Metric counts of cornplug's KV connector, in the form that vLLM sends from its workers and
    scheduler."""


class ECStats(_TallyStats, ECConnectorStats):
    """Metric counts of cornplug's encoder-cache connector, in the form that vLLM sends from its workers and
    scheduler."""


def drain_kv(tally: Tally) -> KVStats | None:
    """Return the KV connector's metric counts since the last call, or None if nothing was counted."""
    data = tally.drain()
    return KVStats(data=data) if data else None


def drain_ec(tally: Tally) -> ECStats | None:
    """Return the encoder-cache connector's metric counts since the last call, or None if nothing was
    counted."""
    data = tally.drain()
    return ECStats(data=data) if data else None


_collectors: dict[tuple[type, tuple[str, ...]], dict[str, Any]] = {}


def _collectors_for(metric_types: Mapping[Any, Any], labelnames: list[str]) -> dict[str, Any]:
    counter, histogram = metric_types[Counter], metric_types[Histogram]
    key = (counter, tuple(labelnames))
    if key not in _collectors:
        made: dict[str, Any] = {}
        for name, metric in METRICS.items():
            names = [*labelnames, *metric.labels]
            if metric.kind == "counter":
                made[name] = counter(name=name, documentation=metric.help, labelnames=names)
            else:
                made[name] = histogram(
                    name=name, documentation=metric.help, labelnames=names, buckets=list(WAIT_BUCKETS_S)
                )
        _collectors[key] = made
    return _collectors[key]


class _PromMixin:
    _prom_metrics: dict[str, Any]
    per_engine_labelvalues: dict[int, list[object]]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, rows in transfer_stats_data.items():
            for labels, values in rows:
                child = self._prom_metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *labels)
                if METRICS[name].kind == "counter":
                    child.inc(sum(values))
                else:
                    for value in values:
                        child.observe(value)


class KVProm(_PromMixin, KVConnectorPromMetrics):
    """Exports the KV connector's metric counts as Prometheus metrics on the engine's `/metrics`."""

    def __init__(self, config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(config, metric_types, labelnames, per_engine)
        self._prom_metrics = _collectors_for(metric_types, labelnames)


class ECProm(_PromMixin, ECConnectorPromMetrics):
    """Exports the encoder-cache connector's metric counts as Prometheus metrics on the engine's
    `/metrics`."""

    def __init__(self, config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(config, metric_types, labelnames, per_engine)
        self._prom_metrics = _collectors_for(metric_types, labelnames)
