"""Three apps ask for three times a tower's capacity: requests served in time, with classes and without.

    python benchmarks/encoder_overload.py [--quick] [--out DIR]

One service process, HTTP, a small CLIP tower (4 layers of 256) at 336 pixels on one core. First its
capacity is measured, with always eight requests under way. Then it meets the same storm twice, distinct
images with Poisson arrivals: once without the apps' headers, so that all are of the default class, and
once with them: one app has a class with half of the tower.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
from driver import models
from driver.stage import options
from driver.storm import App, Asked, Client, Images
from rich.console import Console
from rich.table import Table

from devkit.checkpoints import CLIP_L_336
from devkit.processes import EncoderProcess

TOWER = {
    **CLIP_L_336,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
QOS = """
[qos]
default = "bulk"
[qos.classes.premium]
share = 0.5
priority = 10
api_keys = ["benchmark"]
[qos.classes.standard]
share = 0.25
apps = ["search"]
[qos.classes.bulk]
share = 0.15
priority = -1
"""
APPS = (
    App(
        name="checkout", qos="premium", load=0.4, deadline_s=2, headers={"authorization": "Bearer benchmark"}
    ),
    App(name="search", qos="standard", load=1.6, deadline_s=3, headers={"x-cornplug-app": "search"}),
    App(name="albums", qos="bulk", load=1.0, deadline_s=5, headers={}),
)
HEADINGS = (
    "app",
    "class",
    "offered",
    "let in",
    "in time",
    "of offered",
    "of let in",
    "p50 s",
    "p95 s",
    "no, p50 ms",
)


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    seconds = 12.0 if chosen.quick else 25.0
    described = machine.describe()
    model = models.llava(vision=TOWER, hidden_size=256, layers=1)
    unsaid = tuple(replace(app, headers={}) for app in APPS)
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as folder:
        config = Path(folder) / "cornplug.toml"
        config.write_text(QOS)
        env = {"CORNPLUG_CONFIG": str(config), "OMP_NUM_THREADS": "1"}
        flags = ("--no-store", "--threads", "1")
        with EncoderProcess([model], *flags, socket=Path(folder) / "e.sock", env=env) as encoder:
            client = Client(encoder.url, str(model), Images(336))
            capacity = client.capacity(seconds / 4, at_once=8)
            runs = {
                "one class for all": client.storm(unsaid, capacity, seconds, seed=1),
                "with classes": client.storm(APPS, capacity, seconds, seed=1),
            }
    facts = {
        "capacity, images a second": f"{capacity:.2f}",
        **{
            f"goodput in the storm, {name}, of capacity": f"{goodput(asked, seconds) / capacity:.2f}"
            for name, asked in runs.items()
        },
    }
    show(runs, facts, described)
    write(chosen.out, runs, facts, described, quick=chosen.quick)
    return 0


def goodput(asked: Sequence[Asked], seconds: float) -> float:
    """Embeddings a second that came in time, over the storm."""
    return sum(one.in_time and one.sent_s + one.seconds <= seconds for one in asked) / seconds


def rows(asked: Sequence[Asked]) -> list[list[str]]:
    """One an app, as `HEADINGS` say."""
    out = []
    for app in APPS:
        mine = [one for one in asked if one.app == app.name]
        let_in = [one for one in mine if not one.refused]
        good = [one for one in mine if one.in_time]
        p50, p95 = np.quantile([one.seconds for one in good], (0.5, 0.95)) if good else (np.nan, np.nan)
        no = np.median([one.seconds for one in mine if one.refused] or [np.nan]) * 1000
        counts = [str(len(part)) for part in (mine, let_in, good)]
        parts = [f"{len(good) / max(1, len(part)):.1%}" for part in (mine, let_in)]
        out.append([app.name, app.qos, *counts, *parts, f"{p50:.2f}", f"{p95:.2f}", f"{no:.0f}"])
    return out


def show(runs: dict[str, list[Asked]], facts: dict[str, str], described: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=130)
    for name, asked in runs.items():
        table = Table(*HEADINGS, title=f"Three times the capacity, {name}")
        for row in rows(asked):
            table.add_row(*row)
        console.print(table)
    for fact, value in facts.items():
        console.print(f"{fact}: {value}", highlight=False)
    console.print(machine.line(described), highlight=False)


def write(
    folder: Path,
    runs: dict[str, list[Asked]],
    facts: dict[str, str],
    described: dict[str, Any],
    *,
    quick: bool,
) -> None:
    """Write encoder_overload.md, .json and .png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        name: [dict(zip(HEADINGS, row, strict=True)) for row in rows(asked)] for name, asked in runs.items()
    }
    content = {
        "benchmark": "encoder_overload",
        "quick": quick,
        "machine": described,
        "tables": tables,
        "facts": facts,
    }
    (folder / "encoder_overload.json").write_text(json.dumps(content, indent=1) + "\n")
    command = f"python benchmarks/encoder_overload.py{' --quick' if quick else ''}"
    lines = [
        "# Three times what the tower can do",
        "",
        f"`{command}`",
        "",
        *machine.line(described).split("\n"),
    ]
    lines += ["", *(line.strip() for line in (__doc__ or "").split("\n\n")[2].splitlines())]
    for name, asked in runs.items():
        lines += ["", f"## {name.capitalize()}", "", "| " + " | ".join(HEADINGS) + " |"]
        lines += ["|---|---|" + "--:|" * (len(HEADINGS) - 2)]
        lines += ["| " + " | ".join(row) + " |" for row in rows(asked)]
    lines += ["", *(f"- {fact}: {value}" for fact, value in facts.items())]
    lines += ["", "![In time, by app](encoder_overload.png)", ""]
    (folder / "encoder_overload.md").write_text("\n".join(lines))
    plot(runs, folder / "encoder_overload.png")


def plot(runs: dict[str, list[Asked]], path: Path) -> None:
    """Outcomes of each app's requests, as parts of its offered load; one panel per run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(runs), figsize=(9, 2.6), sharey=True, layout="constrained")
    for panel, (name, asked) in zip(panels, runs.items(), strict=True):
        for i, app in enumerate(reversed(APPS)):
            mine = [one for one in asked if one.app == app.name]
            good = sum(one.in_time for one in mine) / max(1, len(mine))
            refused = sum(one.refused for one in mine) / max(1, len(mine))
            panel.barh(i, good, color="#4c78a8", label="in time" if i == 0 else None)
            panel.barh(
                i, 1 - good - refused, left=good, color="#c8373a", label="let in, late" if i == 0 else None
            )
            panel.barh(
                i, refused, left=1 - refused, color="#d9d9d9", label="refused at once" if i == 0 else None
            )
        panel.set_title(name, fontsize=10)
        panel.set_yticks(range(len(APPS)), [f"{app.name} ({app.load:g}x)" for app in reversed(APPS)])
        panel.set_xlim(0, 1)
        panel.set_xlabel("part of what was offered")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
