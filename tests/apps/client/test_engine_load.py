"""Queue lengths out of both engines' metrics, read beside requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest

from cornplug.apps.engine_choice import EngineLoad, LoadPoller, parse_load

from .fake_engine import engines

VLLM = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
"""
SGLANG = 'sglang:num_running_reqs{model_name="m"} 4.0\nsglang:num_queue_reqs{model_name="m"} 9.0\n'


@pytest.mark.parametrize(
    ("page", "load"),
    [(VLLM, EngineLoad(7.0, 4.0)), (SGLANG, EngineLoad(9.0, 4.0)), ("python_info 1.0\n", None), ("", None)],
)
def test_engine_load_page_of_each_engine_is_parsed(page: str, load: EngineLoad | None) -> None:
    assert parse_load(page) == load


def test_load_poller_dead_and_strange_engines_are_left_out() -> None:
    reports: list[Mapping[str, EngineLoad]] = []
    came = threading.Event()

    def report(loads: Mapping[str, EngineLoad]) -> None:
        reports.append(loads)
        came.set()

    with engines(3) as (a, b, c):
        a.metrics, b.metrics = VLLM, "vllm:num_requests_waiting what\n"
        poller = LoadPoller(report)
        poller.refresh([a.url, b.url, c.url, "http://127.0.0.1:1"])
        assert came.wait(60)
        assert reports == [{a.url: EngineLoad(7.0, 4.0)}]


def test_load_poller_many_requests_read_once_an_interval() -> None:
    reports: list[Mapping[str, EngineLoad]] = []
    poller = LoadPoller(reports.append, interval_s=0.2)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        poller.refresh([])
        time.sleep(0.01)
    assert 1 <= len(reports) <= 2
