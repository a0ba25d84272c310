"""State that `cornplug replan` saves between runs: the last snapshots, and the last window's decision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.latency_forecast import PlanRecord
from cornplug.planner.plan import TimesCorrection
from cornplug.planner.replan.load_history import DailyRates
from cornplug.planner.replan.observed_load import MetricsSnapshot
from cornplug.private_paths import replace_text


class KeptSnapshot(PlanRecord):
    at_s: float
    values: list[tuple[str, list[tuple[str, str]], float]]

    @property
    def snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot(self.at_s, {(name, tuple(labels)): v for name, labels, v in self.values})


class ReplanState(PlanRecord):
    format: Literal[1] = 1
    plan: str = ""
    """SHA-256 of the plan.json to which the other fields belong."""
    snapshots: dict[str, KeptSnapshot] = Field(default_factory=dict)
    wanted: list[str] = Field(default_factory=list)
    """Signature of the change that the last window requires, or [] if it requires none."""
    times: dict[str, float] = Field(default_factory=dict)
    """Group and phase -> ratio of observed to planned mean time in the last window."""
    corrections: list[TimesCorrection] | None = None
    """Corrections of profiles' times that currently apply, or None if the plan's own corrections apply."""
    explained: dict[str, float] = Field(default_factory=dict)
    """Group and phase -> ratio as in `times`, in the windows from which the corrections were determined."""
    history: dict[str, DailyRates] = Field(default_factory=dict)
    """Request class -> rates by the time of day. They are kept when the plan changes."""


def load(path: Path, plan: str) -> ReplanState:
    """Read the state for a plan, or return a new state if there is none.

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


def save(path: Path, state: ReplanState, snapshots: Mapping[str, MetricsSnapshot]) -> None:
    """Write the state with the newest snapshots.

    The file is replaced atomically, so that an interrupted run leaves the old state.
    """
    stored = {
        source: KeptSnapshot(
            at_s=s.at_s, values=[(name, list(labels), v) for (name, labels), v in s.values.items()]
        )
        for source, s in snapshots.items()
    }
    state = state.model_copy(update={"snapshots": stored})
    replace_text(path, state.model_dump_json() + "\n")
