"""Grafana's boards of deploy/grafana/, one for each kind of process that has metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _PER_ROW = 12, 8, 2


class Panel(NamedTuple):
    title: str
    about: str
    """One sentence: the reading that calls for an action."""
    unit: str
    queries: Mapping[str, str]
    """Legend -> PromQL; `$instance` is the board's choice of processes."""


def _sum(series: str, by: str = "") -> str:
    return _total(f'{series}{{instance=~"$instance"}}', by)


def _rate(series: str, by: str = "") -> str:
    return _total(f'rate({series}{{instance=~"$instance"}}[$__rate_interval])', by)


def _total(of: str, by: str) -> str:
    return f"sum by ({by}) ({of})" if by else f"sum ({of})"


def _quantile(share: float, series: str, by: str = "") -> str:
    kept = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {_rate(f'{series}_bucket', by=kept)})"


def _hit_rate(hits: str, misses: str) -> str:
    return f"{hits} / ({hits} + {misses})"


_ENGINES: Final = (
    Panel(
        "Hit rate",
        "KV pages and embeddings found, of those asked for; falls after a restart of a store without a disk.",
        "percentunit",
        {"{{kind}}": _hit_rate(_rate("cornplug_hits_total", "kind"), _rate("cornplug_misses_total", "kind"))},
    ),
    Panel(
        "Misses by reason",
        "absent is new work; each other reason has a remedy in docs/troubleshooting.md.",
        "ops",
        {"{{kind}} {{reason}}": _rate("cornplug_misses_total", "kind, reason")},
    ),
    Panel(
        "Prompt tokens not computed",
        "Tokens whose prefill was skipped, by app.",
        "ops",
        {"{{app}}": _rate("cornplug_saved_tokens_total", "app")},
    ),
    Panel(
        "Tower passes not run",
        "Media for which the engines ran no tower, by app.",
        "ops",
        {"{{app}}": _rate("cornplug_saved_tower_passes_total", "app")},
    ),
    Panel(
        "Wait for shared bytes",
        "Seconds that requests waited; p99 near a deadline of docs/configuration.md means late answers.",
        "s",
        {
            "p50 {{kind}}": _quantile(0.5, "cornplug_wait_seconds", "kind"),
            "p99 {{kind}}": _quantile(0.99, "cornplug_wait_seconds", "kind"),
        },
    ),
    Panel(
        "Bytes moved",
        "Payload bytes to and from the store.",
        "Bps",
        {"{{direction}} {{kind}}": _rate("cornplug_bytes_total", "direction, kind")},
    ),
    Panel(
        "Saves by outcome",
        "full or busy for minutes: a larger store, or more cores.",
        "ops",
        {"{{outcome}}": _rate("cornplug_saves_total", "outcome")},
    ),
    Panel(
        "Sources of hits",
        "The store, or the encoder service: computed, coalesced, cached.",
        "ops",
        {"{{source}}": _rate("cornplug_hits_total", "source")},
    ),
)

_ENCODER: Final = (
    Panel(
        "Answers by origin",
        "computed ran the tower; coalesced and cached are shared work.",
        "ops",
        {"{{origin}}": _rate("cornplug_encoder_answers_total", "origin")},
    ),
    Panel(
        "Refusals by reason",
        "overloaded or over_share for minutes: more replicas, or other shares.",
        "ops",
        {"{{reason}} {{qos}}": _rate("cornplug_encoder_refusals_total", "reason, qos")},
    ),
    Panel(
        "Seconds to an answer",
        "By class of service; compare with the class's deadline.",
        "s",
        {
            "p50 {{qos}}": _quantile(0.5, "cornplug_encoder_seconds", "qos"),
            "p99 {{qos}}": _quantile(0.99, "cornplug_encoder_seconds", "qos"),
        },
    ),
    Panel(
        "Seconds by stage",
        "queue above compute: the tower is the bottleneck; preprocess above compute: decoding is.",
        "s",
        {"p95 {{stage}}": _quantile(0.95, "cornplug_encoder_stage_seconds", "stage")},
    ),
    Panel(
        "Queue",
        "Tokens that no batch has taken, by class.",
        "short",
        {"{{qos}}": _sum("cornplug_encoder_queue_tokens", "qos")},
    ),
    Panel(
        "Predicted wait",
        "Seconds until the answer to a medium that arrives now: the figure to scale by.",
        "s",
        {"{{qos}}": 'max by (qos) (cornplug_encoder_predicted_seconds{instance=~"$instance"})'},
    ),
    Panel(
        "Media in a batch",
        "Mean batch size.",
        "short",
        {
            "media": f"{_rate('cornplug_encoder_batch_items_sum')} / "
            f"{_rate('cornplug_encoder_batch_items_count')}"
        },
    ),
    Panel(
        "Faults",
        "Ended replicas, killed decoders, failed calls of the store.",
        "ops",
        {
            "replica {{reason}}": _rate("cornplug_encoder_replica_ends_total", "reason"),
            "decoder {{reason}}": _rate("cornplug_encoder_decoders_killed_total", "reason"),
            "store {{reason}}": _rate("cornplug_encoder_store_failures_total", "reason"),
        },
    ),
)

