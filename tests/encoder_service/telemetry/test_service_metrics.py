"""What is scraped: names and labels as documented, bounded, and moved by real requests."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.service_metrics import (
    APPS_MAX,
    OTHER,
    STAGES,
    BoundedLabels,
    ServiceGauges,
    ServiceMetrics,
)
from cornplug.store.memory import MemoryStore

from ..conftest import MakeEncoder, Requests, eventually
from ..execution.test_encoder import Gate, gate, hold, no, ok, queued  # noqa: F401

LABELS = {
    "cornplug_encoder_waiting": (),
    "cornplug_encoder_queue_requests": ("qos",),
    "cornplug_encoder_queue_tokens": ("qos",),
    "cornplug_encoder_predicted_seconds": ("qos",),
    "cornplug_encoder_executors": ("state",),
    "cornplug_encoder_model_info": (
        "model",
        "family",
        "identity",
        "tower_fp",
        "projector_fp",
        "spec_fp",
        "dtype",
        "epoch",
    ),
    "cornplug_encoder_batch_items": (),
    "cornplug_encoder_batch_tokens": (),
    "cornplug_encoder_tower_passes": (),
    "cornplug_encoder_tower_tokens": (),
    "cornplug_encoder_tower_seconds": (),
    "cornplug_encoder_answers": ("app", "origin", "qos"),
    "cornplug_encoder_refusals": ("qos", "reason"),
    "cornplug_encoder_seconds": ("qos",),
    "cornplug_encoder_stage_seconds": ("stage",),
    "cornplug_encoder_store_failures": ("reason",),
}
"""Dashboards stand on these: a change here is a change for their owners."""


def scraped(encoder: EncoderCore) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(encoder.metrics.render_text().decode())
        for sample in family.samples
    }


def one(encoder: EncoderCore, name: str, **labels: str) -> float:
    return scraped(encoder)[f"cornplug_encoder_{name}", frozenset(labels.items())]


def test_service_metrics_names_have_labels_and_help(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    encoder = make_encoder()
    ok(encoder.submit(request_for(llava_pair[0], 1)))
    no(encoder.submit(request_for(llava_pair[0], 1, identity=b"?" * 32)))
    encoder.metrics.store_failures.labels("store_down").inc()
    families = {f.name: f for f in text_string_to_metric_families(encoder.metrics.render_text().decode())}
    assert families.keys() >= LABELS.keys()
    for name, labels in LABELS.items():
        assert re.fullmatch(r".{10,}\.", families[name].documentation), name
        seen = {frozenset(s.labels) - {"le"} for s in families[name].samples}
        assert seen == {frozenset(labels)}, name


def test_service_metrics_batch_counts_media_tokens_seconds(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    encoder = make_encoder(MemoryStore(capacity_bytes=1 << 20).connect())
    ok(encoder.submit(request_for(llava_pair[0], 1)))
    ok(encoder.submit(request_for(llava_pair[0], 1)))
    loaded = encoder.registry.find_by_name(str(llava_pair[0]))
    assert loaded is not None
    tokens = loaded.tower.prepare(request_for(llava_pair[0], 1).inputs).tokens
    assert one(encoder, "tower_passes_total") == 1
    assert one(encoder, "tower_tokens_total") == one(encoder, "batch_tokens_sum") == tokens
    assert one(encoder, "tower_seconds_count") == 1
    assert one(encoder, "answers_total", app="test", qos="default", origin="computed") == 1
    assert one(encoder, "answers_total", app="test", qos="default", origin="cached") == 1
    assert one(encoder, "seconds_count", qos="default") == 2
    assert {stage: one(encoder, "stage_seconds_count", stage=stage) for stage in STAGES} == {
        "preprocess": 0,
        **dict.fromkeys(("prepare", "queue", "compute", "publish"), 1),
    }


def test_service_metrics_queue_counts_unbatched_requests(
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    gate: Gate,  # noqa: F811
) -> None:
    encoder = make_encoder()
    assert one(encoder, "queue_requests", qos="default") == 0
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    waiting = [encoder.submit(request_for(llava_pair[0], seed)) for seed in (2, 2, 3)]
    eventually(lambda: one(encoder, "queue_requests", qos="default") == 3)
    two_images = one(encoder, "queue_tokens", qos="default")
    assert one(encoder, "waiting") == 4
    gate.open.set()
    for future in (held, *waiting):
        ok(future)
    assert one(encoder, "queue_requests", qos="default") == 0
    assert two_images * 1.5 == one(encoder, "tower_tokens_total")


def test_service_metrics_models_have_fingerprints(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    rows = [dict(labels) for (name, labels) in scraped(encoder) if name.endswith("model_info")]
    assert {(r["model"], r["tower_fp"]) for r in rows} == {
        (m.name, m.tower_fp.hex()) for m in encoder.registry.served_models()
    }


@given(st.lists(st.text(), max_size=300))
def test_service_metrics_client_labels_are_bounded(names: list[str]) -> None:
    bounded = BoundedLabels(8, known=("mine",))
    labels = [bounded.label_for(name) for name in names]
    assert len(set(labels)) <= 9
    assert all(label in (name, OTHER) for label, name in zip(labels, names, strict=True))
    assert bounded.label_for("mine") == "mine"
    assert [bounded.label_for(name) for name in names][:8] == labels[:8]


def test_service_metrics_sixty_fifth_app_is_other() -> None:
    meters = ServiceMetrics(ServiceGauges(lambda: 0))
    for number in range(APPS_MAX + 5):
        meters.count_reply(f"app-{number}", "default", "computed", 0.1)
    text = meters.render_text().decode()
    assert text.count("cornplug_encoder_answers_total{") == APPS_MAX + 1
    assert 'app="other",origin="computed",qos="default"} 5.0' in text
