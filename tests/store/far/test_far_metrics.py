"""Far stores in `/metrics`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import Metric

from cornplug.store.client import PoolStore
from cornplug.store.daemon.metrics_endpoint import metric_families
from cornplug.store.daemon.server import StoreServer
from cornplug.store.far.object_store import open_folder_url
from cornplug.store.far.open_far import OpenedFar

from ..conftest import eventually
from ..disk.disk_stage import put


def test_metrics_of_far_store_count_by_outcome(
    serve_in_thread: Callable[..., StoreServer], connect: Callable[..., PoolStore], share: object
) -> None:
    far = OpenedFar([("file:///share", open_folder_url(f"file://{share}"))], b"s" * 32)
    server = serve_in_thread(far=far)
    put(connect(), "a")

    def series() -> dict[str, Metric]:
        return {family.name: family for family in metric_families(server.telemetry.snapshot())}

    def value(name: str, **labels: str) -> float:
        (found,) = [
            sample.value
            for sample in series()[name].samples
            if sample.labels == {"far": "file:///share", **labels}
        ]
        return found

    eventually(lambda: value("cornplug_store_far_writes", outcome="written") == 1)
    assert value("cornplug_store_far_up") == 1
    assert value("cornplug_store_far_lookups", outcome="found") == 0
    assert value("cornplug_store_far_bytes", direction="write") > 20 << 10
