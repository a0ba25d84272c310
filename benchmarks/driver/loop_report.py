"""A plan's rates and simulated times beside the measured ones: as a table, Markdown, JSON and a plot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import machine
import numpy as np
from rich.console import Console
from rich.table import Table

from cornplug.planner.plan import LatencyForecast, Plan
from driver.open_load import Took

NAME = "plan_vs_real"
TITLE = "A plan beside its engines"
TOLERANCE = 0.25
HEADINGS = ("class", "figure", "planned", "measured", "measured / planned", "within 25 %")


@dataclass(frozen=True)
class Compared:
    """One request class."""

    name: str
    requests: int
    failed: int
    rate: tuple[float, float]
    """Requests a second: planned, and finished while any were under way."""
    ttft_p95_s: tuple[float, float]
    """Simulated, with the whole plan, and measured; so is the next."""
    ttft_p50_s: tuple[float, float]
    ttft_p95_interval_s: tuple[float, float]
    """Where the measured P95 lies with 95 % confidence, were requests independent."""

    @classmethod
    def of(cls, forecast: LatencyForecast, took: Sequence[Took]) -> Self:
        """Raises ValueError where nothing was answered, or the plan was not simulated."""
        good = [t for t in took if not np.isnan(t.e2e_s)]
        if not good or forecast.ttft.p95 is None or forecast.ttft.p50 is None:
            raise ValueError(f"{forecast.app}: {len(good)} answers, simulated {forecast.ttft}")
        ttft = np.array([t.ttft_s for t in good])
        seconds = max(t.at_s + t.e2e_s for t in good) - min(t.at_s for t in good)
        drawn = np.random.default_rng(0).choice(ttft, (2000, len(ttft)))
        low, high = np.quantile(np.quantile(drawn, 0.95, axis=1), (0.025, 0.975))
        return cls(
            f"{forecast.app}/{forecast.request}",
            len(took),
            len(took) - len(good),
            (forecast.served, len(good) / seconds),
            (forecast.ttft.p95, float(np.quantile(ttft, 0.95))),
            (forecast.ttft.p50, float(np.quantile(ttft, 0.5))),
            (float(low), float(high)),
        )

    @property
    def within(self) -> bool:
        """Rate and P95, and every request was answered."""
        return all(_near(pair) for pair in (self.rate, self.ttft_p95_s)) and not self.failed

    def rows(self) -> list[list[str]]:
        """As `HEADINGS` say."""
        figures = (
            ("throughput, requests/s", self.rate, "{:.3f}"),
            ("P95 TTFT, s", self.ttft_p95_s, "{:.3f}"),
            ("P50 TTFT, s", self.ttft_p50_s, "{:.3f}"),
        )
        return [
            [
                self.name,
                figure,
                form.format(pair[0]),
                form.format(pair[1]),
                f"{pair[1] / pair[0]:.2f}",
                "yes" if _near(pair) else "no",
            ]
            for figure, pair, form in figures
        ]


@dataclass(frozen=True)
class Report:
    compared: Sequence[Compared]
    took: Sequence[Took]
    plan: Plan
    tables: Mapping[str, str]
    """CSV of each profile."""
    machine: dict[str, Any]
    quick: bool

    @property
    def within(self) -> bool:
        return all(one.within for one in self.compared)

    def facts(self) -> list[str]:
        """Lines below the table."""
        placed = [
            f"{g.name}: {g.share:g} of a core, {g.engine}, utilisation {g.utilisation:.2f}"
            for g in self.plan.groups
        ]
        answered = [
            f"{c.name}: {c.requests} requests, {c.failed} failed; measured P95 with 95 % confidence "
            f"between {c.ttft_p95_interval_s[0]:.3f} and {c.ttft_p95_interval_s[1]:.3f} s"
            for c in self.compared
        ]
        return [*placed, *answered]

    def show(self) -> None:
        """Print the table."""
        table = Table(*HEADINGS, title=TITLE)
        for one in self.compared:
            for row in one.rows():
                table.add_row(*row)
        console = Console(width=120)
        console.print(table)
        for fact in self.facts():
            console.print(fact, highlight=False)
        console.print(machine.line(self.machine), highlight=False)

    def write(self, folder: Path) -> None:
        """Write plan_vs_real.md, .json and .png into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": NAME,
            "quick": self.quick,
            "machine": self.machine,
            "within": self.within,
            "tolerance": TOLERANCE,
            "classes": [asdict(one) for one in self.compared],
            "requests": [asdict(t) for t in self.took],
            "profiles": self.tables,
            "plan": self.plan.model_dump(mode="json"),
        }
        told = json.dumps(content, indent=1).replace(str(Path.home()), "~")  # models lie in its cache
        (folder / f"{NAME}.json").write_text(re.sub(r"/tmp/cp-loop-\w+/", "", told) + "\n")
        lines = [f"# {TITLE}", "", f"`python benchmarks/{NAME}.py{' --quick' if self.quick else ''}`", ""]
        lines += [*machine.line(self.machine).split("\n"), ""]
        lines += ["| " + " | ".join(HEADINGS) + " |", "|---|---|" + "--:|" * (len(HEADINGS) - 2)]
        lines += ["| " + " | ".join(row) + " |" for one in self.compared for row in one.rows()]
        lines += ["", *(f"- {fact}" for fact in self.facts())]
        lines += ["", f"![Time to first token, measured and simulated]({NAME}.png)", ""]
        (folder / f"{NAME}.md").write_text("\n".join(lines))
        self._plot(folder / f"{NAME}.png")

    def _plot(self, path: Path) -> None:
        """Share of requests whose first token came within so long; the plan's percentiles as points."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, panels = pyplot.subplots(1, len(self.compared), figsize=(9, 3), layout="constrained")
        for panel, forecast in zip(np.atleast_1d(panels), self.plan.latency_forecasts, strict=True):
            ttft = np.sort([t.ttft_s for t in self.took if t.kind == forecast.app])
            panel.step(ttft, np.arange(1, len(ttft) + 1) / len(ttft), where="post", color="#4c78a8")
            panel.plot([], [], color="#4c78a8", label="measured")
            points = [(forecast.ttft.p50, 0.5), (forecast.ttft.p95, 0.95), (forecast.ttft.p99, 0.99)]
            panel.plot(*zip(*points, strict=True), "o", color="#c8373a", label="simulated P50, P95, P99")
            panel.set_title(f"{forecast.app}/{forecast.request}, {forecast.rate:.2f} requests/s", fontsize=10)
            panel.set_xlabel("time to first token, s")
            panel.set_xlim(left=0)
            panel.legend(fontsize=8, loc="lower right")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _near(pair: tuple[float, float]) -> bool:
    return abs(pair[1] / pair[0] - 1) <= TOLERANCE
