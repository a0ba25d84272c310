"""The committed plans of examples/plan_and_launch are those of its inputs, and say what the README says."""

import hashlib
import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from cornplug.planner.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_and_launch"


@pytest.mark.parametrize("name", ["plan", "hand-made"])
def test_plan_of_example_matches_its_input(name):
    plan = Plan.load(EXAMPLE / name / "plan.json")

    assert plan.input_digest == hashlib.sha256((EXAMPLE / f"{name}.toml").read_bytes()).hexdigest()
    assert plan.proof.status == ("optimal" if name == "hand-made" else "feasible")
    readme = (EXAMPLE / "README.md").read_text()
    assert f"{plan.cost_per_hour:.2f}" in readme
    assert f"{plan.proof.bound:.2f}" in readme


def test_readme_of_example_matches_its_plans():
    ours, by_hand = (Plan.load(EXAMPLE / name / "plan.json") for name in ("plan", "hand-made"))
    readme = " ".join((EXAMPLE / "README.md").read_text().split())
    saved = 1 - ours.cost_per_hour / by_hand.cost_per_hour

    assert (
        f"The plan costs ${ours.cost_per_hour:.2f} an hour ({machines(ours)}), "
        f"the hand-made one ${by_hand.cost_per_hour:.2f} ({machines(by_hand)}): {saved:.0%} less."
    ).replace("%", " %") in readme
    assert f"| hand-made | {by_hand.cost_per_hour:.2f} |" in readme
    assert readme.split("| + ")[-1].split(" |")[1].strip() == f"{ours.cost_per_hour:.2f}"
    monolith = next(p for p in readme.split("| + ")[1:] if p.startswith("any GPU")).split(" |")[1].strip()
    assert f"everywhere, it costs ${monolith}/h" in ours.explanation.monolith


def machines(plan):
    """ "2 machines of 4 L4, 1 of 8 A100"; the README leaves out memory sizes."""
    first, *others = (f"{n.count} of {n.gpus} {n.gpu.partition('-')[0]}" for n in plan.nodes)
    word = "machine" if plan.nodes[0].count == 1 else "machines"
    return ", ".join([first if plan.name == "hand-made" else first.replace(" of", f" {word} of", 1), *others])


def test_plan_of_example_keeps_every_bound():
    for name in ("plan", "hand-made"):
        for latency_forecasts in Plan.load(EXAMPLE / name / "plan.json").latency_forecasts:
            for bound, times in (
                (latency_forecasts.slo_ttft_s, latency_forecasts.ttft),
                (latency_forecasts.slo_tpot_s, latency_forecasts.tpot),
                (latency_forecasts.slo_e2e_s, latency_forecasts.e2e),
            ):
                assert bound is None or (times.p95 is not None and times.p95 <= bound)


def test_compare_example_plans_shows_savings():
    spec = importlib.util.spec_from_file_location("compare", EXAMPLE / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    ours, hand_made = (Plan.load(EXAMPLE / name / "plan.json") for name in ("plan", "hand-made"))
    out = io.StringIO()
    compare.show(ours, hand_made, Console(file=out, width=200))

    assert "saves $73.43/h, 44 % of $165.12/h" in out.getvalue()
    assert "estimates" in out.getvalue()
