"""`cornplug plan`: compute a plan from a TOML file, and write it with explanations, a report and commands.

`cornplug plan init` writes a first input file, and `cornplug plan schema` prints its JSON schema.

The terminal shows progress while a plan is computed, and then the plan, its SLO checks and reasons.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, get_args

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cornplug.errors import ConfigError, PlanInfeasible, PlanUnfinished
from cornplug.planner import init_command
from cornplug.planner.inputs import schema, toml_reader
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch.connections import Transfer
from cornplug.planner.optimizer import optimization_problem
from cornplug.planner.pipeline.decide import decide, with_hours
from cornplug.planner.plan import Plan, PlanExplanation
from cornplug.planner.report import explanation, formatting, plan_folder

INFEASIBLE: Final = 1
"""Exit status if no plan exists. Status 2 means invalid input, as in all commands."""
_STYLES = {"good": "green", "bad": "bold red", "soft": "dim"}
PHASES: Final = {
    "cells": "computing capacities",
    "solve": "solving",
    "confirm": "confirming capacities by simulation",
    "validate": "simulating the whole plan",
    "reasons": "comparing alternatives",
}


def main(argv: list[str]) -> int:
    """Run `cornplug plan`, and return the exit status.

    Raises ConfigError with the line and a remedy if the input is invalid.
    """
    if argv[:1] == ["init"]:
        return init_command.main(argv[1:])
    if argv[:1] == ["schema"]:
        return _print_schema(argv[1:])
    args = _parser().parse_args(argv)
    plan_input, digest = read(args.input)
    plan_input = apply_overrides(plan_input, args)
    folder = args.output or Path(f"{args.input.stem}-plan")
    if args.check:
        return _check(plan_input, digest, folder, args.transfer)
    errors = Console(stderr=True)
    try:
        plan = compute_plan(
            plan_input, digest, errors, quiet=args.quiet or args.json, explain_work=args.explain
        )
    except (PlanInfeasible, PlanUnfinished) as e:
        return report_no_plan("plan", e)
    paths, without = plan_folder.write(plan, folder, transfer=args.transfer)
    if args.json:
        print(plan.model_dump_json(indent=1))
    elif not args.quiet:
        console = Console()
        show(plan, console)
        console.print(Text(f"\nWritten: {', '.join(str(p) for p in paths)}", style="dim"))
    if without:
        errors.print(Text(f"No commands.txt: {without}", style="yellow"))
    return 0


def _print_schema(argv: list[str]) -> int:
    argparse.ArgumentParser(
        prog="cornplug plan schema",
        description="Print the JSON schema (draft 2020-12) of a plan's TOML file, for editors and pipelines.",
        epilog="docs/plan-input.md has the same content as a page.",
    ).parse_args(argv)
    print(json.dumps(schema.plan_schema(), indent=1))
    return 0


def _check(plan_input: PlanInput, digest: str, folder: Path, transfer: Transfer) -> int:
    """Print the load test of the plan in `folder`.

    Raises ConfigError if the folder has no plan for this input.
    """
    plan = Plan.load(folder / "plan.json")
    if plan.input_digest != digest:
        raise ConfigError(
            f"-o {folder}",
            "the plan in this folder was made from another input",
            "Run without --check first.",
        )
    print(
        plan_folder.write_load_tests(
            plan_folder.load_tests(plan_input, plan, transfer=transfer), folder / "load"
        )
    )
    return 0


def read(path: Path) -> tuple[PlanInput, str]:
    """Read a plan's TOML file, and return the input and the SHA-256 of the file."""
    return toml_reader.read(path), hashlib.sha256(path.read_bytes()).hexdigest()


def compute_plan(
    plan_input: PlanInput, digest: str, console: Console, *, quiet: bool, explain_work: float
) -> Plan:
    """Compute a plan and, unless `explain_work` is 0, the plan's explanation.

    Args:
        digest: SHA-256 of the input file.
        console: Console that shows progress, unless `quiet` is set.
        explain_work: Solver work for the explanation, as in `--explain`.
    """
    with show_progress(console, quiet=quiet) as line:
        decision = decide(
            plan_input, digest=digest, progress=line.set_phase, on_progress=line.set_solver_progress
        )
        plan = with_hours(decision)
        if not explain_work:
            return plan
        found = explanation.explain(plan_input, decision, work=explain_work, progress=line.set_phase)
        return plan.model_copy(update={"explanation": found})


def report_no_plan(command: str, error: PlanInfeasible | PlanUnfinished) -> int:
    """Print the reason why there is no plan, and return the exit status."""
    print(f"cornplug {command}: {error}", file=sys.stderr)
    return INFEASIBLE


def apply_overrides(plan_input: PlanInput, args: argparse.Namespace) -> PlanInput:
    """Return the input with overrides from the command line."""
    rules: dict[str, object] = {} if args.objective is None else {"objective": args.objective}
    rules |= {"simulate": False} if args.no_simulate else {}
    solver: dict[str, object] = {} if args.time_limit is None else {"time_limit_s": args.time_limit}
    solver |= {} if args.gap is None else {"gap": args.gap}
    return plan_input.model_copy(
        update={
            "rules": plan_input.rules.model_copy(update=rules),
            "solver": plan_input.solver.model_copy(update=solver),
        }
    )


