"""Jobs: a number of requests by a deadline, with rates, times and dollars that follow by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cornplug.errors import ConfigError
from cornplug.planner import plan_command
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.request_tables import SEND_SHARE
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.report import plan_folder

from ..sample_input import given

HOURS = 8.0
FOUR_A_SECOND = round(4 * SEND_SHARE * 3600 * HOURS)
"""112,896 requests."""
RULES = {"n_plus_one": False, "simulate": False, "use_idle_gpus": False, "max_utilisation": 1.0}


def app(name: str = "night", **requests: Any) -> dict[str, Any]:
    lengths = {"prompt": 400, "output": 11}
    return {
        "name": name, "llm": "llm7", "workload": "offline", "structures": ["monolith"],
        "requests": [{"name": "batch", **lengths, **requests}],
    }  # fmt: skip


JOB = {"requests": FOUR_A_SECOND, "deadline_hours": HOURS}


def test_plan_of_job_is_that_of_its_rate_and_says_dollars() -> None:
    """4 requests a second fill 2 A10G of 2 a second each: $2.02/h for 8 hours."""
    plan = decide(given(applications=[app(job=JOB)], rules=RULES), digest="").plan
    assert plan.cost_per_hour == pytest.approx(2.02)
    (forecast,) = plan.latency_forecasts
    assert forecast.rate == pytest.approx(4.0)
    assert forecast.job is not None
    assert forecast.job.dollars == pytest.approx(2.02 * HOURS)
    assert forecast.job.done_hours is None, "only a throughput is known"
    out = io.StringIO()
    plan_command.show(plan, Console(file=out, width=200))
    assert f"{FOUR_A_SECOND:,} requests of 8 h, for $16.16" in out.getvalue()
    assert f"{FOUR_A_SECOND:,} requests of 8 h, for $16.16" in plan_folder.html_report(plan)


def test_job_beside_other_work_costs_its_part_of_load() -> None:
    """Of 4 + 2 requests a second on equal replicas two thirds of the cost are the job's."""
    plan = decide(given(applications=[app(job=JOB), app("other", rate=2.0)], rules=RULES), digest="").plan
    assert plan.cost_per_hour == pytest.approx(3.03)
    job, other = (f.job for f in plan.latency_forecasts)
    assert other is None
    assert job is not None
    assert job.dollars == pytest.approx(3.03 * HOURS * 4 / 6)


@pytest.mark.more
def test_job_is_done_when_its_last_answer_is() -> None:
    table = {
        "kind": "table", "gpu": "A10G", "kv_tokens": 200_000,
        "prefill_tokens": [1, 4096], "prefill_s": [0.01, 0.1],
        "decode_requests": [1, 256], "decode_s": [0.02, 0.04],
    }  # fmt: skip
    llm = {"name": "llm7", "kind": "llm", "tp": [1], "engines": ["vllm"], "profiles": [table]}
    rules = RULES | {"simulate": True, "max_utilisation": 0.9}
    plan = decide(given(components=[llm], applications=[app(job=JOB)], rules=rules), digest="").plan
    (forecast,) = plan.latency_forecasts
    job = forecast.job
    assert job is not None
    assert job.done_hours is not None
    assert forecast.e2e.p99 is not None
    assert job.done_hours == pytest.approx(SEND_SHARE * HOURS + forecast.e2e.p99 / 3600, rel=1e-6)
    assert job.done_hours < HOURS
    (bound,) = forecast.slo_also
    assert (bound.percentile, bound.e2e_s) == ("p99", pytest.approx(0.02 * HOURS * 3600))


def test_job_survives_writing_and_reading_of_its_input() -> None:
    tables = given(applications=[app(job=JOB)], rules=RULES)
    assert PlanInput.model_validate(tables.model_dump()) == tables


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rate = 4.0\njob = { requests = 10, deadline_hours = 1.0 }", "rate: the job already sets the rate"),
        (
            "job = { requests = 10, deadline_hours = 1.0 }",
            ".job: chat is online, so its requests cannot wait.",
        ),
        ("job = { requests = 10 }", ".job.deadline_hours: missing."),
    ],
)
def test_toml_reader_wrong_job_is_error_with_remedy(tmp_path: Path, line: str, said: str) -> None:
    text = (Path(__file__).parents[1] / "good_input.toml").read_text()
    rate = next(one for one in text.splitlines() if one.startswith("rate = "))
    bad = tmp_path / "plan.toml"
    bad.write_text(text.replace(rate, line, 1))
    with pytest.raises(ConfigError) as error:
        toml_reader.read(bad)
    assert said in str(error.value)
