"""Pool of a service's replicas: devices, start, and metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cornplug.encoder_service.models.loader import LoadedModel
from cornplug.encoder_service.replicas.replica import ReplicaExecutor, ReplicaSettings
from cornplug.errors import CheckpointError, ConfigError


class ReplicaMetrics(Collector):
    """Collector of the replicas' metrics for `/metrics`."""

    def __init__(self, replicas: Sequence[ReplicaExecutor]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Return the current values. prometheus_client calls it at each scrape."""
        ready = GaugeMetricFamily(
            "cornplug_encoder_replica_ready",
            "1 while the replica computes, else 0.",
            labels=("replica", "device"),
        )
        plain = GaugeMetricFamily(
            "cornplug_encoder_replica_uncompiled_towers",
            "Towers that --compile could not compile.",
            labels=("replica",),
        )
        ends = CounterMetricFamily(
            "cornplug_encoder_replica_ends",
            "Processes of replicas that ended by themselves, by reason.",
            labels=("replica", "reason"),
        )
        for number, replica in enumerate(map(str, range(len(self._replicas)))):
            one = self._replicas[number]
            ready.add_metric((replica, one.device), float(one.ready()))
            plain.add_metric((replica,), one.uncompiled)
            for reason in ("died", "not_loaded", "not_started"):
                ends.add_metric((replica, reason), one.ends[reason])
        yield from (ready, plain, ends)


def devices_of(device: str, replicas: int) -> list[str]:
    """Return the device of each replica. Raises ConfigError if there are fewer devices than replicas."""
    if device.startswith("cuda"):
        if ":" in device:
            raise ConfigError("--replicas", f"--device {device} is a single GPU", "Set --device cuda.")
        have, what = torch.cuda.device_count(), "GPUs"
    else:
        have, what = cores(), "cores"
    if not 1 <= replicas <= have:
        raise ConfigError(
            "--replicas",
            f"{replicas} were requested, but this host has {have} {what}",
            f"Set a number from 1 to {have}, or 0.",
        )
    return [f"cuda:{i}" for i in range(replicas)] if what == "GPUs" else [device] * replicas


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def open_replicas(
    devices: Sequence[str], settings: ReplicaSettings, models: Sequence[LoadedModel]
) -> list[ReplicaExecutor]:
    """Start one replica on each device and wait until all are ready. Raises CheckpointError."""
    replicas = [ReplicaExecutor(device, settings) for device in devices]
    try:
        for replica in replicas:
            replica.start(models)
        for replica in replicas:
            replica.wait_started()
    except CheckpointError:
        for replica in replicas:
            replica.close()
        raise
    return replicas
