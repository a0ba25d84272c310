"""`cornplug plan`: compute a plan from a TOML file, and write it with explanations, a report and commands.

`cornplug plan init` writes a first input file, and `cornplug plan schema` prints its JSON schema.
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
from cornplug.planner import init_command
from cornplug.planner.inputs import json_schema, toml_reader
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.pipeline.hours_of_day import with_hours
from cornplug.planner.plan import Plan
from cornplug.planner.report import explanation, load_test, plan_folder, terminal
from cornplug.planner.report import terminal as summary

INFEASIBLE: Final = 1
"""Exit status if no plan exists. Status 2 means invalid input, as in all commands."""


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
        summary.show(plan, console)
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
    print(json.dumps(json_schema.plan_schema(), indent=1))
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
    print(load_test.write(load_test.load_tests(plan_input, plan, transfer=transfer), folder / "load"))
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
    with terminal.show_progress(console, quiet=quiet) as line:
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
