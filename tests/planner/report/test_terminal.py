"""What the terminal says of a plan."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cornplug.planner import plan_command as summary
from cornplug.planner.plan import OptimalityProof, Plan, PlanExplanation
from cornplug.planner.report import formatting

from ..sample_plan import group, plan


def shown(of: Plan, width: int = 160) -> str:
    out = io.StringIO()
    summary.show(of, Console(file=out, width=width, color_system=None))
    return out.getvalue()


def row(text: str, *starts: str) -> str:
    """The one line with all of these."""
    (line,) = [line for line in text.splitlines() if all(s in line for s in starts)]
    return line


def test_terminal_first_lines_are_cost_and_proof() -> None:
    first, second = shown(plan()).splitlines()[:2]
    assert first == "sample  $58.24/h: 1 × h100x8, 1 × l4"
    assert second == "cost: optimal (proved to 0.6 %) · HiGHS, 1.3 s"


def test_terminal_unproved_plan_is_not_called_optimal() -> None:
    found = OptimalityProof(status="feasible", solver="HiGHS", seconds=20, incumbent=60, bound=48, gap=0.2)
    said = shown(plan(proof=found, explanation=PlanExplanation()))
    assert "feasible, gap 20 %" in said
    assert "optimal" not in said
    late = plan(proof=found.model_copy(update={"timed_out": True}))
    assert "feasible, gap 20 %, stopped by the time limit" in shown(late)


@pytest.mark.parametrize(
    ("unit", "says"), [("$/h", "beyond 48 $/h"), ("$ in 24 h", "48 $ in 24 h"), ("", "48")]
)
def test_formatting_bound_of_unproved_plan_has_its_unit(unit: str, says: str) -> None:
    found = OptimalityProof(
        status="feasible", solver="HiGHS", seconds=20, incumbent=60, bound=48, gap=0.2, unit=unit
    )
    assert formatting.describe_proof(found).endswith(says)


def test_terminal_estimated_profile_is_marked() -> None:
    said = shown(plan())
    assert "ESTIMATE" in row(said, "vit/E", "cornplug", "1/4 GPU")
    assert "measured" in row(said, "llm7/P", "TP2", "71 %")
    assert "fp8" in row(said, "llm7/D", "93 %")


def test_terminal_bound_missed_in_simulation_is_marked() -> None:
    said = shown(plan())
    assert "kept" in row(said, "TTFT P95", "500 ms", "430 ms")
    assert "MISSED" in row(said, "TPOT P95", "50 ms", "52 ms")
    assert "no bound" in row(said, "E2E P95", "6.25 s")


def test_terminal_why_names_constraints_and_alternatives() -> None:
    said = shown(plan())
    assert "saves $4.50/h" in row(said, "stock[l4]")
    assert "$70.10/h" in row(said, "without H100")
    assert "impossible" in row(said, "only L4")
    assert "The monolith wins below 2 requests/s" in said
    assert "44 %" in row(said, "embedding-64")
    assert "30 %" in row(said, "gold")


def test_terminal_extra_replicas_and_idle_gpus_are_named() -> None:
    given = plan()
    assert "free for other work" not in shown(given)
    busy = group("llm7/PD@h100", "PD", replicas=3, extra_replicas=1)
    idle = given.nodes[0].model_copy(update={"idle_gpus": 2.5})
    said = shown(plan(groups=[busy], nodes=[idle]))
    assert row(said, "llm7/PD", "vllm").split()[0] == "2+1"
    assert "2.5 of the 8 GPUs of h100x8 are paid for but idle, so they are free for other work." in said
    assert "not needed for the SLOs" in said


def test_terminal_unserved_rate_is_shown() -> None:
    latency_forecasts = plan().latency_forecasts[0].model_copy(update={"served": 5.0})
    assert "5/s of 7.5/s" in shown(plan(latency_forecasts=[latency_forecasts]))


def test_terminal_names_are_escaped() -> None:
    said = shown(plan(groups=[group("a", "PD", service="[red]x[/red]")]))
    assert "[red]x[/red]" in said


@pytest.mark.parametrize(
    ("value", "said"), [(None, "–"), (0.0852, "85.2 ms"), (1.239, "1.24 s"), (3600.0, "3,600 s")]
)
def test_formatting_seconds_have_three_digits(value: float | None, said: str) -> None:
    assert formatting.format_seconds(value) == said


def test_slo_checks_percentile_is_compared_with_bound() -> None:
    ttft, tpot, e2e = formatting.slo_checks(plan())
    assert (ttft.simulated, ttft.is_met) == (0.43, True)
    assert (tpot.simulated, tpot.is_met) == (0.052, False)
    assert (e2e.bound, e2e.is_met) == (None, None)
