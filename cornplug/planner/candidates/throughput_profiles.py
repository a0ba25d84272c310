"""Computes capacities if only throughputs in requests per second are known, but no times.

An encoder's throughput is in items (images) per second. The throughput of a language model or a generator is
in requests per second. A replica runs its components one after another, so its rate is 1 / (sum of 1 / rate).
"""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.inputs.schema import Component, MeasuredProfile, PlanRules, Profile, ThroughputProfile
from cornplug.planner.perf_model import profile_lookup as measured


def given(service: Service, component: Component, footprint: ReplicaConfig) -> ThroughputProfile | None:
    """Return the component's throughput profile, or None if the first matching profile is not a
    throughput."""
    for profile in component.profiles:
        if _fits(profile, service, component, footprint):
            return profile if isinstance(profile, ThroughputProfile) else None
    return None


def role(service: Service, component: Component) -> str:
    """Return the tasks of the service that `component` does."""
    if component.kind == "encoder":
        return "E"
    return "G" if component.kind == "generator" else service.tasks.strip("EG")


def rate(
    service: Service,
    profiles: Mapping[str, ThroughputProfile],
    footprint: ReplicaConfig,
    of: RequestClass,
    items: Mapping[str, float],
    rules: PlanRules,
) -> float:
    """Return a class's requests per second on one replica, or 0 if it is not known or misses the SLO.

    The rate is proportional to the replica's share of a GPU, and reduced because of other replicas on the GPU
    (`rules.interference`).

    Args:
        profiles: throughputs by component.
        items: mean number of items to encode per request, by encoder.
    """
    whole = profiles.get(service.llm.name) if service.llm else None
    parts = {service.name: whole} if whole and whole.role == service.tasks else dict(profiles)
    seconds = 0.0
    for name, profile in parts.items():
        per_s = _requests_per_s(profile, of)
        if not per_s:
            return 0.0
        seconds += _visits(name, service, of, items) / per_s
    scale = footprint.share * (1 - rules.interference if footprint.share < 1 else 1)
    return scale * _efficiency(service, profiles, rules) / seconds if seconds else float("inf")


def _requests_per_s(profile: ThroughputProfile, of: RequestClass) -> float:
    bound = of.slo.first_s("tpot")
    if bound is not None and profile.tpot_s.get(of.name, 0.0) > bound:
        return 0.0
    if isinstance(profile.requests_per_s, dict):
        return profile.requests_per_s.get(of.name, 0.0)
    return profile.requests_per_s


def _visits(name: str, service: Service, of: RequestClass, items: Mapping[str, float]) -> float:
    """Return the number of times that a request uses a component.

    This is the number of items for an encoder, and 0 for a generator that the class does not use.
    """
    if any(t.name == name for t in service.towers):
        return items.get(name, 0.0)
    if service.generator and service.generator.name == name:
        return 1.0 if of.request.generates else 0.0
    return 1.0


def _efficiency(service: Service, profiles: Mapping[str, ThroughputProfile], rules: PlanRules) -> float:
    """Return the efficiency of a separate prefill or decode replica, or 1 if it was measured in this role."""
    tasks = service.tasks.strip("EG")
    if tasks not in ("P", "D") or any(p.role == tasks for p in profiles.values()):
        return 1.0
    return rules.disaggregation_efficiency_p if tasks == "P" else rules.disaggregation_efficiency_d


def _fits(profile: Profile, service: Service, component: Component, f: ReplicaConfig) -> bool:
    if not isinstance(profile, ThroughputProfile | MeasuredProfile):
        return True
    fits = measured.is_for(profile, f.engine_spec(), _quantisation(component, f))
    if isinstance(profile, ThroughputProfile):
        fits = fits and profile.role in (None, role(service, component), service.tasks)
    return fits


def _quantisation(component: Component, f: ReplicaConfig) -> str:
    """Return the quantisation of a component. Towers and generators in an LLM's engine may not be
    quantised."""
    return f.quantisation if f.quantisation in component.any_quantisations else "none"
