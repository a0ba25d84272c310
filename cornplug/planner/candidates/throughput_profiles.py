"""Capacity where only throughputs are known: requests a second, no times.

An encoder's throughput is of items (images), a language model's and a generator's of requests.
A replica of several components runs them one after the other, so its rate is the harmonic sum:
1 / (sum of 1 / rate).
"""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.inputs.schema import Component, MeasuredProfile, PlanRules, Profile, ThroughputProfile
from cornplug.planner.perf_model import profile_lookup as measured


def given(service: Service, component: Component, footprint: ReplicaConfig) -> ThroughputProfile | None:
    """The component's throughput there, if its first fitting profile is one of throughput."""
    for profile in component.profiles:
        if _fits(profile, service, component, footprint):
            return profile if isinstance(profile, ThroughputProfile) else None
    return None


def role(service: Service, component: Component) -> str:
    """Those of the service's tasks that `component` does."""
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
    """Requests a second of a class that one replica carries; 0: not under its SLO, or not known.

    `profiles`: component -> its throughput. `items`: encoder -> mean items to encode, one request.
    Parts of a GPU carry their share, less the cost of neighbours (`rules.interference`).
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
    """Times that one request uses the component: an encoder for each item, a generator if it does."""
    if any(t.name == name for t in service.towers):
        return items.get(name, 0.0)
    if service.generator and service.generator.name == name:
        return 1.0 if of.request.generates else 0.0
    return 1.0


def _efficiency(service: Service, profiles: Mapping[str, ThroughputProfile], rules: PlanRules) -> float:
    """Of a prefill-decode pair, unless the rate was measured in that role."""
    tasks = service.tasks.strip("EG")
    if tasks not in ("P", "D") or any(p.role == tasks for p in profiles.values()):
        return 1.0
    return rules.disaggregation_efficiency_p if tasks == "P" else rules.disaggregation_efficiency_d


def _fits(profile: Profile, service: Service, component: Component, f: ReplicaConfig) -> bool:
    if not isinstance(profile, ThroughputProfile | MeasuredProfile):
        return True
    fits = f.dp == f.dcp == f.pcp == 1 and measured.is_for(
        profile, f.gpu, f.engine, f.tp, f.pp, _quantisation(component, f)
    )
    if isinstance(profile, ThroughputProfile):
        fits = fits and profile.role in (None, role(service, component), service.tasks)
    return fits


def _quantisation(component: Component, f: ReplicaConfig) -> str:
    """A tower or generator beside an LLM keeps its own precision."""
    return f.quantisation if f.quantisation in component.any_quantisations else "none"
