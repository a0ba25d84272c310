"""Capacity if only throughputs are known, in requests per second without times.

An encoder's throughput counts items (images); a language model's and a generator's count requests. A replica
of several components runs them one after another, so its rate is the harmonic sum: 1 / (sum of 1 / rate).
"""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.inputs.schema import Component, MeasuredProfile, PlanRules, Profile, ThroughputProfile
from cornplug.planner.perf_model import profile_lookup as measured


def given(service: Service, component: Component, footprint: ReplicaConfig) -> ThroughputProfile | None:
    """Return the component's throughput profile, or None if its first matching profile is of another kind."""
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
    """Return a class's requests per second on one replica, or 0 if unknown or outside its SLO.

    `profiles` has throughputs by component, `items` the mean items to encode by encoder. A share of a GPU has
    that share of the rate, less the cost of neighbours (`rules.interference`).
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
    """Return the uses of the component per request: one per item for an encoder, one for a generator if
    used."""
    if any(t.name == name for t in service.towers):
        return items.get(name, 0.0)
    if service.generator and service.generator.name == name:
        return 1.0 if of.request.generates else 0.0
    return 1.0


def _efficiency(service: Service, profiles: Mapping[str, ThroughputProfile], rules: PlanRules) -> float:
    """Return a prefill-decode pair's efficiency, or 1 if measured in that role."""
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
    """Return the precision, which towers and generators in an LLM's engine keep."""
    return f.quantisation if f.quantisation in component.any_quantisations else "none"
