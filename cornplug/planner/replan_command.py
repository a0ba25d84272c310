"""`cornplug replan`: decide whether the observed load requires another plan, and whether to change.

Each run ends one window, which is the difference between the engines' current metrics and their metrics at
the last run, or `--window` seconds ago. A change is recommended if two consecutive windows require the same
change. This command does not start or stop anything.

The state between runs consists of the last snapshots, decision, and rates by the time of day. A replica
takes minutes to start. If the rate rises every morning, replicas are planned in advance, from the usual
rates of the next slots of the day, scaled to today's level.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError
from rich.console import Console

from cornplug.errors import ConfigError, PlanInfeasible, PlanUnfinished
from cornplug.planner import calibration, observed_load, plan_command, replan_decision
from cornplug.planner.calibration import FigureDifference, calibrate
from cornplug.planner.candidates.cells import merged_corrections, profile_key_of
from cornplug.planner.inputs.schema import Application, ChangeRules, PlanInput
from cornplug.planner.observed_load import MetricsSnapshot, ObservedWindow
from cornplug.planner.pipeline.decide import PlanDecision, decide
from cornplug.planner.pipeline.formulate import formulate, group_key
from cornplug.planner.plan import Plan, PlanRecord, TimesCorrection
from cornplug.planner.replan_decision import (
    PlanStep,
    ReplanDecision,
    decide_change,
    slow_engines,
    times_of_groups,
)
from cornplug.planner.report import plan_folder
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


def load(path: Path, plan: str) -> ReplanState:
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


def save(path: Path, state: ReplanState, snapshots: Mapping[str, MetricsSnapshot]) -> None:
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


CHANGE_STATUS: Final = 3
"""Exit status if a change is recommended."""
NO_CHANGE: Final = ReplanDecision(
    False, "the load is the load for which the running plan was made", (), 0.0, 0.0
)
RATE_FIGURES: Final = ("rate", calibration.EXPECTED_RATE)
_WINDOW_S: Final = 60.0
_AHEAD_S: Final = 1800.0
_STALE_WINDOWS: Final = 10
"""Number of windows after which a snapshot is too old, because it belongs to another time of day."""


def main(argv: list[str]) -> int:
    """Run `cornplug replan`, and return the exit status.

    The status is 0 to keep the plan, 3 to change the plan, and 1 if no plan can serve the load. Raises
    ConfigError if the input is invalid.
    """
    args = _parser().parse_args(argv)
    plan_input, digest = plan_command.read(args.input)
    old = Plan.load(args.plan)
    known = hashlib.sha256(args.plan.read_bytes()).hexdigest()
    sources = [_source(text, old) for text in args.metrics]
    state_path = args.state or args.plan.with_name(f"{args.plan.stem}-state.json")
    state = load(state_path, known)
    last = {name: stored.snapshot for name, stored in state.snapshots.items()}
    before, after = _snapshots([address for _, address in sources], last, args.window)
    if before is None:
        save(state_path, state.model_copy(update={"wanted": [], "times": {}}), after)
        print("Saved the first snapshot. Run again when there are newer metrics.")
        return 0
    wanted, state = tuple(state.wanted), state.model_copy(update={"wanted": []})
    windows = _windows(sources, before, after)
    slow = [engines.text for engines in slow_engines(old, windows)]
    change = _change_rules(plan_input.change, args.plan)
    at_s = max(snapshot.at_s for snapshot in after.values())
    state, applications, differences = _update_load(plan_input, old, windows, state, at_s, args.ahead)
    seen = plan_input.model_copy(update={"applications": applications, "change": change})
    state, corrections = _update_times(seen, change, old, windows, state, keep=args.keep_times)
    told = _WindowFindings(
        tuple(differences), tuple(slow), tuple(c for c in corrections if c not in old.corrections)
    )
    planned_for = _digest(digest, differences, corrections)
    if planned_for == old.input_digest:
        save(state_path, state, after)
        return _print_verdict(args, old, old, told, NO_CHANGE, confirmed=False)
    try:
        decision = _compute_decision(seen, planned_for, corrections, quiet=args.json)
    except (PlanInfeasible, PlanUnfinished) as e:
        save(state_path, state, after)
        return plan_command.report_no_plan("replan", e)
    same_work = all(d.what in RATE_FIGURES for d in differences) and corrections == old.corrections
    verdict = decide_change(old, decision, change, only_rates_differ=same_work)
    agreed = verdict.change_recommended and verdict.signature == wanted
    state = state.model_copy(update={"wanted": list(verdict.signature)})
    save(state_path, state, after)
    if agreed and args.output is not None:
        plan_folder.write(with_start_times(old, decision.plan, time.time()), args.output)
    return _print_verdict(args, old, decision.plan, told, verdict, confirmed=agreed)


def _update_load(
    plan_input: PlanInput,
    old: Plan,
    windows: Mapping[str, ObservedWindow],
    state: ReplanState,
    at_s: float,
    ahead_s: float,
) -> tuple[ReplanState, list[Application], list[FigureDifference]]:
    """Return the state with this window's rates, the applications with the observed load, and the
    differences."""
    given = plan_input.applications
    applications, differences = calibration.update_applications(given, old, windows)
    rates = calibration.observed_rates(given, old, windows)
    history = dict(state.history)
    soon = {}
    for name, rate in rates.items():
        history[name] = history.get(name, DailyRates()).add_window(rate, at_s)
        if ahead_s and (expected := history[name].expected_rate(rate, at_s, ahead_s)) is not None:
            soon[name] = expected
    applications, sooner = calibration.apply_expected_rates(applications, soon)
    return state.model_copy(update={"history": history}), applications, [*differences, *sooner]


def _update_times(
    observed_input: PlanInput,
    change: ChangeRules,
    old: Plan,
    windows: Mapping[str, ObservedWindow],
    state: ReplanState,
    *,
    keep: bool,
) -> tuple[ReplanState, list[TimesCorrection]]:
    """Return the state with this window's times, and the corrections of profiles.

    With `keep`, profiles are not corrected.
    """
    if keep:
        return state.model_copy(update={"times": {}, "corrections": None, "explained": {}}), []
    known = old.corrections if state.corrections is None else state.corrections
    observed = times_of_groups(old, windows, now=time.time(), min_age_s=change.min_dwell_s)
    times = replan_decision.ratios(observed)
    update: dict[str, object] = {"times": times}
    if off := replan_decision.times_to_correct(observed, state.times, state.explained):
        found = calibrate(formulate(observed_input, known), old, off)
        known = replan_decision.drop_neutral_corrections(merged_corrections(known, found))
        update |= {"corrections": known, "explained": {**state.explained, **times}}
    return state.model_copy(update=update), known


def _digest(
    file_digest: str, differences: Sequence[FigureDifference], corrections: Sequence[TimesCorrection]
) -> str:
    """Return the digest of a plan's input. If there are observed values, it covers the file and these values.

    Values are rounded to two digits, so that a slightly different load has the same digest.
    """
    if not differences and not corrections:
        return file_digest
    seen = [f"{d.demand} {d.what} {d.observed:.2g}" for d in differences]
    seen += [f"{' '.join(map(str, profile_key_of(c)))} {c.prefill:.2g} {c.decode:.2g}" for c in corrections]
    return hashlib.sha256("\n".join([file_digest, *seen]).encode()).hexdigest()


def with_start_times(old: Plan, new: Plan, now: float) -> Plan:
    """Return the new plan with the start time of each group's replicas.

    Unchanged groups keep their start time. A group with a new replica has the start time `now`.
    """
    before = {group_key(g): g for g in old.groups}
    groups = []
    for g in new.groups:
        same = before.get(group_key(g))
        stays = same is not None and same.replicas >= g.replicas
        groups.append(g.model_copy(update={"since": same.since if same is not None and stays else now}))
    return new.model_copy(update={"groups": groups})


def _source(text: str, plan: Plan) -> tuple[str, str]:
    """Parse "SCOPE=ADDRESS" if SCOPE is a scope of the plan. Any other text is an address without a scope."""
    scope, equals, address = text.partition("=")
    if equals and ("/" not in scope or scope in observed_load.scopes(plan)) and ":" not in scope:
        observed_load.check_scope(plan, scope)
        return scope, address
    return observed_load.ALL_ENGINES, text


def _snapshots(
    addresses: Sequence[str], before: Mapping[str, MetricsSnapshot], window_s: float | None
) -> tuple[dict[str, MetricsSnapshot] | None, dict[str, MetricsSnapshot]]:
    """Return the snapshots at the beginning and the end of a window, by address.

    If the engines' earlier snapshots are missing or too old, this waits until a window has passed. Files are
    read once. If files are not newer than the earlier snapshots, the beginning is None.
    """
    now = {a: observed_load.read_metrics(a) for a in addresses}
    live = all(a.startswith(("http://", "https://")) for a in addresses)
    fresh = all(a in before and now[a].at_s > before[a].at_s for a in addresses)
    if live:
        wanted = window_s or _WINDOW_S
        old = not fresh or any(now[a].at_s - before[a].at_s > _STALE_WINDOWS * wanted for a in addresses)
        if window_s is not None or old:
            time.sleep(wanted)
            return now, {a: observed_load.read_metrics(a) for a in addresses}
    return (dict(before), now) if fresh else (None, now)


def _windows(
    sources: Iterable[tuple[str, str]],
    before: Mapping[str, MetricsSnapshot],
    after: Mapping[str, MetricsSnapshot],
) -> dict[str, ObservedWindow]:
    by_scope: dict[str, list[str]] = {}
    for scope, address in sources:
        by_scope.setdefault(scope, []).append(address)
    return {
        scope: observed_load.window_between(_merged(before, addresses), _merged(after, addresses))
        for scope, addresses in by_scope.items()
    }


def _merged(snapshots: Mapping[str, MetricsSnapshot], addresses: Sequence[str]) -> MetricsSnapshot:
    """Merge the snapshots of several engines. The address is added to the labels of each series."""
    values = {
        (name, (*labels, ("source", address))): value
        for address in addresses
        for (name, labels), value in snapshots[address].values.items()
    }
    return MetricsSnapshot(sum(snapshots[a].at_s for a in addresses) / len(addresses), values)


def _change_rules(in_file: ChangeRules | None, plan: Path) -> ChangeRules:
    """Return the change rules of the input file, with `plan` as the current deployment."""
    return ChangeRules(plan=plan) if in_file is None else in_file.model_copy(update={"plan": plan})


def _compute_decision(
    plan_input: PlanInput, digest: str, corrections: Sequence[TimesCorrection], *, quiet: bool
) -> PlanDecision:
    with plan_command.show_progress(Console(stderr=True), quiet=quiet) as line:
        return decide(
            plan_input,
            digest=digest,
            progress=line.set_phase,
            on_progress=line.set_solver_progress,
            corrections=corrections,
        )


def _print_verdict(
    args: argparse.Namespace,
    old: Plan,
    new: Plan,
    findings: _WindowFindings,
    verdict: ReplanDecision,
    *,
    confirmed: bool,
) -> int:
    if args.json:
        print(json.dumps(_verdict_json(findings, verdict, confirmed=confirmed), indent=1))
    else:
        print("\n".join(_verdict_lines(old, new, findings, verdict, confirmed=confirmed)))
    return CHANGE_STATUS if confirmed else 0


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else plan_command.parse_positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug replan",
        description="Compare the observed load with the plan, and recommend a change if it pays off.",
        epilog="Exit status: 0 keep the plan, 3 change it, 1 no plan can serve the load, 2 wrong input.",
    )
    parser.add_argument("input", type=Path, metavar="plan.toml")
    parser.add_argument("--plan", type=Path, required=True, metavar="plan.json", help="running plan")
    parser.add_argument(
        "--metrics",
        action="append",
        required=True,
        metavar="[SCOPE=]SOURCE",
        help="URL of an engine's /metrics or of a Prometheus query, or a file with such output; can be "
        "repeated. "
        "SCOPE is the group, application or application/request that the engine serves",
    )
    parser.add_argument(
        "--window",
        type=plan_command.parse_positive,
        metavar="S",
        help="measure for S seconds now (default: since the last run)",
    )
    parser.add_argument(
        "--ahead",
        type=_seconds,
        default=_AHEAD_S,
        metavar="S",
        help="plan for the highest rate that earlier days had in the S seconds after this time of day, "
        "scaled to today; 0 plans for the observed rate (default: %(default)g)",
    )
    parser.add_argument(
        "--keep-times",
        action="store_true",
        help="keep the times of the profiles (default: correct them if they deviate in two windows)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="file for the state between runs (default: next to plan.json)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder for the new plan, if a change is recommended"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@dataclass(frozen=True)
class _WindowFindings:
    """Deviations from the plan in the metrics of a window."""

    differences: tuple[FigureDifference, ...]
    slow: tuple[str, ...]
    """Messages about engines that are slower than planned."""
    corrections: tuple[TimesCorrection, ...] = ()
    """Corrections of profiles' times that the running plan does not contain."""


