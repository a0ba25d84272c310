"""`/metrics` of the store: what was counted, by real clients; a taken port; the loop while it is scraped."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from expected_errors import expect_error
from prometheus_client.parser import text_string_to_metric_families

from cornplug.codec import PayloadKind
from cornplug.config import load
from cornplug.errors import ConfigError
from cornplug.metrics import STORE_METRICS
from cornplug.settings import NamespaceConfig
from cornplug.store.client import PoolStore
from cornplug.store.daemon.metrics_endpoint import MetricsEndpoint, open_endpoint
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.segment_files import open_disk
from cornplug.store.far.object_store import open_folder_url
from cornplug.store.far.open_far import OpenedFar
from cornplug.store.payload import NewPayload, get_payload, put_payload
from cornplug.testing.store import DEADLINE_S, fill, key_of, reserve

from ..conftest import eventually

Serve = Callable[..., StoreServer]
Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]
Series = dict[tuple[str, ...], float]


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    made = MetricsEndpoint("0")
    yield made
    made.close()


def text_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def scrape(port: int) -> Series:
    """(name of the sample, label values in the order of their names) -> value."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text_at(port))
        for sample in family.samples
    }


def write(store: PoolStore, name: str, size_bytes: int, app: str) -> None:
    put_payload(
        store,
        NewPayload(
            bytes(size_bytes), PayloadKind.EMBEDDING, key=key_of(name), dtype="uint8", shape=(size_bytes,)
        ),
        app=app,
        deadline_s=DEADLINE_S,
    )


def test_metrics_endpoint_serves_what_clients_did(
    serve_in_thread: Serve, connect: Connect, endpoint: MetricsEndpoint
) -> None:
    server = serve_in_thread(size_bytes=1 << 20, namespaces={"chat": NamespaceConfig(share=0.5)})
    server.telemetry.publish = endpoint.publish
    store = connect()
    write(store, "a", 1000, "chat")
    write(store, "b", 1000, "other")
    assert store.contains([key_of(n) for n in "abc"], deadline_s=DEADLINE_S) == b"\1\1\0"
    held = store.lease([key_of("a"), key_of("c")], ttl_s=60, deadline_s=DEADLINE_S)
    assert get_payload(store, key_of("b"), deadline_s=DEADLINE_S) is not None
    assert get_payload(store, key_of("d"), deadline_s=DEADLINE_S) is None
    reserve(store, "huge", 2 << 20, app="other")
    assert store.delete([key_of("b")], deadline_s=DEADLINE_S) == 1
    eventually(
        lambda: (
            scrape(endpoint.port).get(("cornplug_store_removals_total", "default", "deleted", "memory")) == 1
        )
    )
    found = scrape(endpoint.port)
    assert found["cornplug_store_bytes", "chat", "memory"] == 1024
    assert found["cornplug_store_share_bytes", "chat"] == 1 << 19
    assert found["cornplug_store_app_bytes", "chat"] == 1024
    assert (found["cornplug_store_entries", "chat", "memory"], found["cornplug_store_leases",]) == (1, 1)
    assert found["cornplug_store_hits_total", "chat", "memory"] == 1
    assert found["cornplug_store_hits_total", "default", "memory"] == 1
    assert found["cornplug_store_misses_total",] == 2
    assert found["cornplug_store_lookups_total", "found"] == 2
    assert found["cornplug_store_lookups_total", "absent"] == 1
    assert found["cornplug_store_reservations_total", "default", "too_large"] == 1
    assert found["cornplug_store_reservations_total", "chat", "given"] == 1
    assert found["cornplug_store_request_seconds_count", "lease"] == 1
    assert found["cornplug_store_clients",] == 1
    assert held[0] is not None


def test_metrics_endpoint_evicted_entries_have_an_age(
    serve_in_thread: Serve, connect: Connect, endpoint: MetricsEndpoint
) -> None:
    server = serve_in_thread(size_bytes=1 << 20)
    server.telemetry.publish = endpoint.publish
    store = connect()
    for n in range(6):
        fill(store, n, bytes(256 << 10))
    ages = ("cornplug_store_eviction_age_seconds_count", "default", "memory")
    eventually(lambda: scrape(endpoint.port).get(ages) == 2)
    found = scrape(endpoint.port)
    assert found["cornplug_store_removals_total", "default", "evicted", "memory"] == 2
    assert 0 <= found["cornplug_store_eviction_age_seconds_sum", "default", "memory"] < 120


def test_metrics_endpoint_names_and_labels_are_the_tables(
    serve_in_thread: Serve, connect: Connect, endpoint: MetricsEndpoint, tmp_path: Path
) -> None:
    """Of a store with a disk and a far store: without them their series have no sample."""
    far = OpenedFar([("file:///", open_folder_url(f"file://{tmp_path}"))], b"s" * 32)
    server = serve_in_thread(disk=open_disk(tmp_path / "disk", b"s" * 32, size_bytes=1 << 24), far=far)
    assert "cornplug_store" not in text_at(endpoint.port), "before the first tick"
    server.telemetry.publish = endpoint.publish
    store = connect()
    write(store, "a", 8, "app")
    store.delete([key_of("a")], deadline_s=DEADLINE_S)
    write(store, "a", 8, "app")
    eventually(lambda: 'reason="deleted"' in text_at(endpoint.port))
    found = {}
    for family in text_string_to_metric_families(text_at(endpoint.port)):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.samples, name
        assert family.documentation == STORE_METRICS[name].help
        found[name] = (family.type, {label for s in family.samples for label in s.labels} - {"le"})
    assert found == {name: (one.kind, set(one.labels)) for name, one in STORE_METRICS.items()}


def test_metrics_endpoint_taken_port_leaves_the_store_serving(start_daemon: Start, connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = start_daemon("--metrics", str(taken.getsockname()[1]))
        fill(connect(), "a", b"x")
        daemon.terminate()
        _, log = daemon.communicate(timeout=10)
    assert re.search(r"store\.metrics: cannot listen on \d+: Address already in use.*free port", log)
    assert daemon.returncode == 0


def test_metrics_endpoint_of_a_process_answers_until_its_end(start_daemon: Start, connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    daemon = start_daemon("--metrics", f"127.0.0.1:{port}")
    fill(connect(), "a", b"x")
    eventually(lambda: scrape(port).get(("cornplug_store_entries", "default", "memory")) == 1)
    daemon.terminate()
    assert daemon.wait(timeout=60) == 0


def test_open_endpoint_wrong_host_is_no_error_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    assert open_endpoint("no-such-host.invalid:1") is None
    assert "store.metrics" in caplog.text


@pytest.mark.parametrize("text", ["nowhere", "host:", "host:70000", "host:-1", ":x"])
def test_metrics_setting_that_is_no_address_is_refused(text: str) -> None:
    with expect_error(ConfigError, field="store.metrics", match="9464"):
        load({"store.metrics": text}, environ={})


def test_metrics_endpoint_scrapes_do_not_hold_up_answers(
    serve_in_thread: Serve, connect: Connect, endpoint: MetricsEndpoint
) -> None:
    """A client that asks while the endpoint is scraped without a pause has its answers in time."""
    server = serve_in_thread()
    server.telemetry.publish = endpoint.publish
    store, done = connect(), threading.Event()

    def scrapes() -> None:
        while not done.is_set():
            text_at(endpoint.port)

    thread = threading.Thread(target=scrapes)
    thread.start()
    try:
        began, asked = time.monotonic(), 0
        while time.monotonic() < began + 0.5 or asked < 20:
            store.stat(deadline_s=DEADLINE_S)
            asked += 1
    finally:
        done.set()
        thread.join()
