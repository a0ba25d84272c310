"""State of `cornplug replan` between runs: the last snapshots and decision, and rates by the time of day.

A replica takes minutes to start. If the rate rises every morning, replicas are planned in advance, from the
usual rates of the next slots of the day, scaled to today's level.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.observed_load import MetricsSnapshot
from cornplug.planner.plan import PlanRecord, TimesCorrection
from cornplug.private_paths import write_text_atomically

DAY_S: Final = 86_400
SLOT_S: Final = 900
"""Length of a slot in seconds. The rates of all windows in a slot are averaged."""
NEWEST_DAY_WEIGHT: Final = 0.5
"""Weight of the newest day in a slot's usual rate."""
LEVEL_LIMITS: Final = (0.5, 2.0)
"""Limits of the ratio between today's rate and the usual rate. The ratio of an unusual day does not predict
its next hours."""


class SavedSnapshot(PlanRecord):
    at_s: float
    values: list[tuple[str, list[tuple[str, str]], float]]

    @property
    def snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot(self.at_s, {(name, tuple(labels)): v for name, labels, v in self.values})


class ReplanState(PlanRecord):
    format: Literal[1] = 1
    plan: str = ""
    """SHA-256 of the running plan.json, to which the other fields belong."""
    snapshots: dict[str, SavedSnapshot] = Field(default_factory=dict)
    wanted: list[str] = Field(default_factory=list)
    """Signature of the change that the last window requires, or [] if it requires no change."""
    times: dict[str, float] = Field(default_factory=dict)
    """Ratio of observed to planned mean time in the last window, by group and phase."""
    corrections: list[TimesCorrection] | None = None
    """Corrections of profiles' times that currently apply, or None if the plan's own corrections apply."""
    explained: dict[str, float] = Field(default_factory=dict)
    """Ratios as in `times`, in the windows from which the corrections were determined."""
    history: dict[str, DailyRates] = Field(default_factory=dict)
    """Rates by the time of day, by request class. The rates are kept when the plan changes."""


def load_state(path: Path, plan: str) -> ReplanState:
    """Read the state for a plan, or return a new state if the file does not exist or belongs to another plan
    (then with the `history` of the file).

    `plan` is the SHA-256 of the plan.json. Raises ConfigError if the file is not a valid state.
    """
    try:
        state = ReplanState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return ReplanState(plan=plan)
    except (OSError, ValidationError) as e:
        raise ConfigError(
            f"--state {path}",
            f"is not a state file of `cornplug replan` ({e})",
            "Remove it, or use another file.",
        ) from e
    return state if state.plan == plan else ReplanState(plan=plan, history=state.history)


def save_state(path: Path, state: ReplanState, snapshots: Mapping[str, MetricsSnapshot]) -> None:
    """Write the state with the newest snapshots.

    The file is replaced atomically, so that an interrupted run leaves the old state.
    """
    stored = {
        source: SavedSnapshot(
            at_s=s.at_s, values=[(name, list(labels), v) for (name, labels), v in s.values.items()]
        )
        for source, s in snapshots.items()
    }
    state = state.model_copy(update={"snapshots": stored})
    write_text_atomically(path, state.model_dump_json() + "\n")


class SlotMean(PlanRecord):
    total: float = 0.0
    windows: int = 0

    def add_rate(self, rate: float) -> SlotMean:
        return SlotMean(total=self.total + rate, windows=self.windows + 1)


class DailyRates(PlanRecord):
    """Rates of one request class by the time of day."""

    usual: dict[int, float] = Field(default_factory=dict)
    """Usual requests per second on earlier days, by slot of the day (UTC)."""
    day: int = 0
    """Day to which `today` belongs, in days since 1970."""
    today: dict[int, SlotMean] = Field(default_factory=dict)

    def add_window(self, rate: float, at_s: float) -> DailyRates:
        """Return the rates after a window with this rate. On a new day, the last day is added to the usual
        rates."""
        day, slot = _slot(at_s)
        kept = self if day == self.day else DailyRates(usual=self._merge_today(), day=day)
        today = {**kept.today, slot: kept.today.get(slot, SlotMean()).add_rate(rate)}
        return kept.model_copy(update={"today": today})

    def expected_rate(self, rate: float, at_s: float, ahead_s: float) -> float | None:
        """Return the highest rate to expect within `ahead_s` seconds, given the current `rate`.

        Returns None if there are no rates of earlier days.
        """
        _, slot = _slot(at_s)
        now = self.usual.get(slot)
        slots = [_slot(at_s + s)[1] for s in range(SLOT_S, int(ahead_s) + SLOT_S, SLOT_S)]
        known = [self.usual[s] for s in slots if s in self.usual]
        if not now or not known:
            return None
        least, most = LEVEL_LIMITS
        return max(known) * min(max(rate / now, least), most)

    def _merge_today(self) -> dict[int, float]:
        usual = dict(self.usual)
        for slot, mean in self.today.items():
            rate = mean.total / mean.windows
            usual[slot] = NEWEST_DAY_WEIGHT * rate + (1 - NEWEST_DAY_WEIGHT) * usual.get(slot, rate)
        return usual


def _slot(at_s: float) -> tuple[int, int]:
    day, second = divmod(int(at_s), DAY_S)
    return day, second // SLOT_S
