"""When the soak kills and stops which process: a list that seed, duration and number of clients determine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

FaultKind = Literal["kill client", "stop client", "kill daemon", "stop daemon", "kill far", "stop far"]

_PERIOD_S: Final[dict[FaultKind, float]] = {
    "kill client": 4.0,
    "stop client": 9.0,
    "kill daemon": 25.0,
    "stop daemon": 12.0,
    "kill far": 60.0,
    "stop far": 20.0,
}
"""Mean time between two faults of a kind."""
_AT_LEAST_ONE_IN: Final = 3.0
"""A short run has each kind of fault: periods are this part of the run at most."""
QUIET_DAEMON_FROM: Final = 0.6
"""Part of the run after which the daemon is not killed, so that one daemon's memory is seen for long."""
STEADY_CLIENT: Final = 0
"""Is neither killed nor stopped: it sees every daemon, so what it leaks at each of them adds up."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a run."""

    at_s: float
    kind: FaultKind
    client: int
    """Index of the client; of no meaning for other processes."""
    for_s: float
    """How long a stopped process stays so, and a killed far store away."""


def plan_faults(seed: int, duration_s: float, clients: int, *, far: bool = False) -> list[PlannedFault]:
    """The faults of a run, in the order of their times; those of a far store where there is one."""
    faults = []
    for kind, period_s in _PERIOD_S.items():
        if kind.endswith("far") and not far:
            continue
        chance = random.Random(f"{seed} {kind}")
        end_s = duration_s * (QUIET_DAEMON_FROM if kind == "kill daemon" else 0.95)
        mean_s = min(period_s, end_s / _AT_LEAST_ONE_IN)
        at_s = mean_s * chance.uniform(0.5, 1.0)
        while at_s < end_s:
            client = chance.randrange(STEADY_CLIENT + 1, clients) if clients > 1 else STEADY_CLIENT
            if not kind.endswith("client") or client != STEADY_CLIENT:
                faults.append(PlannedFault(at_s, kind, client, chance.uniform(0.05, 1.5)))
            at_s += mean_s * chance.uniform(0.5, 1.5)
    return sorted(faults, key=lambda fault: fault.at_s)
