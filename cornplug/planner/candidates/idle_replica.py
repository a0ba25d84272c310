"""Computes the latencies of requests that run alone on the idle replica to which an SLO's slowdowns refer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from cornplug.errors import ConfigError
from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.service_times import service_times
from cornplug.planner.candidates.services import Service
from cornplug.planner.candidates.timed_configs import TimedConfig
from cornplug.planner.inputs.request_classes import RequestClass, SampledRequest
from cornplug.planner.inputs.schema import Component, GpuSpec, NodeClass, PlanRules
from cornplug.planner.inputs.slo import IdleReplica, IdleTimes
from cornplug.planner.parallelism import Parallelism
from cornplug.planner.simulator.replicas import isolated_decode_s, isolated_prefill_s, off_device_s
from cornplug.planner.simulator.simulator import Station


@dataclass(frozen=True)
class IdleReplicas:
    """Idle replicas for classes whose SLO bounds a slowdown. Each is an engine with the towers of the
    class."""

    components: Mapping[str, Component]
    encoders: Mapping[str, Component]
    """Encoders, as in `services.canonical_encoders`."""
    gpus: Mapping[str, GpuSpec]
    rules: PlanRules

    def with_times(self, of: RequestClass, sampled: list[SampledRequest]) -> list[SampledRequest]:
        """Return the requests with their latencies on the idle replica, if the class's SLO bounds a slowdown.

        Raises ConfigError if no profile has the replica's times, or if the model does not fit on the replica.
        """
        idle = of.slo.idle
        if idle is None or not of.slo.relative:
            return sampled
        station = self._station(of, idle, sampled)
        return [replace(d, idle=idle_times(station, d)) for d in sampled]

    def _station(self, of: RequestClass, idle: IdleReplica, sampled: Sequence[SampledRequest]) -> Station:
        llm = self.components[of.app.llm]
        towers = tuple(dict.fromkeys(self.encoders[m.encoder] for m in of.request.media))
        service = Service("EPD" if towers else "PD", llm, towers)
        gpu = self.gpus[idle.gpu]
        nodes = NodeClass(name="idle", gpu=gpu.name, gpus=8, price_per_hour=0.0)
        engine, workload = idle.engine or llm.engines[0], of.app.workload
        config = ReplicaConfig(engine, nodes, gpu, Parallelism(idle.tp), 1.0, idle.quantisation, workload)
        context_tokens = max(round(fmean(d.prompt_tokens for d in sampled)), 1)
        hardware = service_times(service, config, self.rules, context_tokens)
        if hardware is None or hardware.steps is None:
            raise ConfigError(
                f"slo.idle of {of.name}",
                f"{service.name} has no times on {idle.gpu} with tp = {idle.tp}, or does not fit",
                f"Add a profile (table or roofline) to {llm.name}, or use another replica.",
            )
        return TimedConfig(service, config, hardware).station("random", 1)


def idle_times(station: Station, request: SampledRequest) -> IdleTimes:
    """Return the latencies of one request that runs alone, with the cache hits of `request`."""
    ttft_s = isolated_prefill_s(station, request) + off_device_s(station, request)
    decode_s = isolated_decode_s(station, request)
    return IdleTimes(ttft_s, decode_s / max(request.output_tokens - 1, 1), ttft_s + decode_s)


def means(sampled: Sequence[SampledRequest]) -> IdleTimes | None:
    """Return the mean idle latencies of a class, or None if its SLO bounds no slowdown.

    The mean TPOT is over requests whose output has several tokens.
    """
    known = [d.idle for d in sampled if d.idle is not None]
    if not known:
        return None
    tokens = [idle.tpot_s for idle in known if idle.tpot_s > 0]
    ttft_s, e2e_s = fmean(idle.ttft_s for idle in known), fmean(idle.e2e_s for idle in known)
    return IdleTimes(ttft_s, fmean(tokens) if tokens else 0.0, e2e_s)
