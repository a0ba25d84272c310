"""The table of names and the tally: nothing lost, nothing counted under a name unknown."""

from __future__ import annotations

import re
import threading

import msgspec
import pytest

from cornplug.metrics import LABELS, METRICS, STORE_METRICS, WAIT_BUCKETS_S, Tally


def test_metrics_names_follow_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"cornplug_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind == "counter" or name.endswith("_seconds")
        assert metric.help.endswith(".")
        assert metric.labels[0] == "app"
    assert list(WAIT_BUCKETS_S) == sorted(set(WAIT_BUCKETS_S))


def test_metrics_of_the_store_follow_prometheus_conventions() -> None:
    for name, metric in STORE_METRICS.items():
        assert re.fullmatch(r"cornplug_store_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert name.endswith("_seconds") == (metric.kind == "histogram")
        assert metric.help.endswith(".")
        assert set(metric.labels) <= set(LABELS)


def test_tally_counts_add_up_by_label_and_drain_once() -> None:
    tally = Tally()
    tally.count("cornplug_saved_tokens_total", "a")
    tally.count("cornplug_saved_tokens_total", "a", amount=63)
    tally.count("cornplug_saved_tokens_total", "b", amount=5)
    drained = dict(tally.drain()["cornplug_saved_tokens_total"])
    assert drained == {("a",): [64], ("b",): [5]}
    assert tally.drain() == {}


def test_tally_samples_are_kept_one_by_one() -> None:
    tally = Tally()
    for value in (0.5, 0.25, 0.5):
        tally.observe("cornplug_wait_seconds", value, "a", "embedding")
    assert tally.drain() == {"cornplug_wait_seconds": [(("a", "embedding"), [0.5, 0.25, 0.5])]}


def test_tally_drained_values_cross_a_process_boundary() -> None:
    tally = Tally()
    tally.count("cornplug_hits_total", "a", "kv", "near")
    tally.observe("cornplug_wait_seconds", 1.5, "a", "kv")
    drained = tally.drain()
    carried = msgspec.msgpack.decode(
        msgspec.msgpack.encode(drained), type=dict[str, list[tuple[tuple[str, ...], list[float]]]]
    )
    assert carried == drained


def test_tally_unknown_names_kinds_and_labels_are_refused() -> None:
    tally = Tally()
    with pytest.raises(KeyError):
        tally.count("cornplug_nothing_total", "a")
    with pytest.raises(ValueError, match="histogram"):
        tally.count("cornplug_wait_seconds", "a", "kv")
    with pytest.raises(ValueError, match="counter"):
        tally.observe("cornplug_hits_total", 1.0, "a", "kv", "near")
    with pytest.raises(ValueError, match="labels"):
        tally.count("cornplug_hits_total", "a", "kv")
    assert tally.drain() == {}


def test_tally_threads_and_drains_lose_no_increment() -> None:
    tally, threads, each = Tally(), 8, 2000
    drained: list[float] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(each):
            tally.count("cornplug_saved_tower_passes_total", "a")

    def drain() -> None:
        while not done.is_set():
            take()

    def take() -> None:
        for rows in tally.drain().values():
            drained.extend(values[0] for _, values in rows)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    drainer = threading.Thread(target=drain)
    for thread in (*workers, drainer):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    drainer.join()
    take()
    assert sum(drained) == threads * each
