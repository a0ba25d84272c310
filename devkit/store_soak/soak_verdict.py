"""Whether a soak's outcome keeps the store's promises."""

from __future__ import annotations

from typing import Final

from devkit.store_soak.soak_growth import GrowthBound, GrowthFound, growth
from devkit.store_soak.soak_run import SoakOutcome

LONGEST_S: Final = 15.0
"""Of an operation. Its waits have deadlines of half a second each; the rest is for copies of 20 MiB on a
loaded machine. An operation beyond it waits without a deadline."""
_WARM_UP_PART: Final = 0.2


def growth_of(outcome: SoakOutcome) -> dict[str, GrowthFound | None]:
    """The growth of each process that was looked at; None where its life was too short to tell."""
    found = {}
    for name, samples in outcome.samples.items():
        life_s = samples[-1].at_s - samples[0].at_s if samples else 0.0
        found[name] = growth(samples, warm_up_s=_WARM_UP_PART * life_s)
    return found


def verdict(outcome: SoakOutcome, bound: GrowthBound | None = None) -> list[str]:
    """A line for each broken promise; none where all are kept."""
    lines = [f"wrong bytes: {line}" for line in outcome.wrong] + list(outcome.broken)
    if not outcome.hits:
        lines.append("no entry was read: the run says nothing")
    if outcome.far and not outcome.far["read: read"]:
        lines.append("no entry came out of the far store: the run says nothing of it")
    for name, took_s in outcome.longest_s.items():
        if took_s > LONGEST_S:
            lines.append(f"an operation ({name}) took {took_s:.1f} s, bound {LONGEST_S:.0f} s")
    for name, found in growth_of(outcome).items():
        if found is not None:
            lines += [f"{name}: {line}" for line in found.excess(bound or GrowthBound())]
    return lines
