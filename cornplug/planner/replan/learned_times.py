"""Decides from two windows whether profiles' times have to be corrected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cornplug.planner.plan import TimesCorrection
from cornplug.planner.replan.observed_times import ObservedTime
from cornplug.planner.report import formatting

NOTICED: Final = 1.2
"""Ratio of observed to planned time, or its inverse, at which times are corrected."""
NEUTRAL: Final = 0.05


def ratios(observed: Sequence[ObservedTime]) -> dict[str, float]:
    """Return a window's ratios of observed to planned times, which the next window needs."""
    return {_name(one): one.ratio for one in observed}


def agreed(
    observed: Sequence[ObservedTime], last: Mapping[str, float], explained: Mapping[str, float]
) -> list[ObservedTime]:
    """Return all times of a window if at least one has to be corrected, otherwise [].

    A time has to be corrected if it deviates by `NOTICED`, in the same direction as in the last window. All
    times are returned, because a correction of prefill also changes decode. `last` contains the last window's
    ratios, and `explained` the ratios that the current corrections explain.
    """
    for one in observed:
        name, usual = _name(one), explained.get(_name(one), 1.0)
        side = _off(one.ratio / usual)
        if side and side == _off(last.get(name, usual) / usual):
            return list(observed)
    return []


def without_neutral(corrections: Sequence[TimesCorrection]) -> list[TimesCorrection]:
    """Return the corrections that have an effect.

    If an engine matches its profile again, its factors return to about 1.
    """
    return [c for c in corrections if max(abs(c.prefill - 1), abs(c.decode - 1)) > NEUTRAL]


def _off(ratio: float) -> int:
    return (ratio >= NOTICED) - (ratio <= 1 / NOTICED)


def _name(one: ObservedTime) -> str:
    return f"{one.group} {one.phase}"


def text(one: TimesCorrection) -> str:
    weights = "" if one.quantisation == "none" else f", {one.quantisation}"
    shape = formatting.shape(one.parallelism, one.share)
    where = f"{one.service} ({one.engine} {shape}{weights}) on {one.gpu}"
    return (
        f"Corrected from metrics: {where} takes {one.prefill:.2g} x the profile's time for prefill "
        f"and {one.decode:.2g} x for decode."
    )
