"""What each service's replicas carry on each footprint: from profiles to the pool's cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cornplug.planner import lengths, throughputs
from cornplug.planner.caches import Assumed
from cornplug.planner.cells import CellSpec, make_cell
from cornplug.planner.classes import RequestClass
from cornplug.planner.footprints import Footprint, footprints
from cornplug.planner.inputs import Gpu, NodeClass, PlanInput, Throughput, Workload
from cornplug.planner.samples import Samples
from cornplug.planner.services import Service, towers
from cornplug.planner.tiers import Chain

URGENCY: Final[tuple[Workload, ...]] = ("online", "semi-online", "offline")
PRIOR: Final = 0.02
"""Of a cell's price, against the engine that a workload class does not favour: less than any
measured difference."""
FAVOURED: Final = {"online": "sglang", "semi-online": "sglang", "offline": "vllm"}


@dataclass
class Equipment:
    given: PlanInput
    nodes: tuple[NodeClass, ...]
    gpus: Mapping[str, Gpu]
    bases: Mapping[str, Assumed]
    """Request class -> the smallest caches, whose hits its capacities hold for."""
    samples: Samples
    derate: Mapping[str, float]

    def cells(
        self, service: Service, users: Mapping[str, RequestClass], tiers: Chain, dropped: Counter[str]
    ) -> Iterator[CellSpec]:
        """All cells of a service that carry something; the reasons against others go to `dropped`."""
        workloads = tuple(w for w in URGENCY if any(u.app.workload == w for u in users.values()))
        places = footprints(service, self.nodes, self.gpus, self.given.rules, workloads, dropped)
        for footprint in places:
            profiles = self.throughputs(service, footprint)
            if profiles is not None and footprint.workload == workloads[0]:
                yield from self._untimed(service, footprint, profiles, users, tiers, dropped)

    def throughputs(self, service: Service, footprint: Footprint) -> dict[str, Throughput] | None:
        """Component -> its throughput; None where one of them has none there."""
        found = {c.name: throughputs.given(service, c, footprint) for c in service.components}
        known = {name: profile for name, profile in found.items() if profile is not None}
        return known if len(known) == len(found) else None

    def work(self, service: Service, of: RequestClass, assumed: Assumed) -> float:
        """Visits of a service for one request, in requests as they are with the smallest caches.

        Capacities are those of the smallest caches; a larger one makes a request count for less.
        """
        if service.tasks == "E" and not any(self._items(of, assumed).get(t.name) for t in service.towers):
            return 0.0
        base = self.bases[of.name]
        if assumed.names == base.names or not service.towers:
            return 1.0
        tower = service.towers[0].name
        return self._items(of, assumed).get(tower, 0.0) / self._items(of, base)[tower]

    def _untimed(
        self,
        service: Service,
        footprint: Footprint,
        profiles: Mapping[str, Throughput],
        users: Mapping[str, RequestClass],
        tiers: Chain,
        dropped: Counter[str],
    ) -> Iterator[CellSpec]:
        capacity = {
            name: self._derated(service, throughputs.rate(
                service, profiles, footprint, of, self._items(of, self.bases[name]), self.given.rules
            ))
            for name, of in users.items()
        }  # fmt: skip
        if not any(capacity.values()):
            dropped[f"{service.name}: no throughput is given for its requests under their SLOs"] += 1
            return
        preference = self._prior(footprint, users) if service.llm else 0.0
        cell = make_cell(service, footprint, tiers.tiers[0], 1, capacity, preference, timed=False)
        source = "; ".join(dict.fromkeys(p.source for p in profiles.values()))
        yield CellSpec(cell, service, footprint, tiers.tiers[0], f"throughput: {source}")

    def _derated(self, service: Service, rate: float) -> float:
        return rate * self.derate.get(service.name, 1.0)

    def _items(self, of: RequestClass, assumed: Assumed) -> dict[str, float]:
        return items_to_encode(self.given, of, assumed)

    def _prior(self, footprint: Footprint, users: Mapping[str, RequestClass]) -> float:
        against = sum(u.rate for u in users.values() if FAVOURED[u.app.workload] != footprint.engine)
        return PRIOR * against / sum(u.rate for u in users.values())


def items_to_encode(given: PlanInput, of: RequestClass, assumed: Assumed) -> dict[str, float]:
    """Encoder -> mean items of one request whose embeddings are not cached."""
    shared = towers(given)
    found: dict[str, float] = {}
    for media in of.request.media:
        missed = lengths.mean(media.items) * (1 - assumed.hits.embedding.get(media.encoder, 0.0))
        name = shared[media.encoder].name
        found[name] = found.get(name, 0.0) + missed
    return found
