"""Restarts: the waits grow, the limit ends them, and a long run begins the count anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cornplug.errors import ProcessFailed
from cornplug.planner.launch.launcher import RestartPolicy, Supervisor


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Process:
    clock: Clock
    name: str = "llm-0"
    dead: bool = False
    ready: bool = True
    started_s: float = 0.0
    calls: list[str] = field(default_factory=list)

    def check_alive(self) -> None:
        if self.dead:
            raise ProcessFailed(f"{self.name} ended with status 3; its log x ends with:\nboom")

    def check_ready(self) -> bool:
        return self.ready

    def kill(self) -> None:
        self.calls.append("kill")

    def log_excerpt(self) -> str:
        return "its log x ends with:\nboom"

    def spawn(self) -> None:
        self.calls.append("spawn")
        self.dead, self.started_s = False, self.clock.now


def watched(policy: RestartPolicy) -> tuple[Supervisor, Process, Clock, list[str]]:
    clock, told = Clock(), []
    supervisor = Supervisor(lambda process, what: told.append(what), policy, clock=clock)
    process: Any = Process(clock)
    supervisor.add(process)
    return supervisor, process, clock, told


def test_supervisor_ended_process_starts_again_after_its_wait() -> None:
    supervisor, process, clock, told = watched(RestartPolicy(first_wait_s=1))
    process.dead, process.ready = True, False
    supervisor.tick()
    assert told == ["ended with status 3; restarting in 1 s"]
    assert process.calls == ["kill"], "its descendants hold the port"
    clock.now = 0.9
    supervisor.tick()
    assert process.calls == ["kill"]
    clock.now = 1.0
    supervisor.tick()
    assert process.calls == ["kill", "spawn"]
    assert supervisor.is_starting(process)
    process.ready = True
    supervisor.tick()
    assert told[1:] == ["starting", "ready"]
    assert not supervisor.is_starting(process)


def test_supervisor_waits_grow_until_the_limit_gives_up() -> None:
    supervisor, process, clock, told = watched(RestartPolicy(max_restarts=3, first_wait_s=1, max_wait_s=3))
    waits = []
    while not supervisor.failed_processes:
        process.dead = True
        supervisor.tick()
        if not supervisor.failed_processes:
            waits.append(told[-1].rpartition(" in ")[2])
            clock.now += 10
            supervisor.tick()
    assert waits == ["1 s", "2 s", "3 s"]
    assert told[-1] == "ended with status 3, and will not be restarted; its log x ends with:\nboom"
    supervisor.tick()
    assert process.calls.count("spawn") == 3


def test_supervisor_long_run_begins_the_count_anew() -> None:
    supervisor, process, clock, _ = watched(RestartPolicy(max_restarts=1, first_wait_s=1, stable_s=100))
    for _ in range(3):
        process.dead = True
        supervisor.tick()
        clock.now += 1
        supervisor.tick()
        clock.now += 101
        supervisor.tick()
        supervisor.tick()
    assert not supervisor.failed_processes
    assert process.calls.count("spawn") == 3


def test_supervisor_without_restarts_gives_up_at_once() -> None:
    supervisor, process, _, _ = watched(RestartPolicy(max_restarts=0))
    process.dead = True
    supervisor.tick()
    assert supervisor.failed_processes == [process]


def test_supervisor_removed_process_may_end() -> None:
    supervisor, process, _, told = watched(RestartPolicy())
    supervisor.remove(process)
    process.dead = True
    supervisor.tick()
    assert told == []
