"""One benchmark's figures: stock and cornplug in pairs, as a table, Markdown, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import machine
import numpy as np
from rich.console import Console
from rich.table import Table

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: `stock[i]` and `cornplug[i]` were measured one right after the other."""

    name: str
    unit: str
    stock: Sequence[float]
    cornplug: Sequence[float]
    target: float | None = None
    """The target of the ratio cornplug / stock; None without a promise."""
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        if len(self.stock) != len(self.cornplug) or not self.stock:
            raise ValueError(f"{self.name}: {len(self.stock)} and {len(self.cornplug)} samples")

    @property
    def ratios(self) -> np.ndarray:
        """Of each pair, shape (n,)."""
        return np.asarray(self.cornplug) / np.asarray(self.stock)

    @property
    def ratio(self) -> float:
        """The median pair's."""
        return float(np.median(self.ratios))

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median ratio lies with 95 % confidence (bootstrap over pairs)."""
        pairs = self.ratios
        drawn = np.random.default_rng(0).integers(0, len(pairs), (_RESAMPLES, len(pairs)))
        low, high = np.quantile(np.median(pairs[drawn], axis=1), (0.025, 0.975))
        return float(low), float(high)

    @property
    def verdict(self) -> str:
        """Whether the target is met; "spread too wide" where the interval holds it."""
        if self.target is None:
            return ""
        low, high = self.interval
        sign = 1 if self.better == "lower" else -1
        word = "met" if sign * self.ratio <= sign * self.target else "missed"
        certain = not low < self.target < high
        return word if certain else f"{word}, but the spread is wider than the margin"

    def as_json(self) -> dict[str, Any]:
        """The samples and all that is shown of them."""
        return {
            "name": self.name,
            "unit": self.unit,
            "n": len(self.stock),
            "stock": _spread(self.stock) | {"samples": [round(v, 6) for v in self.stock]},
            "cornplug": _spread(self.cornplug) | {"samples": [round(v, 6) for v in self.cornplug]},
            "ratio": self.ratio,
            "ratio_95": self.interval,
            "target": self.target,
            "better": self.better,
            "verdict": self.verdict,
        }

    def cells(self) -> list[str]:
        """name, stock, cornplug, ratio, target, verdict, n: as shown."""
        target = "-" if self.target is None else f"{'<=' if self.better == 'lower' else '>='} {self.target:g}"
        low, high = self.interval
        return [
            f"{self.name} ({self.unit})",
            _shown(self.stock),
            _shown(self.cornplug),
            f"{self.ratio:.3f} ({low:.3f} to {high:.3f})",
            target,
            self.verdict or "-",
            str(len(self.stock)),
        ]


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything one benchmark says."""

    name: str
    title: str
    quick: bool
    engine: str = "vLLM"
    """The engine whose stock form is the other side."""
    sides: tuple[str, str] | None = None
    """Names of other sides than stock and cornplug."""
    machine: dict[str, Any] = field(default_factory=machine.describe)
    set_up: list[str] = field(default_factory=list)
    """How it was measured, one sentence each."""
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Further observations: counters, equal answers, work of idle engines."""

    @property
    def headings(self) -> tuple[str, ...]:
        sides = self.sides or (f"stock {self.engine}", "with cornplug")
        return ("figure", *sides, "ratio (95 %)", "target", "verdict", "n")

    def show(self) -> None:
        """Print the table."""
        console = Console(width=150)
        table = Table(title=self.title, caption="median (quartiles); ratios pair by pair")
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if i in (0, 5) else "right")
        for row in self.rows:
            table.add_row(*row.cells())
        console.print(table)
        for fact, value in self.facts.items():
            console.print(f"{fact}: {value}", highlight=False)
        console.print(machine.line(self.machine), highlight=False)

    def write(self, folder: Path) -> None:
        """Write NAME.md, NAME.json and NAME.png into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "quick": self.quick,
            "machine": self.machine,
            "set_up": self.set_up,
            "rows": [row.as_json() for row in self.rows],
            "facts": self.facts,
        }
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(self._markdown())
        _plot(self, folder / f"{self.name}.png")

    def _markdown(self) -> str:
        command = f"python benchmarks/{self.name}.py{' --quick' if self.quick else ''}"
        lines = [f"# {self.title}", "", f"`{command}`", "", *machine.line(self.machine).split("\n"), ""]
        lines += [f"- {sentence}" for sentence in self.set_up]
        lines += ["", "| " + " | ".join(self.headings) + " |", "|---|--:|--:|--:|--:|---|--:|"]
        lines += ["| " + " | ".join(row.cells()) + " |" for row in self.rows]
        lines += ["", "Medians with quartiles; ratios are the median of pairs, with their 95 % interval.", ""]
        lines += [f"- {fact}: {value}" for fact, value in self.facts.items()]
        return "\n".join([*lines, "", f"![{self.title}]({self.name}.png)", ""])


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(np.asarray(values), (0.25, 0.5, 0.75))
    return {"median": float(middle), "quartile_1": float(low), "quartile_3": float(high)}


def _shown(values: Sequence[float]) -> str:
    found = _spread(values)
    return f"{found['median']:.4g} ({found['quartile_1']:.4g} to {found['quartile_3']:.4g})"


def _plot(report: Report, path: Path) -> None:
    """Every pair's ratio as a dot, the median as a bar, the target as a line; one panel a figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    height = 0.8 + 0.62 * len(report.rows)
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    for i, row in enumerate(reversed(report.rows)):
        axes.barh(i, row.ratio, color="#4c78a8", alpha=0.45, height=0.6)
        axes.plot(row.ratios, np.full(len(row.ratios), i), "o", color="#1f3b5c", markersize=3.5)
        if row.target is not None:
            axes.plot([row.target, row.target], [i - 0.4, i + 0.4], color="#c8373a", linewidth=2)
    axes.axvline(1, color="grey", linewidth=1, linestyle="dashed")
    axes.set_yticks(range(len(report.rows)), [row.name for row in reversed(report.rows)])
    axes.set_xlim(left=0)
    _, one, other, *_ = report.headings
    axes.set_xlabel(f"{other} / {one}   (red: target, dots: pairs)")
    axes.set_title(report.title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
