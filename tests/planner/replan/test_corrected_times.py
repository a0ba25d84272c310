"""`cornplug replan` at engines that are slower than their profile, and before a load that comes every day."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cornplug import cli
from cornplug.planner import replan_state
from cornplug.planner.plan import Plan
from cornplug.planner.replan_command import CHANGE_STATUS
from cornplug.planner.replan_state import DAY_S, SLOT_S, DailyRates

from ..metrics_text import VLLM

INPUT = """
[[components]]
name = "llm7"
kind = "llm"
model = "org/llm7"
tp = [1]
engines = ["vllm"]
shape = { layers = 28, hidden = 3584, heads = 28, kv_heads = 4, head_dim = 128, parameters = 7.6e9 }

[[applications]]
name = "chat"
llm = "llm7"
slo = { ttft_s = 0.6, tpot_s = 0.04 }
structures = ["monolith"]
requests = [{ name = "short", rate = 7.5, prompt = 400, output = 60 }]

[[pool]]
name = "a100"
gpu = "A100-80"
gpus = 1
price_per_hour = 3.67
stock = 8

[rules]
n_plus_one = false
"""
WINDOW_S = 60
AS_PLANNED = "The load is the load for which the running plan was made."


class TimedSite:
    """A plan with simulated times, and an engine whose first tokens and tokens take some times as long."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.given, self.file = folder / "small.toml", folder / "metrics"
        self.given.write_text(INPUT)
        arguments = ["plan", str(self.given), "-o", str(folder / "plan"), "--quiet", "--explain", "0"]
        assert cli.main(arguments) == 0
        self.engine, self.at_s = VLLM(), 30 * DAY_S
        self.replan(requests=0)  # the first snapshot

    @property
    def plan(self) -> Plan:
        return Plan.load(self.folder / "plan/plan.json")

    def replan(self, *options: str, times: float = 1.0, requests: int = 450) -> tuple[int, str]:
        """A minute passes; exit status and what was printed."""
        (forecast,) = self.plan.latency_forecasts
        assert forecast.ttft.mean is not None
        assert forecast.tpot.mean is not None
        self.engine.serve(
            requests, 400, 60, ttft_s=times * forecast.ttft.mean, tpot_s=times * forecast.tpot.mean
        )
        self.at_s += WINDOW_S
        self.file.write_text(self.engine.text)
        os.utime(self.file, (self.at_s, self.at_s))
        plan = ["--plan", str(self.folder / "plan/plan.json"), "--metrics", str(self.file)]
        self._capsys.readouterr()
        return cli.main(["replan", str(self.given), *plan, *options]), self._capsys.readouterr().out


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> TimedSite:
    return TimedSite(tmp_path, capsys)


def test_corrected_times_slower_engine_is_corrected_by_second_window(site: TimedSite) -> None:
    """And the plan that is made with it expects the times that the engine has."""
    assert "Corrected" not in site.replan(times=1.7)[1]
    said = site.replan(times=1.7)[1]
    assert "Corrected from metrics: llm7/PD (vllm TP1) on A100-80 takes 1." in said
    status, said = site.replan("--json", "-o", str(site.folder / "plan"), times=1.7)
    told = json.loads(said)
    (correction,) = told["corrections"]
    assert 1.15 < correction["decode"] < 1.7, "prefill in the same iterations slows tokens, too"
    assert status in (0, CHANGE_STATUS)
    if status == CHANGE_STATUS:
        assert [c.model_dump() for c in site.plan.corrections] == told["corrections"]


@pytest.mark.more
def test_corrected_times_engine_that_recovers_loses_its_correction_after_two_windows(site: TimedSite) -> None:
    for _ in range(2):
        site.replan(times=1.7)
    assert "Corrected" in site.replan(times=1.0)[1]
    assert "Corrected" not in site.replan(times=1.0)[1]
    assert site.replan(times=1.0) == (0, f"{AS_PLANNED}\n")


def test_corrected_times_keep_times_believes_the_profile(site: TimedSite) -> None:
    for _ in range(3):
        status, said = site.replan("--keep-times", times=1.7)
        assert status == 0
        assert said.splitlines()[0] == AS_PLANNED
        assert "Corrected" not in said


@pytest.mark.more
def test_corrected_times_few_slow_requests_correct_nothing(site: TimedSite) -> None:
    """As an engine's first ones are."""
    for _ in range(3):
        assert "Corrected" not in site.replan("--ahead", "0", times=1.7, requests=80)[1]


@pytest.mark.more
def test_corrected_times_load_that_comes_every_day_is_planned_for_ahead(site: TimedSite) -> None:
    path = site.folder / "plan/plan-state.json"
    state = replan_state.ReplanState.model_validate_json(path.read_bytes())
    usual = {0: 7.5, 1: 40.0}  # a quarter of an hour after midnight
    history = {"chat/short": DailyRates(usual=usual, day=site.at_s // DAY_S)}
    path.write_text(state.model_copy(update={"history": history}).model_dump_json())
    assert SLOT_S == 900
    assert site.replan("--ahead", "0") == (0, f"{AS_PLANNED}\n")
    assert site.replan()[1].startswith("This window requires a change")
    status, said = site.replan("-o", str(site.folder / "plan"))
    assert status == CHANGE_STATUS
    assert "chat/short: expected rate 7.5 → 4" in said
    assert sum(g.replicas for g in site.plan.groups) > 1
    assert "chat/short" in replan_state.ReplanState.model_validate_json(path.read_bytes()).history
    site.replan(requests=0)  # the first snapshot under the new plan
    assert (
        replan_state.ReplanState.model_validate_json(path.read_bytes()).history["chat/short"].usual == usual
    )