def _verdict_lines(
    old: Plan, new: Plan, findings: _WindowFindings, verdict: ReplanDecision, *, confirmed: bool
) -> list[str]:
    """Return the lines to print, which is a single line if no action is required and no time deviates."""
    times = [*findings.slow, *map(replan_decision.correction_text, findings.corrections)]
    if not verdict.change_recommended:
        return [f"{verdict.reason[0].upper()}{verdict.reason[1:]}.", *times]
    if not confirmed:
        waiting = f"This window requires a change ({verdict.reason}). The next window must confirm this."
        return [waiting, *times]
    said = [f"Change: {verdict.reason}."]
    said += [
        f"  {d.demand}: {d.what} {_figure(d.planned)} → {_figure(d.observed)}" for d in findings.differences
    ]
    said += [f"{n}. {step.text}" for n, step in enumerate(verdict.steps, 1)]
    said.append(f"Cost: ${old.cost_per_hour:,.2f}/h → ${new.cost_per_hour:,.2f}/h")
    return [*said, *times]


def _verdict_json(
    findings: _WindowFindings, verdict: ReplanDecision, *, confirmed: bool
) -> dict[str, object]:
    return {
        "act": confirmed,
        "waiting": verdict.change_recommended and not confirmed,
        "reason": verdict.reason,
        "saves_per_hour": verdict.saves_per_hour,
        "switching_cost": verdict.switching_cost,
        "observed": [vars(d) for d in findings.differences],
        "slow": list(findings.slow),
        "corrections": [c.model_dump() for c in findings.corrections],
        "steps": [_step(s) for s in verdict.steps] if verdict.change_recommended else [],
    }


def _step(step: PlanStep) -> dict[str, str]:
    return {"kind": step.kind, "text": step.text}


def _figure(value: float) -> str:
    return f"{value:.3g}"
