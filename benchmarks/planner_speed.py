"""How fast a plan is found, and how fast it is proven.

    python benchmarks/planner_speed.py [--quick] [--out DIR]

Issue 5's instance: 10 components, 6 GPU types, 4 tensor parallelisms and 2 modes (cells that others
dominate are dropped, as `cornplug plan` does), 6 applications with 2 request types each, 64 nodes of
each type to be had and about as many needed. The pool model is solved with the planner's own settings:
at most 20 s, a gap of 1 %, one thread. Then each dimension grows alone. Two cases are harder: few large
nodes, where a plan of ten nodes is rounded to a tenth of its cost; and 11 nodes of each type, the best
of which are sold out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import machine
from planner_instance import Size, pool
from rich.console import Console
from rich.table import Table

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.milp import build, solve
from cornplug.planner.optimizer.optimization_problem import PoolSolution

FULL = Size()
GROWTH: dict[str, list[int]] = {
    "components": [5, 10, 20, 40],
    "devices": [2, 4, 6, 8],
    "applications": [3, 6, 12, 24],
}
FIRST_PLAN_S, GAP, LIMIT_S = 5.0, 0.01, 20.0


@dataclass(frozen=True)
class Row:
    name: str
    seed: int
    cells: int
    columns: int
    rows: int
    first_s: float | None
    """Until the first plan, building the model included."""
    at_5_s: float | None
    """How much dearer than the last plan the best one of the first 5 s was, a share."""
    seconds: float
    cpu_s: float
    cost: float
    bound: float
    gap: float
    proven: bool
    nodes: int


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the instance of one seed only")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    described = machine.describe()
    rows = [measure("64 nodes", FULL, seed) for seed in range(1 if chosen.quick else 3)]
    if not chosen.quick:
        rows += [measure("goodput", FULL, seed, objective="goodput") for seed in range(3)]
        rows += [measure("few needed", replace(FULL, load=1.0), seed) for seed in range(3)]
        rows += [measure("sold out", replace(FULL, nodes=11, load=3.0), seed) for seed in range(3)]
        for dimension, values in GROWTH.items():
            rows += [measure(f"{dimension} {v}", grown(dimension, v), 1) for v in values]
    show(rows, described)
    if chosen.out:
        write(rows, described, chosen.out)
    return 0


def grown(dimension: str, value: int) -> Size:
    """The full instance in all else; more applications find as many more nodes."""
    size = replace(FULL, **{dimension: value})
    return replace(size, nodes=max(64, 64 * value // 6)) if dimension == "applications" else size


def measure(name: str, size: Size, seed: int, *, objective: str = "cost") -> Row:
    given = pool(size, seed, objective=objective)  # type: ignore[arg-type]
    model = build(given)
    began, cpu = time.monotonic(), time.process_time()
    found = solve(given, SolverOptions(gap=GAP, time_limit_s=LIMIT_S))
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    row = Row(
        name,
        seed,
        cells=len(given.cells),
        columns=len(model.problem.variables()),
        rows=len(model.rows),
        first_s=found.first_s,
        at_5_s=excess(found),
        seconds=seconds,
        cpu_s=cpu_s,
        cost=found.objective,
        bound=found.bound,
        gap=found.gap,
        proven=found.status == "optimal",
        nodes=sum(found.nodes.values()),
    )
    print(f"{name}, seed {seed}: {seconds:.1f} s, gap {found.gap:.2%}", file=sys.stderr)
    return row


def excess(found: PoolSolution) -> float | None:
    early = [at.incumbent for at in found.history if at.seconds <= FIRST_PLAN_S and at.incumbent is not None]
    return abs(early[-1] / found.objective - 1) if early else None


SIZES = ("seed", "cells", "columns", "rows")
HEADINGS = ("instance", *SIZES, "first plan s", "dearer at 5 s", "s", "CPU s", "plan", "gap", "nodes")


def cells_of(row: Row) -> list[str]:
    first = "-" if row.first_s is None else f"{row.first_s:.2f}"
    dearer = "-" if row.at_5_s is None else f"{row.at_5_s:.1%}"
    figures = [dearer, f"{row.seconds:.1f}", f"{row.cpu_s:.1f}", f"{row.cost:.1f}", f"{row.gap:.2%}"]
    return [row.name, *(str(getattr(row, name)) for name in SIZES), first, *figures, str(row.nodes)]


def facts(rows: list[Row]) -> dict[str, str]:
    full = [row for row in rows if row.name == "64 nodes"]
    first = max(row.first_s or LIMIT_S for row in full)
    return {
        f"first plan of 64 nodes (target {FIRST_PLAN_S:g} s)": f"{first:.2f} s",
        f"gap at {LIMIT_S:g} s (target {GAP:.0%})": ", ".join(f"{row.gap:.2%}" for row in full),
    }


def show(rows: list[Row], described: dict[str, Any]) -> None:
    console = Console(width=130)
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*cells_of(row))
    console.print(table)
    for fact, value in facts(rows).items():
        console.print(f"{fact}: {value}", highlight=False)
    console.print(machine.line(described), highlight=False)


def write(rows: list[Row], described: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planner_speed.json").write_text(
        json.dumps({"machine": described, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    )
    head, text = (__doc__ or "").split("\n\n", 1)[0], (__doc__ or "").rpartition("\n\n")[2]
    lines = [f"# {head}", "", "`python benchmarks/planner_speed.py`", "", machine.line(described), "", text]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|---|" + "--:|" * (len(HEADINGS) - 1)]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in rows]
    lines += ["", *(f"- {fact}: {value}" for fact, value in facts(rows).items()), ""]
    if any(row.name.startswith("components") for row in rows):
        plot(rows, folder / "planner_speed.png")
        lines += ["![Gap and time as each dimension grows](planner_speed.png)", ""]
    (folder / "planner_speed.md").write_text("\n".join(lines))


def plot(rows: list[Row], path: Path) -> None:
    """One panel a dimension: seconds until the end, and the gap that was reached."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(GROWTH), figsize=(10, 3), sharey=True, layout="constrained")
    for panel, (dimension, values) in zip(panels, GROWTH.items(), strict=True):
        mine = [row for v in values for row in rows if row.name == f"{dimension} {v}"]
        panel.plot(values, [row.seconds for row in mine], "o-", label="seconds to the end (limit 20)")
        panel.plot(values, [row.first_s or 0 for row in mine], "s-", label="seconds to the first plan")
        other = panel.twinx()
        other.plot(values, [100 * row.gap for row in mine], "^--", color="tab:red", label="gap, %")
        other.set_ylim(0, max(3.0, 110 * max(row.gap for row in mine)))
        panel.set_xlabel("GPU types" if dimension == "devices" else dimension)
        panel.set_ylim(0, 1.1 * LIMIT_S)
        lines = [*panel.get_lines(), *other.get_lines()]
    panels[0].set_ylabel("seconds")
    other.set_ylabel("gap, %")
    panels[0].legend(lines, [str(line.get_label()) for line in lines], fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