_STORE: Final = (
    Panel(
        "Fill",
        "Bytes of each namespace, and the capacity.",
        "bytes",
        {
            "{{namespace}} {{tier}}": _sum("cornplug_store_bytes", "namespace, tier"),
            "capacity {{tier}}": _sum("cornplug_store_capacity_bytes", "tier"),
        },
    ),
    Panel(
        "Reads",
        "Hits by tier, and misses of keys that an engine wanted to read.",
        "ops",
        {
            "hits {{tier}}": _rate("cornplug_store_hits_total", "tier"),
            "misses": _rate("cornplug_store_misses_total"),
        },
    ),
    Panel(
        "Age at eviction",
        "Seconds since the last use; minutes instead of hours: a larger store would have more hits.",
        "s",
        {
            "p50 {{namespace}} {{tier}}": _quantile(
                0.5, "cornplug_store_eviction_age_seconds", "namespace, tier"
            )
        },
    ),
    Panel(
        "Removals by cause",
        "damaged is never normal: check memory and disk.",
        "ops",
        {"{{reason}}": _rate("cornplug_store_removals_total", "reason")},
    ),
    Panel(
        "Reservations by answer",
        "full: every entry is leased or being written.",
        "ops",
        {"{{outcome}}": _rate("cornplug_store_reservations_total", "outcome")},
    ),
    Panel(
        "Seconds of an answer",
        "Time of the store's thread, by kind of message.",
        "s",
        {"p99 {{request}}": _quantile(0.99, "cornplug_store_request_seconds", "request")},
    ),
    Panel(
        "Disk and far stores: entries that wait",
        "A queue that grows: the device or the network is slower than the writers.",
        "short",
        {
            "disk": _sum("cornplug_store_disk_queued"),
            "{{far}}": _sum("cornplug_store_far_queued", "far"),
        },
    ),
    Panel(
        "Far stores: reads by outcome",
        "damaged or error: see docs/deploy-many-hosts.md.",
        "ops",
        {"{{far}} {{outcome}}": _rate("cornplug_store_far_reads_total", "far, outcome")},
    ),
)

BOARDS: Final[Mapping[str, tuple[str, str, Sequence[Panel]]]] = {
    "engines.json": ("cornplug: engines", "cornplug_hits_total", _ENGINES),
    "encoder.json": ("cornplug: encoder service", "cornplug_encoder_waiting", _ENCODER),
    "store.json": ("cornplug: store", "cornplug_store_clients", _STORE),
}
"""File -> its title, a series that each of its processes has, its panels."""


def board(name: str) -> str:
    """The JSON of one board, as Grafana imports it."""
    title, series, panels = BOARDS[name]
    made = {
        "title": title,
        "uid": f"cornplug-{name.removesuffix('.json')}",
        "tags": ["cornplug"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_data_source(), _instances(series)]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(made, indent=1) + "\n"


def _data_source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _instances(series: str) -> dict[str, Any]:
    query = f"label_values({series}, instance)"
    return {
        "name": "instance",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instances"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "legendFormat": legend, "expr": expr}
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }
