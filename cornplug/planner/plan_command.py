"""`cornplug plan`: from a TOML file to a plan, its reasons, a report and its processes' command lines.

`cornplug plan init` writes a first one, `cornplug plan schema` prints its JSON schema.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Final, get_args

from rich.console import Console
from rich.text import Text

from cornplug.errors import ConfigError, PlanInfeasible, PlanUnfinished
from cornplug.planner.inputs import json_schema, toml_reader
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.pipeline.hours_of_day import with_hours
from cornplug.planner.plan import Plan
from cornplug.planner.report import explanation, load_test, plan_folder, progress
from cornplug.planner.report import terminal as summary
from cornplug.planner.starter import init_command

INFEASIBLE: Final = 1
"""Exit status; 2 is a wrong input's, as everywhere in cornplug."""


def main(argv: list[str]) -> int:
    """Plan, print and write. Raises ConfigError for a wrong input, with its line and a remedy."""
    if argv[:1] == ["init"]:
        return init_command.main(argv[1:])
    if argv[:1] == ["schema"]:
        return _print_schema(argv[1:])
    args = _parser().parse_args(argv)
    plan_input, digest = read(args.input)
    plan_input = overridden(plan_input, args)
    folder = args.output or Path(f"{args.input.stem}-plan")
    if args.check:
        return _check(plan_input, digest, folder, args.transfer)
    errors = Console(stderr=True)
    try:
        plan = planned(plan_input, digest, errors, quiet=args.quiet or args.json, reasons=args.explain)
    except (PlanInfeasible, PlanUnfinished) as e:
        return refused("plan", e)
    paths, without = plan_folder.write(plan, folder, transfer=args.transfer)
    if args.json:
        print(plan.model_dump_json(indent=1))
    elif not args.quiet:
        console = Console()
        summary.show(plan, console)
        console.print(Text(f"\nWritten: {', '.join(str(p) for p in paths)}", style="dim"))
    if without:
        errors.print(Text(f"No commands.txt: {without}", style="yellow"))
    return 0


def _print_schema(argv: list[str]) -> int:
    argparse.ArgumentParser(
        prog="cornplug plan schema",
        description="Print the JSON schema (draft 2020-12) of a plan's TOML file, for editors and pipelines.",
        epilog="docs/plan-input.md is the same as a page.",
    ).parse_args(argv)
    print(json.dumps(json_schema.plan_schema(), indent=1))
    return 0


def _check(plan_input: PlanInput, digest: str, folder: Path, transfer: Transfer) -> int:
    """Print the load test of the plan in `folder`; ConfigError: it has no plan of this input."""
    plan = Plan.load(folder / "plan.json")
    if plan.input_digest != digest:
        raise ConfigError(f"-o {folder}", "its plan is of another input", "Plan first, without --check.")
    print(load_test.write(load_test.load_tests(plan_input, plan, transfer=transfer), folder / "load"))
    return 0


def read(path: Path) -> tuple[PlanInput, str]:
    """The input and its digest."""
    return toml_reader.read(path), hashlib.sha256(path.read_bytes()).hexdigest()


def planned(plan_input: PlanInput, digest: str, console: Console, *, quiet: bool, reasons: float) -> Plan:
    """The plan with its reasons, progress shown on `console`."""
    with progress.shown(console, quiet=quiet) as line:
        decision = decide(plan_input, digest=digest, progress=line.phase, watch=line.watch)
        plan = with_hours(decision)
        if not reasons:
            return plan
        found = explanation.explain(plan_input, decision, work=reasons, progress=line.phase)
        return plan.model_copy(update={"explanation": found})


def refused(command: str, error: PlanInfeasible | PlanUnfinished) -> int:
    """Print why there is no plan; returns the exit status."""
    print(f"cornplug {command}: {error}", file=sys.stderr)
    return INFEASIBLE


def overridden(plan_input: PlanInput, args: argparse.Namespace) -> PlanInput:
    """The input with the command line's values in place of the file's."""
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


def positive(text: str) -> float:
    """A number over 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not over 0")
    return value


def _work(text: str) -> float:
    return 0.0 if text == "0" else positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug plan",
        description="Plan what to run where, from component graphs, SLOs and prices. "
        "`cornplug plan init` writes a first plan.toml, `cornplug plan schema` prints its JSON schema "
        "(files of these names are ./init and ./schema).",
        epilog="Exit status: 0: a plan was made; 1: no plan exists, with the reason; 2: wrong input.",
    )
    parser.add_argument("input", type=Path, metavar="plan.toml")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: NAME-plan")
    parser.add_argument(
        "--objective", choices=("cost", "goodput", "max-min"), help="overrides rules.objective of the file"
    )
    parser.add_argument(
        "--time-limit",
        type=positive,
        metavar="S",
        help="seconds after which a solve ends although its work is not done",
    )
    parser.add_argument(
        "--gap", type=positive, metavar="SHARE", help="to the solver's bound at which it stops: 0.01 is 1 %%"
    )
    parser.add_argument(
        "--no-simulate",
        action="store_true",
        help="closed forms only: faster, and not validated",
    )
    parser.add_argument(
        "--explain",
        type=_work,
        default=explanation.WORK,
        metavar="WORK",
        help="solver work for reasons, alternatives and the cost curve, in the unit of solver.work: "
        "a core does 0.3 to 2.5 a second; 0: none of them (default: %(default)g)",
    )
    parser.add_argument(
        "--transfer",
        choices=get_args(Transfer),
        default="nixl",
        help="how KV moves from prefill to decode engines",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="plan nothing: print `vllm bench serve` lines for the plan in DIR, and the times to expect",
    )
    parser.add_argument("--quiet", action="store_true", help="write the files, print nothing")
    parser.add_argument("--json", action="store_true", help="print plan.json in place of the summary")
    return parser
