"""Runs the tests marked `more`: every combination of families, flags and faults, and long searches.

script/test has one test of each promise; CONTRIBUTING.md says when to run this. The tests marked `timed` run
here with their upper bounds on durations, which script/test does not check. Hypothesis draws new examples in
each run. A unit is a test file in one environment, on one bed of vLLM (devkit/vllm_beds.py). Units run one
after the other, and a failure does not stop the run. A failed test gets a second try at the end, alone, if at
most two tests failed. The results go to docs/support-matrix.md.

  script/test-more                     everything, several hours on two cores
  script/test-more --list              what would run, with expected durations
  script/test-more --shard 2/6         one of six parts of about equal duration
  script/test-more --changed           what the difference from main can affect
  script/test-more --bed v2-gpu        the units of one bed
  script/test-more -k families         pytest arguments select tests
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from devkit.test_runs.child_process import run_child
from devkit.test_runs.outcomes import Outcomes, run_pytest
from devkit.test_runs.path_map import NoBaseError, PathMap, changed_paths
from devkit.test_runs.second_try import FinishedRun, apply_second_tries, summary
from devkit.test_runs.shards import expected_s, pack, read_durations, record_durations, total_s
from devkit.test_runs.units import (
    ANYWHERE,
    TREE,
    VLLM,
    VLLM_NEXT,
    Unit,
    collect,
    has_beds,
    split_paths,
    units_of,
)

_WRONG_USAGE: Final = 2
_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {"RECORD_SUPPORT": "1", "DEVKIT_CHECK_DURATIONS": "1"}  # tests/support_results.py, tests/time_limits.py
)
_OPTIONS: Final = ("-q", "--durations=10", "--hypothesis-profile=random")
"""pytest options of every unit. The profile is registered in tests/conftest.py."""


@dataclass
class UnitRun:
    """A unit that ran, and how long it took."""

    unit: Unit
    seconds: float
    run: FinishedRun

    def verdict(self) -> str:
        """Result in a word or two."""
        outcomes = self.run.outcomes
        if failed := outcomes.count("failed"):
            return f"{failed} FAILED"
        if outcomes.status:
            return f"INCOMPLETE (status {outcomes.status})"
        return "ok, second try" if self.run.recovered else "ok"


def main(arguments: Sequence[str]) -> int:
    """Run or list the selected units; return the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    durations = read_durations()
    try:
        units = select_units(options, rest)
    except (NoBaseError, RuntimeError) as error:
        print(f"test-more: {error}", file=sys.stderr)
        return _WRONG_USAGE
    narrowed = options.changed or options.shard
    if options.shard:
        number, count = options.shard
        units = pack(units, durations, count)[number - 1]
    if not units:
        print("test-more: no test is selected")
        return 0 if narrowed else _WRONG_USAGE
    if options.list:
        print(listing(units, durations))
        return 0
    runs = run_units(units, rest, durations)
    apply_second_tries([run.run for run in runs])
    subprocess.run([TREE / "script" / "docs"], check=False)
    if options.record and not rest:
        passed = [run for run in runs if run.run.outcomes.status == 0 and not run.run.recovered]
        record_durations({run.unit.name: run.seconds for run in passed})
    print(table(runs, durations))
    print(summary([run.run for run in runs]), flush=True)
    return int(len(runs) < len(units) or any(run.run.outcomes.status for run in runs))


def select_units(options: argparse.Namespace, rest: Sequence[str]) -> list[Unit]:
    """The units that the command line selects, before they are divided into shards."""
    if any(word.startswith(("-m", "--collect-only")) for word in rest):
        raise RuntimeError("-m and --collect-only are not passed to pytest. Use -k, a path, or --list")
    paths = changed_paths() if options.changed else None
    with tempfile.TemporaryDirectory() as scratch:
        units = units_of(collect(rest, Path(scratch)), beds=has_beds())
    if not rest:
        units.append(Unit("", "", ANYWHERE, 0))
    if options.bed:
        environment = VLLM_NEXT if options.bed.startswith("next-") else VLLM
        bed = options.bed.removeprefix("next-")
        units = [unit for unit in units if (unit.environment, unit.bed) == (environment, bed)]
    return units if paths is None else PathMap.read().select(units, paths)


def run_units(units: Sequence[Unit], rest: Sequence[str], durations: Mapping[str, float]) -> list[UnitRun]:
    """Run these units in order, until a signal ends the run."""
    runs = []
    for number, unit in enumerate(units, 1):
        print(
            f"\n=== [{number}/{len(units)}] {unit.name} (about {expected_s(unit, durations):.0f} s)",
            flush=True,
        )
        start = time.monotonic()
        outcomes = run_unit(unit, rest)
        finished = FinishedRun(outcomes, partial(run_unit, unit, rest), unit.name)
        run = UnitRun(unit, time.monotonic() - start, finished)
        print(f"--- {unit.name}: {run.verdict()}, {run.seconds:.0f} s", flush=True)
        runs.append(run)
        if outcomes.interrupted:
            break
    return runs


def run_unit(unit: Unit, rest: Sequence[str], only: str | None = None) -> Outcomes:
    """Run a unit, or only the test with this node id."""
    if unit.file == ANYWHERE:
        # Never repeated, hence "incomplete" when it failed: it takes long and starts few engines.
        ended = run_child([str(TREE / ANYWHERE)], env=os.environ)
        outcome = "failed" if ended.status else "passed"
        return Outcomes(
            ended.status, {ANYWHERE: outcome}, complete=not ended.status, interrupted=ended.interrupted
        )
    folder = TREE / unit.environment / "bin"
    env = {**_ENVIRONMENT, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    if unit.bed:
        env["DEVKIT_VLLM_BED"] = unit.bed
    options, paths = split_paths(rest)
    inside = [path for path in paths if path.startswith(unit.file)] or [unit.file]
    parallel = ["-n", str(unit.workers)] if unit.workers > 1 and not only else []
    arguments = [*_OPTIONS, *parallel, *options, "-m", unit.markers, *inside]
    return run_pytest(arguments, python=folder / "python", env=env, only=only)


def listing(units: Sequence[Unit], durations: Mapping[str, float]) -> str:
    """One line per unit, and the sum."""
    rows = [(expected_s(unit, durations), unit.tests, unit.name) for unit in units]
    rows.append((total_s(units, durations), sum(unit.tests for unit in units), f"{len(units)} units"))
    return "\n".join(f"{seconds:7.0f} s {tests:5} tests  {name}" for seconds, tests, name in rows)


def table(runs: Sequence[UnitRun], durations: Mapping[str, float]) -> str:
    """Units that ran, with their durations and results."""
    lines = ["", "seconds  expected  result                  unit"]
    for run in runs:
        expected = expected_s(run.unit, durations)
        lines.append(f"{run.seconds:7.0f}  {expected:8.0f}  {run.verdict():22}  {run.unit.name}")
    lines.append(f"{sum(run.seconds for run in runs):7.0f}  in total")
    return "\n".join(lines)


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="script/test-more",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [options] [pytest arguments]",
    )
    parser.add_argument("--shard", type=_shard, metavar="K/N", help="run part K of N")
    parser.add_argument("--changed", action="store_true", help="run what the difference from main can affect")
    parser.add_argument("--bed", metavar="BED", help="run the units of one bed, such as v2-gpu or next-v2")
    parser.add_argument("--list", action="store_true", help="list the units and run nothing")
    parser.add_argument("--record", action="store_true", help="write the durations to tests/durations.json")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
