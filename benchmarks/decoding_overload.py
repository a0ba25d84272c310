"""One app asks for three times what can be decoded: does another keep its deadlines?

    python benchmarks/decoding_overload.py [--quick] [--out DIR]
    CORNPLUG_BEFORE=DIR python benchmarks/decoding_overload.py    # DIR: a checkout to measure beside it

One service process a side, HTTP, a CLIP tower of one layer, so that decoding is the bottleneck. "nightly"
sends JPEGs of 12 million pixels, three times as many as can be decoded; "checkout" sends small ones, and its
class has half of the service. Open arrivals (Poisson). Every side meets the same arrivals: checkout alone,
then both; sides take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import machine
import numpy as np
from driver import models
from driver.stage import options
from driver.storm import App, Asked, Client, Images
from rich.console import Console

from devkit.checkpoints import CLIP_L_336
from devkit.processes import EncoderProcess

TOWER: Final = {
    **CLIP_L_336,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
QOS: Final = """
[qos]
default = "nightly"
[qos.classes.premium]
share = 0.5
priority = 10
api_keys = ["benchmark"]
[qos.classes.nightly]
priority = -1
"""
LARGE, SMALL = 3464, 640
KEY: Final = {"authorization": "Bearer benchmark"}
CHECKOUT: Final = App(name="checkout", qos="premium", load=3.0, deadline_s=2, headers=KEY)
NIGHTLY: Final = App(name="nightly", qos="nightly", load=3.0, deadline_s=60, headers={})
HEADINGS: Final = ("side", "run", "app", "offered", "in time", "of offered", "refused", "p50 ms", "p95 ms")


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    seconds = 10.0 if chosen.quick else 25.0
    described = machine.describe()
    model = models.llava(vision=TOWER, hidden_size=64, layers=1)
    sides = {"cornplug": {}}
    if before := os.environ.get("CORNPLUG_BEFORE"):
        sides = {"before": {"PYTHONPATH": checked(before)}, **sides}
    table: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as folder, ExitStack() as running:
        clients = dict(_clients(sides, model, Path(folder), running))
        capacity = clients["cornplug"].capacity(seconds / 4, at_once=4)
        for run, apps in (("alone", [CHECKOUT]), ("both", [CHECKOUT, NIGHTLY])):
            for side, client in clients.items():
                asked = client.storm(apps, capacity, seconds, seed=1)
                table += [[side, run, *_row(app.name, asked)] for app in apps]
    facts = {"large images a second that the service can do": f"{capacity:.2f}"}
    show(table, facts, described)
    write(chosen.out, table, facts, described, quick=chosen.quick)
    return 0


def checked(folder: str) -> str:
    """`folder`, from which processes with it in PYTHONPATH take cornplug. Exits where they do not."""
    ask = [sys.executable, "-P", "-c", "import cornplug; print(cornplug.__file__)"]
    env = {**os.environ, "PYTHONPATH": folder}
    found = subprocess.run(
        ask, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    if not Path(found).is_relative_to(Path(folder).resolve()):
        sys.exit(f"CORNPLUG_BEFORE={folder}: cornplug would come from {found}; name a folder that holds it")
    return folder


def _clients(
    sides: Mapping[str, dict[str, str]], model: Path, folder: Path, running: ExitStack
) -> Iterator[tuple[str, Client]]:
    config = folder / "cornplug.toml"
    config.write_text(QOS)
    large = Images(LARGE, "JPEG")
    for side, env in sides.items():
        socket = folder / side / "e.sock"
        socket.parent.mkdir(mode=0o700)
        options = {"CORNPLUG_CONFIG": str(config), "OMP_NUM_THREADS": "1", **env}
        flags = ("--no-store", "--threads", "1")
        encoder = EncoderProcess([model], *flags, socket=socket, env=options)
        # No request here has a salt, and an older release does not know the setting.
        encoder.env.pop("CORNPLUG_ENCODER_TRUST_SALTS")
        running.enter_context(encoder)
        small = {"checkout": Images(SMALL, "JPEG")}
        yield side, Client(encoder.url, str(model), large, small)


def _row(app: str, asked: Sequence[Asked]) -> list[str]:
    mine = [one for one in asked if one.app == app]
    good = [one for one in mine if one.in_time]
    p50, p95 = np.quantile([one.seconds for one in mine if not one.refused] or [np.nan], (0.5, 0.95)) * 1000
    refused = sum(one.refused for one in mine)
    part = f"{len(good) / max(1, len(mine)):.1%}"
    return [app, str(len(mine)), str(len(good)), part, str(refused), f"{p50:.0f}", f"{p95:.0f}"]


def show(table: Sequence[Sequence[str]], facts: Mapping[str, str], described: dict[str, Any]) -> None:
    """Print the table."""
    console = Console(width=130)
    for row in (HEADINGS, *table):
        console.print("  ".join(f"{cell:>10}" for cell in row), highlight=False)
    for fact, value in facts.items():
        console.print(f"{fact}: {value}", highlight=False)
    console.print(machine.line(described), highlight=False)


def write(
    folder: Path,
    table: Sequence[Sequence[str]],
    facts: Mapping[str, str],
    described: dict[str, Any],
    *,
    quick: bool,
) -> None:
    """Write decoding_overload.md and .json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": "decoding_overload",
        "quick": quick,
        "machine": described,
        "rows": [dict(zip(HEADINGS, row, strict=True)) for row in table],
        "facts": dict(facts),
    }
    (folder / "decoding_overload.json").write_text(json.dumps(content, indent=1) + "\n")
    command = f"python benchmarks/decoding_overload.py{' --quick' if quick else ''}"
    lines = [
        "# Three times what can be decoded",
        "",
        f"`{command}`",
        "",
        *machine.line(described).split("\n"),
    ]
    lines += ["", *(line.strip() for line in (__doc__ or "").split("\n\n")[2].splitlines())]
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|---|---|---|" + "--:|" * (len(HEADINGS) - 3)]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    lines += ["", *(f"- {fact}: {value}" for fact, value in facts.items()), ""]
    (folder / "decoding_overload.md").write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
