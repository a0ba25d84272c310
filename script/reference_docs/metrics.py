"""docs/metrics.md, from the tables and registries of the rooms that count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from cornplug.encoder_service.replicas.pool import ReplicaMetrics
from cornplug.encoder_service.telemetry.service_metrics import ServiceGauges, ServiceMetrics
from cornplug.metrics import LABELS, METRICS, STORE_METRICS
from cornplug.vllm_connector.admission import _meters as admission_meters

from .markdown import notice, table

_INTRO: Final = """# Metrics

This page lists every Prometheus metric of cornplug.

{notice}

[Troubleshooting](troubleshooting.md) explains each value of `reason` and `outcome`. [Operate](operate.md)
describes the Grafana dashboards and alert rules.
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

vLLM exports these at `/metrics` when it runs with
`--middleware cornplug.vllm_connector.admission.Admission`.
"""


_STORE: Final = """## Store

The store exports these at `/metrics` of the address in `store.metrics` (`cornplug serve-store --metrics`).
"""


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
        rows = [
            (f"`{s.name}`", s.kind, ", ".join(f"`{label}`" for label in s.labels), s.help) for s in series
        ]
        parts.append(f"{head}\n{table(('series', 'type', 'labels', 'meaning'), rows)}\n")
    rows = [(f"`{label}`", meaning) for label, meaning in LABELS.items()]
    parts.append(f"## Labels\n\n{table(('label', 'meaning'), rows)}\n")
    return "\n".join(parts)


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
