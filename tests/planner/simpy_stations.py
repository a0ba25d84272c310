"""The stations of the simulator once more, on simpy and iteration by iteration: an independent check.

Slow and plain on purpose: every decode iteration is an event, nothing is computed in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from cornplug.planner.perf_model.stations import Station, StationJob


@dataclass
class Request:
    row: int
    job: StationJob
    tokens_left: int = 0
    decoded: int = 0
    items_left: int = 0
    left_at: list[float] = field(default_factory=list)
    first_token: float = float("nan")


class Replica:
    """One server of a station: a process that waits for work, takes some and lets time pass."""

    def __init__(self, env: simpy.Environment, station: Station, leave: Callable[[Request], None]) -> None:
        self.env, self.station, self.leave = env, station, leave
        self.queue: list[Request] = []
        self.wakened = env.event()
        env.process(self.encode() if station.tasks == "E" else self.iterate())

    def put(self, request: Request) -> None:
        request.tokens_left = request.job.request.computed_tokens if "P" in self.station.tasks else 0
        request.items_left = len(request.job.request.patches)
        request.decoded = 0
        if self.station.tasks == "D" and request.job.request.output_tokens == 1:
            self.leave(request)
            return
        if self.station.tasks == "E" and not request.items_left:
            self.leave(request)
            return
        self.queue.append(request)
        if not self.wakened.triggered:
            self.wakened.succeed()

    def encode(self) -> Generator[Any, Any, None]:
        assert self.station.encode is not None
        items: list[tuple[Request, int]] = []
        while True:
            items += [(r, n) for r in self.queue for n in r.job.request.patches]
            self.queue.clear()
            if not items:
                self.wakened = self.env.event()
                yield self.wakened
                continue
            batch = [items.pop(0)]
            while items and sum(n for _, n in batch) + items[0][1] <= self.station.max_patches:
                batch.append(items.pop(0))
            yield self.env.timeout(self.station.encode(sum(n for _, n in batch)))
            for request, _ in batch:
                request.items_left -= 1
                if not request.items_left:
                    self.leave(request)

    def iterate(self) -> Generator[Any, Any, None]:
        s, steps = self.station, self.station.steps
        assert steps is not None
        prefilling: list[Request] = []
        running: list[Request] = []
        while True:
            self.admit(prefilling, running)
            budget = max(s.chunk_tokens - len(running), 0) if "P" in s.tasks else 0
            taken: list[tuple[Request, int]] = []
            patches: list[int] = []
            for request in prefilling:
                if not budget:
                    break
                if "E" in s.tasks and request.tokens_left == request.job.request.computed_tokens:
                    patches += [0, *request.job.request.patches]
                taken.append((request, min(budget, request.tokens_left)))
                budget -= taken[-1][1]
            if not taken and not running:
                self.wakened = self.env.event()
                yield self.wakened
                continue
            context = sum(r.job.request.prompt_tokens + r.decoded for r in running)
            yield self.env.timeout(steps.step_s(sum(n for _, n in taken), len(running), context))
            self.after(taken, prefilling, running)

    def admit(self, prefilling: list[Request], running: list[Request]) -> None:
        s = self.station
        budget = s.chunk_tokens - len(running) - sum(r.tokens_left for r in prefilling)
        while self.queue:
            held = prefilling + running
            kv = sum(self.needs(r) for r in [*held, self.queue[0]])
            if kv > s.kv_tokens or ("D" in s.tasks and len(held) >= s.max_batch):
                return
            if "P" not in s.tasks:
                running.append(self.queue.pop(0))
                continue
            if budget <= 0:
                return
            prefilling.append(self.queue.pop(0))
            budget -= prefilling[-1].tokens_left

    def needs(self, request: Request) -> int:
        draw = request.job.request
        return draw.prompt_tokens + (draw.output_tokens if "D" in self.station.tasks else 0)

    def after(
        self, taken: Sequence[tuple[Request, int]], prefilling: list[Request], running: list[Request]
    ) -> None:
        for request in list(running):
            request.decoded += 1
            if request.decoded == request.job.request.output_tokens - 1:
                running.remove(request)
                self.leave(request)
        for request, tokens in taken:
            request.tokens_left -= tokens
            if request.tokens_left:
                continue
            prefilling.remove(request)
            request.first_token = self.env.now
            if "D" in self.station.tasks and request.job.request.output_tokens > 1:
                running.append(request)
            else:
                self.leave(request)


def run(stations: Sequence[Station], jobs: Sequence[StationJob]) -> list[Request]:
    """Every station with one replica; the requests with the times at which they left each visit."""
    env = simpy.Environment()
    requests = [Request(row, job) for row, job in enumerate(jobs)]

    def leave(request: Request) -> None:
        request.left_at.append(env.now)
        env.process(travel(request))

    replicas = [Replica(env, station, leave) for station in stations]

    def travel(request: Request) -> Generator[Any, Any, None]:
        if len(request.left_at) == len(request.job.visits):
            return
        visit = request.job.visits[len(request.left_at)]
        yield env.timeout(visit.delay_s)
        replicas[visit.station].put(request)

    def source() -> Generator[Any, Any, None]:
        for request in requests:
            yield env.timeout(request.job.at_s - env.now)
            env.process(travel(request))

    env.process(source())
    env.run()
    return requests