def parse_positive(text: str) -> float:
    """Parse a positive number, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _work(text: str) -> float:
    return 0.0 if text == "0" else parse_positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug plan",
        description="Plan engines, GPUs and replicas from applications, latency targets and prices. "
        "`cornplug plan init` writes a first plan.toml, and `cornplug plan schema` prints its JSON schema. "
        "If your input file is named init or schema, write ./init or ./schema.",
        epilog="Exit status: 0 if a plan was made, 1 if no plan exists, 2 for wrong input.",
    )
    parser.add_argument("input", type=Path, metavar="plan.toml")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder to write (default: NAME-plan)"
    )
    parser.add_argument(
        "--objective",
        choices=("cost", "goodput", "max-min"),
        help="objective, overrides rules.objective of the file",
    )
    parser.add_argument(
        "--time-limit",
        type=parse_positive,
        metavar="S",
        help="seconds after which a solve stops, overrides solver.time_limit_s of the file",
    )
    parser.add_argument(
        "--gap",
        type=parse_positive,
        metavar="SHARE",
        help="gap to the solver's bound at which a solve stops; 0.01 is 1 %%",
    )
    parser.add_argument(
        "--no-simulate",
        action="store_true",
        help="use closed-form estimates only; faster, but the plan is not validated",
    )
    parser.add_argument(
        "--explain",
        type=_work,
        default=explanation.DEFAULT_WORK,
        metavar="WORK",
        help="solver work for reasons, alternatives and the cost curve, in units of solver.work (a core does "
        "0.3 to 2.5 units per second); 0 turns them off (default: %(default)g)",
    )
    parser.add_argument(
        "--transfer",
        choices=get_args(Transfer),
        default="nixl",
        help="how KV is transferred from prefill to decode engines (default: %(default)s)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not plan; print `vllm bench serve` lines for the plan in DIR, and the expected times",
    )
    parser.add_argument("--quiet", action="store_true", help="write the files without printing a summary")
    parser.add_argument("--json", action="store_true", help="print plan.json instead of the summary")
    return parser


def show(plan: Plan, console: Console) -> None:
    """Print the plan. Names in the plan are printed as plain text, never parsed as rich's markup."""
    console.print(_head(plan))
    for title, body in _sections(plan):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Padding(body, (0, 0, 0, 2)))


def _head(plan: Plan) -> Text:
    head = Text.assemble((plan.name, "bold"), "  ", formatting.headline(plan))
    found = f"{formatting.describe_proof(plan.proof)} · {plan.proof.solver}, {plan.proof.seconds:.1f} s"
    return head.append(f"\n{plan.objective}: {found}", style="dim")


def _sections(plan: Plan) -> Iterator[tuple[str, RenderableType]]:
    yield "Replicas", _groups(plan)
    yield "Routes", _routes(plan)
    yield "Latency forecast", _forecast(plan)
    if any(f.job for f in plan.latency_forecasts):
        yield "Jobs", _jobs(plan)
    if plan.hours:
        yield "Hours of the day", _hours(plan)
    if plan.caches:
        yield "Caches", _caches(plan)
    if plan.reservations:
        yield "Classes of service", _reservations(plan)
    yield from _explanation(plan.explanation)


