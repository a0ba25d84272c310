"""A plan beside its engines: throughput and P95 time to first token, as simulated and as measured.

    python benchmarks/plan_vs_real.py [--quick] [--out DIR]

The whole loop on two cores: `cornplug profile` measures two language models through vLLM and a
tower through the encoder service; `cornplug plan` places them, one model on a whole core, the
other and the tower on half a core each; `cornplug launch` starts real engines and the service;
Poisson arrivals at the planned rates load them. Half a core is a CPU quota (root only).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import machine
import numpy as np
from driver import cores, models, open_load
from driver.loop_report import Compared, Report
from driver.open_load import Arrival, Took
from driver.requests import images
from driver.stage import options
from driver.two_cores import APPS, GPU, OUTPUT_TOKENS, App, Profiles, plan_input

from cornplug.planner.launch import launcher
from cornplug.planner.launch.launcher import CommandProcess
from cornplug.planner.plan import Plan, ReplicaGroup
from devkit.checkpoints import CLIP_L_336

TOWER = {
    **CLIP_L_336,
    **{"image_size": 224, "hidden_size": 512, "intermediate_size": 2048},
    **{"num_hidden_layers": 6, "num_attention_heads": 8},
}
SIZES = {"look": {"hidden_size": 1024, "heads": 16}, "read": {"hidden_size": 768, "heads": 12}}
_WARM_UP = 4
"""Requests of each app before any counts."""
_SLOW = {"CORNPLUG_ENCODER_DEADLINE_S": "60", "CORNPLUG_CONFIG": "", "OMP_NUM_THREADS": "1"}
"""A tower pass on half a core takes longer than engines wait by default."""


def main() -> int:
    """Measure, print and write; 0 when all is within 25 %, else 1."""
    chosen = options(__doc__)
    requests = 120 if chosen.quick else 300
    described = machine.describe()
    folders = {
        name: models.llava(**size, layers=6, vision=TOWER, llm_seed=i, dtype="bfloat16")
        for i, (name, size) in enumerate(SIZES.items())
    }
    with tempfile.TemporaryDirectory(prefix="cp-loop-") as name:
        folder = Path(name)
        profiles = profile(folder, folders, repeats=3 if chosen.quick else 5)
        rates = {app.name: profiles.rate(app) for app in APPS}
        plan = planned(folder, plan_input(folders, profiles, rates))
        took = load(folder, plan, rates, requests)
        tables = {path.stem: path.read_text() for path in (*profiles.llm.values(), profiles.tower)}
    report = Report(
        [Compared.of(f, [t for t in took if t.kind == f.app]) for f in plan.latency_forecasts],
        took, plan, tables, described, chosen.quick,
    )  # fmt: skip
    report.show()
    report.write(chosen.out)
    return 0 if report.within else 1


def profile(folder: Path, checkpoints: dict[str, Path], *, repeats: int) -> Profiles:
    """Tables of every component, each measured on one core."""
    for app in APPS:
        prompts = ",".join(map(str, (16, 64, *sorted(app.prompt_tokens), 512)))
        line = ["llm", "--prompts", prompts, "--batches", "1,2,4", "--repeats", str(repeats)]
        _profile(folder / f"{app.name}.csv", checkpoints[app.name], line, ["--enforce-eager"])
    line = ["encoder", "--edges", "224", "--batches", "1,2,4", "--repeats", str(2 * repeats)]
    _profile(folder / "tower.csv", next(iter(checkpoints.values())), line, [])
    return Profiles({app.name: folder / f"{app.name}.csv" for app in APPS}, folder / "tower.csv")


def _profile(out: Path, model: Path, line: Sequence[str], flags: Sequence[str]) -> None:
    command = [*_cornplug("profile"), *line, "--model", str(model), "--gpu", GPU, "--out", str(out)]
    subprocess.run([*command, "--", *flags] if flags else command, check=True)


def planned(folder: Path, text: str) -> Plan:
    """The plan for this input, as the command line makes it."""
    (folder / "plan.toml").write_text(text)
    line = [*_cornplug("plan"), str(folder / "plan.toml"), "-o", str(folder / "plan"), "--explain", "0"]
    subprocess.run(line, check=True)
    return Plan.load(folder / "plan" / "plan.json")


def load(folder: Path, plan: Plan, rates: dict[str, float], requests: int) -> list[Took]:
    """Launch the plan, keep its processes to their shares, and ask as planned."""
    crops = images(224)
    with launched(folder, plan) as urls:
        apps = [asked(app, plan, urls[app.name], rates[app.name], requests + _WARM_UP, crops) for app in APPS]
        open_load.run([arrival for of_app in apps for arrival in of_app[-_WARM_UP:]])
        took = open_load.run([arrival for of_app in apps for arrival in of_app[:-_WARM_UP]])
    for one in took:
        wanted = next(app for app in APPS if app.name == one.kind).prompt_tokens
        assert one.prompt_tokens in wanted, f"{one.kind}: {one.prompt_tokens} tokens, planned {wanted}"
    return took


def asked(
    app: App, plan: Plan, url: str, rate: float, requests: int, crops: Iterator[bytes]
) -> list[Arrival]:
    """Requests of one app, as its plan describes them; the last ones come at once, to warm up."""
    seed = [app.name for app in APPS].index(app.name)
    rng = np.random.default_rng([seed, 7])
    times = [*open_load.arrivals(rate, requests - _WARM_UP, seed), *range(_WARM_UP)]
    out = []
    for i, at_s in enumerate(times):
        letters = open_load.letters(int(rng.choice(app.letters)), seed * 1_000_000 + i)
        body = open_load.body(letters, OUTPUT_TOKENS, next(crops) if app.images else None)
        out.append(Arrival(float(at_s), app.name, url, body | {"model": _group(plan, app).model}))
    return out


@contextmanager
def launched(folder: Path, plan: Plan) -> Iterator[dict[str, str]]:
    """The plan's processes, each with its share of its core; the address of each app's engine."""
    os.environ.update(_SLOW)
    groups = {group.name: group for group in plan.groups}
    with ExitStack() as stack:
        to_start = launcher.local_commands(plan, run_dir=folder / "run")
        processes = stack.enter_context(
            launcher.run_commands(plan, to_start, run_dir=folder / "run", on_event=_say)
        )
        for process in processes:
            group = groups.get(process.command.group)
            if group is None:
                continue
            pids = cores.descendants(process.pid)
            cores.pin(pids, process.command.cores)
            if group.share < 1:
                name = group.name.replace("/", "-")
                stack.enter_context(cores.share(name, pids, group.share))
        urls = {process.command.group: process.command.url or "" for process in processes}
        yield {app.name: urls[_group(plan, app).name] for app in APPS}


def _say(process: CommandProcess, what: str) -> None:
    print(f"{process.name}: {what}", file=sys.stderr)


def _group(plan: Plan, app: App) -> ReplicaGroup:
    """Of the app's engine."""
    return next(group for group in plan.groups if app.name in group.apps and "P" in group.tasks)


def _cornplug(command: str) -> list[str]:
    return [sys.executable, "-m", "cornplug.cli", command]


if __name__ == "__main__":
    sys.exit(main())
