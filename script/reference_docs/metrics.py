"""docs/metrics.md, from the tables and registries of the rooms that count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from cornplug.encoder_service.replica import ReplicaMetrics
from cornplug.encoder_service.service_metrics import ServiceGauges, ServiceMetrics
from cornplug.metrics import LABELS, METRICS, STORE_METRICS
from cornplug.vllm_connector.admission import _create_metrics as admission_meters

from .markdown import notice

_INTRO: Final = """# Metrics

This page lists every Prometheus metric of cornplug. Names that end in `_total` are counters, histograms are
marked, and the others are gauges. [Troubleshooting](troubleshooting.md) explains `reason` and `outcome`, and
[operate](operate.md#monitor) has scrape targets, dashboards and alerts.

{notice}
"""
_ENGINES: Final = """## Engines

The engines export these at their own `/metrics`. SGLang needs `--enable-metrics`.
"""
_SERVICE: Final = """## Encoder service

The service exports these at `/metrics` of its HTTP port. The `replica` series exist only with `--replicas`.

It also sends OpenTelemetry traces, which join the caller's `traceparent`. Install `opentelemetry-sdk` and
`opentelemetry-exporter-otlp`, and set `OTEL_EXPORTER_OTLP_ENDPOINT`.
"""
_ADMISSION: Final = """## Admission middleware in vLLM

vLLM exports these with `--middleware cornplug.vllm_connector.admission.Admission`.
"""


_STORE: Final = """## Store

The store exports these at the address in `store.metrics`.
"""
_EXPLAINED: Final = (
    "app",
    "kind",
    "source",
    "direction",
    "namespace",
    "tier",
    "far",
    "origin",
    "identity",
    "spec_fp",
)
"""Labels that the page explains. The names of the others say what they are."""


class Series(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def page() -> str:
    """The text of docs/metrics.md."""
    parts = [_INTRO.format(notice=notice("`cornplug/metrics.py` and the services' registries"))]
    rooms = ((_ENGINES, engines()), (_SERVICE, service()), (_STORE, store()), (_ADMISSION, admission()))
    for head, series in rooms:
        lines = [f"- {_name(one)}: {one.help}" for one in series]
        parts.append("\n".join([head, *lines, ""]))
    lines = [f"- `{label}`: {LABELS[label]}" for label in _EXPLAINED]
    parts.append("\n".join(["## Labels\n", *lines, ""]))
    return "\n".join(parts)


def _name(series: Series) -> str:
    labels = f"{{{','.join(series.labels)}}}" if series.labels else ""
    return f"`{series.name}{labels}`" + (" (histogram)" if series.kind == "histogram" else "")


def engines() -> list[Series]:
    """Metrics of engines."""
    return [Series(name, m.kind, m.labels, m.help) for name, m in METRICS.items()]


def store() -> list[Series]:
    """Metrics of the store."""
    return [
        Series(name, m.kind, m.labels, f"{m.help} {m.values}".strip()) for name, m in STORE_METRICS.items()
    ]


def service() -> list[Series]:
    """Metrics of the encoder service."""
    registry = ServiceMetrics(ServiceGauges(lambda: 0.0)).registry
    registry.register(ReplicaMetrics(()))
    return sorted(_registered(registry))


def admission() -> list[Series]:
    """Metrics of the middleware in front of vLLM."""
    registry = CollectorRegistry()
    admission_meters(registry)
    return sorted(_registered(registry))


def _registered(registry: CollectorRegistry) -> Iterator[Series]:
    for collector in registry._collector_to_names:
        own = hasattr(collector, "_labelnames")
        families: Iterable[object] = [collector] if own else collector.collect()
        for family in families:
            kind = getattr(family, "_type", None) or family.type  # type: ignore[attr-defined]
            name = getattr(family, "_name", None) or family.name  # type: ignore[attr-defined]
            text = getattr(family, "_documentation", None) or family.documentation  # type: ignore[attr-defined]
            labels = tuple(family._labelnames)  # type: ignore[attr-defined]
            yield Series(f"{name}_total" if kind == "counter" else name, kind, labels, text)
