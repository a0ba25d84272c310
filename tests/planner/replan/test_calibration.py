"""Factors that explain an engine's metrics, waits included, are found; nothing else is believed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from planner.made_inputs import QWEN_7B, plan_input

from cornplug.planner import calibration
from cornplug.planner.candidates.timed_configs import neutral_correction, profile_key_of
from cornplug.planner.inputs.schema import ChangeRules, PlanInput
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.pipeline.formulate import FormulatedProblem, formulate
from cornplug.planner.plan import Plan, TimesCorrection
from cornplug.planner.replan_decision import ObservedTime


def one_model() -> PlanInput:
    return plan_input(
        components=[{"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1], "engines": ["vllm"]}],
        applications=[
            {
                "name": "chat",
                "llm": "qwen",
                "slo": {"ttft_s": 0.6, "tpot_s": 0.08},
                "structures": ["monolith"],
                "requests": [{"name": "r", "rate": 6.0, "prompt": 900, "output": 120}],
            }
        ],
        pool=[{"name": "a100", "gpu": "A100-80", "gpus": 1, "price_per_hour": 3.0}],
        rules={"n_plus_one": False},
    )


@dataclass
class Running:
    given: PlanInput
    plan: Plan

    def problem(self, *corrections: TimesCorrection) -> FormulatedProblem:
        return formulate(self.given, corrections)

    def correction(self, **factors: float) -> TimesCorrection:
        return neutral_correction(profile_key_of(self.plan.groups[0])).model_copy(update=factors)

    def observed(self, **seconds: float) -> list[ObservedTime]:
        (group,) = self.plan.groups
        return [
            ObservedTime(group.name, group.name, phase, s, s, 1000)  # type: ignore[arg-type]
            for phase, s in seconds.items()
        ]

    def simulated(self, problem: FormulatedProblem) -> dict[str, float]:
        """Mean TTFT and TPOT of the plan with the problem's times."""
        unknowns = [calibration._FactorEstimate(one) for one in self.observed(prefill=1.0, decode=1.0)]
        calibration._Simulation.create(problem, self.plan).update(unknowns)
        return {one.observed.phase: 2.718281828459045**-one.log_error for one in unknowns}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Running:
    path = tmp_path_factory.mktemp("running") / "plan.json"
    given = one_model()
    plan = decide(given, digest="").plan
    plan.save(path)
    return Running(given.model_copy(update={"change": ChangeRules(plan=path)}), plan)


@pytest.mark.parametrize(("prefill", "decode"), [(1.6, 1.25), (0.7, 0.8), (1.0, 1.4)])
def test_calibrated_factors_of_slower_engine_are_found(
    running: Running, prefill: float, decode: float
) -> None:
    """The engine: the same simulation with other times, where requests wait more than in proportion."""
    truth = running.correction(prefill=prefill, decode=decode)
    seen = running.simulated(running.problem(truth))
    (found,) = calibration.calibrate(running.problem(), running.plan, running.observed(**seen))
    assert found.prefill == pytest.approx(prefill, rel=0.08)
    assert found.decode == pytest.approx(decode, rel=0.08)
    assert profile_key_of(found) == profile_key_of(truth)


@pytest.mark.more
def test_calibrated_wait_is_not_taken_for_work(running: Running) -> None:
    """First tokens that take so much longer need a smaller factor: some of it is queue."""
    slower = running.simulated(running.problem(running.correction(prefill=1.5, decode=1.2)))
    ratio = slower["prefill"] / running.simulated(running.problem())["prefill"]
    (found,) = calibration.calibrate(running.problem(), running.plan, running.observed(**slower))
    assert ratio > 1.65
    assert found.prefill == pytest.approx(1.5, rel=0.08)


def test_calibrated_corrections_multiply_earlier_ones(running: Running) -> None:
    earlier = running.correction(prefill=1.2, decode=1.2)
    seen = running.simulated(running.problem(running.correction(prefill=1.5, decode=1.5)))
    (found,) = calibration.calibrate(running.problem(earlier), running.plan, running.observed(**seen))
    assert (found.prefill, found.decode) == (pytest.approx(1.5, rel=0.08), pytest.approx(1.5, rel=0.08))


def test_calibrated_times_as_planned_correct_nothing(running: Running) -> None:
    seen = running.simulated(running.problem())
    assert calibration.calibrate(running.problem(), running.plan, running.observed(**seen)) == []


@pytest.mark.more
def test_calibrated_time_beyond_every_factor_is_not_believed(running: Running) -> None:
    """Some minutes of TTFT beside quick decoding are no slow engine: a stall, a queue from before."""
    seen = running.simulated(running.problem())
    stalled = running.observed(prefill=300.0, decode=seen["decode"])
    found = calibration.calibrate(running.problem(), running.plan, stalled)
    assert all(one.prefill == 1.0 for one in found)


@pytest.mark.more
def test_plan_with_correction_expects_the_corrected_times(running: Running) -> None:
    slower = running.correction(prefill=1.6, decode=1.3)
    plan = decide(running.given, digest="", corrections=[slower]).plan
    (before,), (after,) = running.plan.latency_forecasts, plan.latency_forecasts
    assert before.tpot.mean is not None
    assert after.tpot.mean is not None
    assert after.tpot.mean > 1.1 * before.tpot.mean
    assert plan.corrections == [slower]
