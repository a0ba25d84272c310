"""`cornplug replan`: decide whether the observed load requires another plan, and whether to change.

Each run ends one window, which is the difference between the engines' current metrics and their metrics at
the last run, or `--window` seconds ago. A change is recommended if two consecutive windows require the same
change. This command does not start or stop anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner import observed_load, plan_command, replan_decision, workload_update
from cornplug.planner.calibration import calibrate
from cornplug.planner.candidates.timed_configs import merged_corrections, profile_key_of
from cornplug.planner.inputs.schema import Application, ChangeRules, PlanInput
from cornplug.planner.observed_load import MetricsSnapshot, ObservedWindow
from cornplug.planner.pipeline.decide import PlanDecision, decide
from cornplug.planner.pipeline.formulate import formulate, group_key
from cornplug.planner.plan import Plan, TimesCorrection
from cornplug.planner.replan_decision import (
    PlanStep,
    ReplanDecision,
    decide_change,
    slow_engines,
    times_of_groups,
)
from cornplug.planner.replan_state import DailyRates, ReplanState, load_state, save_state
from cornplug.planner.report import plan_folder
from cornplug.planner.workload_update import FigureDifference

CHANGE_STATUS: Final = 3
"""Exit status if a change is recommended."""
NO_CHANGE: Final = ReplanDecision(
    False, "the load is the load for which the running plan was made", (), 0.0, 0.0
)
RATE_FIGURES: Final = ("rate", workload_update.EXPECTED_RATE)
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
    state = load_state(state_path, known)
    last = {name: stored.snapshot for name, stored in state.snapshots.items()}
    before, after = _snapshots([address for _, address in sources], last, args.window)
    if before is None:
        save_state(state_path, state.model_copy(update={"wanted": [], "times": {}}), after)
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
        save_state(state_path, state, after)
        return _print_verdict(args, old, old, told, NO_CHANGE, confirmed=False)
    try:
        decision = _compute_decision(seen, planned_for, corrections, quiet=args.json)
    except (PlanInfeasible, PlanUnfinished) as e:
        save_state(state_path, state, after)
        return plan_command.report_no_plan("replan", e)
    same_work = all(d.what in RATE_FIGURES for d in differences) and corrections == old.corrections
    verdict = decide_change(old, decision, change, only_rates_differ=same_work)
    agreed = verdict.change_recommended and verdict.signature == wanted
    state = state.model_copy(update={"wanted": list(verdict.signature)})
    save_state(state_path, state, after)
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
    applications, differences = workload_update.update_applications(given, old, windows)
    rates = workload_update.observed_rates(given, old, windows)
    history = dict(state.history)
    soon = {}
    for name, rate in rates.items():
        history[name] = history.get(name, DailyRates()).add_window(rate, at_s)
        if ahead_s and (expected := history[name].expected_rate(rate, at_s, ahead_s)) is not None:
            soon[name] = expected
    applications, sooner = workload_update.apply_expected_rates(applications, soon)
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
    """Return the state with the times that requests took in this window, compared with the plan, and the
    corrections to apply to profiles. With `keep`, profiles are not corrected."""
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
