"""A plan's load test sends what was planned, by lines that `vllm bench serve` takes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.plan import LatencyForecast, RequestTimes
from cornplug.planner.plan_command import main
from cornplug.planner.report.plan_folder import LoadTest, load_tests, write_load_tests

from ..made_inputs import QWEN_7B, plan_input
from ..plans import Case, plan

PREFIX = {"tokens": 320, "hit_rate": 0.5}
GIVEN = plan_input(
    components=[{"name": "llm7", "kind": "llm", "shape": QWEN_7B}],
    applications=[
        {
            "name": "chat",
            "llm": "llm7",
            "slo": {"ttft_s": 0.5},
            "requests": [
                {"name": "short", "rate": 2, "prompt": 700, "output": 60, "burst": 4, "prefix": PREFIX}
            ],
        }
    ],
    pool=[{"name": "h100", "gpu": "H100"}],
)
FORECAST = LatencyForecast(
    app="chat", request="short", rate=2.0, served=2.0, prefix_hit_rate=0.5, slo_percentile="p95",
    slo_ttft_s=0.5, ttft=RequestTimes(mean=0.1, p50=0.09, p95=0.21, p99=0.4),
)  # fmt: skip
INPUT = """
[[components]]
name = "a"
kind = "llm"
profiles = [{kind = "throughput", gpu = "L4", requests_per_s = 1.0}]
[[applications]]
name = "b"
llm = "a"
workload = "offline"
requests = [{name = "c", rate = 1.0}]
[[pool]]
name = "l4"
gpu = "L4"
gpus = 1
price_per_hour = 1.0
"""


def made(case: Case) -> list[LoadTest]:
    return load_tests(GIVEN, plan(case).model_copy(update={"latency_forecasts": [FORECAST]}))


def test_load_test_has_rate_lengths_and_hits_of_input() -> None:
    (one,) = made(Case(replicas=2))
    rows = [json.loads(line) for line in one.trace.splitlines()]
    assert len(rows) == 240
    assert rows[-1]["at_s"] == pytest.approx(120, rel=0.1)
    assert {(row["prompt_tokens"], row["output_tokens"]) for row in rows} == {(700, 60)}
    assert {len(row["hash_ids"]) for row in rows} == {44}
    hits = [row for row in rows if row["hash_ids"][:20] == list(range(20))]
    assert len(hits) == pytest.approx(120, rel=0.2)
    new = [i for row in rows for i in row["hash_ids"] if i >= 1_000_000]
    assert len(new) == len(set(new)), "no other tokens are shared"


def test_load_test_line_names_address_and_expected_times() -> None:
    (one,) = made(Case(replicas=2))
    assert '--base-url "http://${HOST_1}:30000" --model Qwen/Qwen2-VL-7B-Instruct' in one.command
    assert one.expected == "2/s, 240 requests; expect P95 TTFT 210 ms (bound 500 ms)"


def test_load_test_written_commands_name_written_traces(tmp_path: Path) -> None:
    said = write_load_tests(made(Case()), tmp_path)
    (trace,) = tmp_path.iterdir()
    assert f"--dataset-path {trace} &" in said
    assert said.endswith("wait")


def test_plan_check_of_another_input_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "plan.toml"
    text.write_text(INPUT)
    plan(Case()).save(tmp_path / "plan.json")
    with expect_error(ConfigError, field=f"-o {tmp_path}"):
        main([str(text), "-o", str(tmp_path), "--check"])


def test_load_test_line_is_accepted_by_vllm() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    (one,) = made(Case(replicas=2))
    args = parser.parse_args(shlex.split(one.command)[3:])
    assert (args.self_timed, args.dataset_name, args.num_prompts) == (True, "timed_trace", 240)
