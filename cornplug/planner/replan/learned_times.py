"""Corrections of profiles' times that two windows agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cornplug.planner.plan import TimesCorrection
from cornplug.planner.replan.observed_times import ObservedTime
from cornplug.planner.report import formatting

NOTICED: Final = 1.2
"""Observed over planned, or planned over observed: nearer times correct nothing."""
NEUTRAL: Final = 0.05


def ratios(observed: Sequence[ObservedTime]) -> dict[str, float]:
    """Of a window, for the next one."""
    return {_name(one): one.ratio for one in observed}


def agreed(
    observed: Sequence[ObservedTime], last: Mapping[str, float], explained: Mapping[str, float]
) -> list[ObservedTime]:
    """All times of the window, if one is off by `NOTICED`, and was so in the last window, on the same side.

    All, for a correction of prefill moves decode. `last`: ratios of the last window; `explained`: those that
    the corrections since the plan was made explain.
    """
    for one in observed:
        name, usual = _name(one), explained.get(_name(one), 1.0)
        side = _off(one.ratio / usual)
        if side and side == _off(last.get(name, usual) / usual):
            return list(observed)
    return []


def without_neutral(corrections: Sequence[TimesCorrection]) -> list[TimesCorrection]:
    """Those that correct something: a factor of an engine that has its profile's times again is near 1."""
    return [c for c in corrections if max(abs(c.prefill - 1), abs(c.decode - 1)) > NEUTRAL]


def _off(ratio: float) -> int:
    return (ratio >= NOTICED) - (ratio <= 1 / NOTICED)


def _name(one: ObservedTime) -> str:
    return f"{one.group} {one.phase}"


def text(one: TimesCorrection) -> str:
    """The sentence for an operator."""
    weights = "" if one.quantisation == "none" else f", {one.quantisation}"
    shape = formatting.shape(one.tp, one.pp, one.share, one.dp, one.dcp, one.pcp)
    where = f"{one.service} ({one.engine} {shape}{weights}) on {one.gpu}"
    return (
        f"Corrected by its metrics: {where} takes {one.prefill:.2g} x its profile's time to prefill, "
        f"{one.decode:.2g} x to decode."
    )
