"""Slowdowns against a lone request: on an engine of constant times they are seconds, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_tables import IdleTimes
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.pipeline.formulate import formulate
from cornplug.planner.report import formatting

from ..sample_input import given

PREFILL_S, TOKEN_S = 0.1, 0.02


def planned(slo: dict[str, Any], *, simulate: bool = True, **profile: Any) -> PlanInput:
    """A request prefills in 0.1 s, and each of its 11 tokens but the first takes 0.02 s."""
    table = {
        "kind": "table", "gpu": "A100-80", "kv_tokens": 200_000,
        "prefill_tokens": [1, 4096], "prefill_s": [PREFILL_S, PREFILL_S],
        "decode_requests": [1, 256], "decode_s": [TOKEN_S, TOKEN_S],
    }  # fmt: skip
    llm = {"name": "llm", "kind": "llm", "tp": [1], "engines": ["vllm"], "profiles": [table | profile]}
    app = {
        "name": "chat", "llm": "llm", "slo": slo, "structures": ["monolith"],
        "requests": [{"name": "short", "rate": 20.0, "prompt": 400, "output": 11}],
    }  # fmt: skip
    rules = {"n_plus_one": False, "simulate": simulate, "use_idle_gpus": False}
    pool = [{"name": "a100", "gpu": "A100-80", "gpus": 1, "price_per_hour": 3.67, "stock": 32}]
    return given(components=[llm], applications=[app], rules=rules, pool=pool)


IDLE = {"idle": {"gpu": "A100-80"}}


def test_idle_times_of_constant_engine_are_sums() -> None:
    problem = formulate(planned({"ttft_slowdown": 2.0, **IDLE}, simulate=False))
    (of,) = problem.classes.values()
    (idle,) = {d.idle for d in problem.samples.for_class(of, problem.cell_builder.base_scenarios[of.name])}
    assert idle is not None
    assert idle == IdleTimes(pytest.approx(0.1), pytest.approx(0.02), pytest.approx(0.1 + 10 * 0.02))


SLOWED = {"percentile": "p90", "ttft_slowdown": 4.0, "tpot_slowdown": 3.0, **IDLE}


def test_capacity_with_slowdown_is_that_with_seconds() -> None:
    """All requests are alike: 4 times 0.1 s is 0.4 s, and 3 times 0.02 s is 0.06 s."""
    seconds = {"percentile": "p90", "ttft_s": 0.4, "tpot_s": 0.06}
    mine, other = (formulate(planned(slo, simulate=False)).pool.cells for slo in (SLOWED, seconds))
    assert [c.capacity for c in mine] == [pytest.approx(c.capacity) for c in other]
    assert any(c.capacity for c in mine)


@pytest.mark.more
def test_plan_with_slowdown_reports_simulated_one() -> None:
    plan = decide(planned(SLOWED), digest="").plan
    (forecast,) = plan.latency_forecasts
    assert forecast.slowdown is not None
    assert forecast.slowdown.idle == "A100-80 TP1"
    assert forecast.ttft.p90 is not None
    assert forecast.slowdown.ttft.p90 == pytest.approx(forecast.ttft.p90 / PREFILL_S)
    checks = {c.name: c for c in formatting.slo_checks(plan)}
    assert checks["TTFT slowdown P90"].is_met
    assert checks["TTFT slowdown P90"].bound_text == "4x"
    assert checks["TPOT slowdown P90"].simulated_text.endswith("x")


def test_plan_that_no_replica_can_keep_says_times_of_idle_replica() -> None:
    """The other profile's replica would be twice as fast as the pool's."""
    faster = {"gpu": "H100", "prefill_s": [0.05, 0.05]}
    tables = planned({"ttft_slowdown": 1.5, "idle": {"gpu": "H100"}}).model_dump()
    (slow,) = tables["components"][0]["profiles"]
    tables["components"][0]["profiles"].append(slow | faster)
    with pytest.raises(
        Exception, match=r"llm/PD may take at most 1.5 times the idle replica's latency for TTFT \(p95\)"
    ):
        decide(PlanInput.model_validate(tables), digest="")


def test_idle_replica_without_times_is_error_with_remedy() -> None:
    with expect_error(ConfigError, field="slo.idle of chat/short", match="llm/PD.*H100"):
        formulate(planned({"ttft_slowdown": 2.0, "idle": {"gpu": "H100", "tp": 2}}, simulate=False))