def _table(*columns: str, right: frozenset[str] = frozenset()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _groups(plan: Plan) -> Group:
    table = _table(
        "replicas", "service", "engine", "GPU", "size", "weights", "load", "times", right=frozenset({"load"})
    )
    for g in plan.groups:
        mark = formatting.profile_origin(g.profile)
        table.add_row(
            Text(f"{formatting.format_replicas(g)} ×"),
            Text(g.service),
            Text(g.engine),
            Text(f"{g.gpu} ({g.nodes})"),
            formatting.format_shape(g.parallelism, g.share),
            Text("bf16" if g.quantisation == "none" else g.quantisation),
            formatting.format_percent(g.utilisation),
            Text(mark, style="yellow" if mark == "ESTIMATE" else "green"),
        )
    return Group(table, *(Text(said, style="dim") for said in formatting.unneeded_gpu_notes(plan)))


def _routes(plan: Plan) -> Table:
    services = {g.name: f"{g.service} on {g.nodes}" for g in plan.groups}
    table = _table("requests", "rate", "structure", "through", right=frozenset({"rate"}))
    for r in plan.routes:
        through = " → ".join(
            ", ".join(
                services.get(g, g) + (f" {formatting.format_percent(w)}" if len(stage.groups) > 1 else "")
                for g, w in stage.groups.items()
            )
            for stage in r.stages
        )
        table.add_row(Text(r.class_name), formatting.format_rate(r.rate), Text(r.structure), Text(through))
    return table


def _forecast(plan: Plan) -> Table:
    table = _table("requests", "", "bound", "simulated", "", right=frozenset({"bound"}))
    for c in formatting.slo_checks(plan):
        said, how = formatting.verdict(c)
        table.add_row(
            Text(c.demand),
            c.name,
            c.bound_text,
            c.simulated_text,
            Text(said, style=_STYLES[how]),
        )
    for o in plan.latency_forecasts:
        if o.served < o.rate * (1 - 1e-6):
            short = f"{formatting.format_rate(o.served)} of {formatting.format_rate(o.rate)}"
            table.add_row(Text(o.class_name), "served", short, style="yellow")
    return table


def _jobs(plan: Plan) -> Table:
    table = _table("requests", "", "")
    for f in plan.latency_forecasts:
        if f.job is not None:
            done = f.job.done_hours
            said = "unknown" if done is None else "kept" if done <= f.job.deadline_hours else "MISSED"
            style = {"kept": "good", "MISSED": "bad"}.get(said, "soft")
            job = Text(formatting.describe_job(f.job))
            table.add_row(Text(f.class_name), job, Text(said, style=_STYLES[style]))
    return table


def _hours(plan: Plan) -> Group:
    table = _table("hours", "needed", "can be returned", "cost", right=frozenset({"cost"}))
    for part in formatting.day_parts(plan):
        table.add_row(
            part.hours,
            Text(part.needed),
            Text(part.releasable),
            formatting.format_dollars(part.cost_per_hour),
        )
    return Group(table, Text(formatting.day_cost(plan), style="dim"))


def _caches(plan: Plan) -> Table:
    table = _table("cache", "of", "GiB", "hits", right=frozenset({"GiB"}))
    for c in plan.caches:
        hits = ", ".join(f"{name} {formatting.format_percent(h)}" for name, h in c.hit_rate.items())
        table.add_row(
            Text(f"{c.name} ({c.kind})"), Text(c.component), "" if c.gib is None else f"{c.gib:g}", Text(hits)
        )
    return table


def _reservations(plan: Plan) -> Table:
    table = _table("class", "share", "priority", "deadline")
    for r in plan.reservations:
        table.add_row(
            Text(r.qos),
            formatting.format_percent(r.share),
            str(r.priority),
            formatting.format_seconds(r.deadline_s),
        )
    return table


def _explanation(explanation: PlanExplanation) -> Iterator[tuple[str, RenderableType]]:
    if explanation.binding:
        table = _table("constraint", "", "without it")
        for b in explanation.binding:
            saves = "" if b.saves_per_hour is None else f"saves {formatting.format_dollars(b.saves_per_hour)}"
            table.add_row(Text(b.constraint, style="bold"), Text(b.text), saves)
        yield "Constraints that determine the cost", table
    if explanation.alternatives:
        table = _table("instead", "", "cost", right=frozenset({"cost"}))
        for a in explanation.alternatives:
            cost = formatting.format_dollars(a.cost_per_hour) if a.cost_per_hour is not None else "impossible"
            table.add_row(Text(a.name, style="bold"), Text(a.reason_against or a.text), cost)
        yield "Alternatives", table
    if explanation.curve:
        table = _table("every bound ×", "cost", right=frozenset({"every bound ×", "cost"}))
        for p in explanation.curve:
            cost = formatting.format_dollars(p.cost_per_hour) if p.cost_per_hour is not None else "impossible"
            table.add_row(f"{p.slo_factor:g}", cost)
        yield "Cost by SLO", table
    if explanation.monolith:
        yield "Monolith", Text(explanation.monolith)
    if explanation.notes:
        yield "Notes", Group(*(Text(f"· {note}") for note in explanation.notes))


class ProgressLine:
    """Line that shows the progress. `decide` and `explain` call `set_phase` and `set_solver_progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=1.0)
        self._phase = ""

    def set_phase(self, name: str, share: float) -> None:
        if name != self._phase:
            self._phase = name
            self._progress.reset(self._task, total=1.0, description=PHASES.get(name, name))
        self._progress.update(self._task, completed=min(share, 1.0))

    def set_solver_progress(self, progress: optimization_problem.SolveProgress) -> None:
        self._progress.update(self._task, description=solver_progress(progress))


def solver_progress(progress: optimization_problem.SolveProgress) -> str:
    """Describe the solver's progress, as in "solving: 58.2 found, bound 57.9, gap 0.52 %"."""
    bound = "no bound yet" if progress.bound is None else f"bound {progress.bound:.4g}"
    if progress.incumbent is None:
        return f"solving: no plan yet, {bound}"
    said = f"solving: {progress.incumbent:.4g} found, {bound}"
    if progress.bound is None:
        return said
    gap = abs(progress.incumbent - progress.bound) / max(abs(progress.incumbent), 1e-9)
    return f"{said}, gap {formatting.format_percent(gap)}"


@contextmanager
def show_progress(console: Console, *, quiet: bool) -> Iterator[ProgressLine]:
    """Show a progress line for the block, and remove it at the end. Without a terminal, show nothing."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield ProgressLine(progress)
