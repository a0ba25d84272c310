"""`vllm bench serve` as a stopwatch: what it is told, and what is believed of its answer."""

import json

from expected_errors import expect_error

from cornplug.errors import CornplugError
from cornplug.planner.engine_steps import BenchedModel, GridPoint, bench_command, bench_times, trace_lines

ASKS = [GridPoint(1, 1), GridPoint(40, 8), GridPoint(16, 8)]


def result(**changed):
    right = {"errors": ["", "", ""], "input_lens": [1, 40, 16], "output_lens": [1, 8, 8]}
    return {**right, "latencies": [0.1, 0.8, 0.4], **changed}


def test_trace_lines_prompts_share_no_prefix():
    lines = [json.loads(line) for first in (0, 1) for line in trace_lines(ASKS * 20, first).splitlines()]
    ids = [i for line in lines for i in line["hash_ids"]]

    assert len(ids) == len(set(ids))
    assert all(16 * len(line["hash_ids"]) >= line["prompt_tokens"] for line in lines)


def test_timed_requests_have_their_seconds():
    assert [(t.point, t.seconds) for t in bench_times(ASKS, result())] == list(
        zip(ASKS, [0.1, 0.8, 0.4], strict=True)
    )


def test_timed_failed_request_names_reason():
    errors = ["", "Traceback ...\nRuntimeError: out of blocks", ""]

    with expect_error(CornplugError, reason="bench", match="request 1 .*40"):
        bench_times(ASKS, result(errors=errors))


def test_timed_short_answer_is_refused():
    with expect_error(CornplugError, reason="bench", match="output_tokens=8.*output_tokens=3"):
        bench_times(ASKS, result(output_lens=[1, 3, 8]))


def test_command_without_ready_check_keeps_prefix_cache_cold(tmp_path):
    served = BenchedModel("http://127.0.0.1:1", "model", "/m", 2048)
    line = bench_command(
        served, tmp_path / "trace.jsonl", tmp_path / "result.json", requests=3, concurrency=2
    )

    assert line[line.index("--ready-check-timeout-sec") + 1] == "0"
    assert line[line.index("--max-concurrency") + 1] == "2"
