"""`cornplug replan`, as an operator's timer runs it: quiet until two windows agree on a change."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from time_limits import TimeLimits

from cornplug import cli
from cornplug.planner import observed_load, replan_state
from cornplug.planner import replan_command as replan
from cornplug.planner.observed_load import MetricsSnapshot
from cornplug.planner.plan import Plan
from cornplug.planner.replan_command import CHANGE_STATUS, with_start_times

from ..metrics_text import VLLM
from ..sample_plan import group, plan
from ..test_plan_command import written


class Site:
    """A plan that runs, and an engine whose metrics land in a file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.given = written(folder, 7.5)
        assert (
            cli.main(["plan", str(self.given), "-o", str(folder / "plan"), "--quiet", "--explain", "0"]) == 0
        )
        self.engine, self.at_s = VLLM(), 1000
        self.file = folder / "metrics"
        self.replan()  # the first snapshot

    def replan(self, *options: str, requests: int = 0, ttft_s: float = 0.05) -> tuple[int, str]:
        """A minute passes with so many requests; exit status and what was printed."""
        self.engine.serve(requests, 400, 60, ttft_s=ttft_s)
        self.at_s += 60
        self.file.write_text(self.engine.text)
        os.utime(self.file, (self.at_s, self.at_s))
        plan_file = self.folder / "plan/plan.json"
        self._capsys.readouterr()
        status = cli.main(
            ["replan", str(self.given), "--plan", str(plan_file), "--metrics", str(self.file), *options]
        )
        return status, self._capsys.readouterr().out


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Site:
    return Site(tmp_path, capsys)


AS_PLANNED = 450
"""7.5 requests/s."""


def test_replan_planned_load_prints_one_line(site: Site) -> None:
    for _ in range(3):
        assert site.replan(requests=AS_PLANNED) == (
            0,
            "The load is the load for which the running plan was made.\n",
        )


def expect_ttft(site: Site, mean_s: float) -> None:
    """The running plan expects such first tokens."""
    path = site.folder / "plan/plan.json"
    old = Plan.load(path)
    expected = [
        o.model_copy(update={"ttft": o.ttft.model_copy(update={"mean": mean_s})})
        for o in old.latency_forecasts
    ]
    old.model_copy(update={"latency_forecasts": expected}).save(path)
    site.replan()  # the first snapshot under it


def test_replan_engines_slower_than_planned_are_named(site: Site) -> None:
    """At the planned load no other plan helps: its times are wrong."""
    expect_ttft(site, 0.2)
    assert "The mean TTFT" not in site.replan(requests=AS_PLANNED, ttft_s=0.25)[1]
    status, said = site.replan(requests=AS_PLANNED, ttft_s=0.6)
    first, second = said.splitlines()
    assert (status, first) == (0, "The load is the load for which the running plan was made.")
    assert second.startswith("The mean TTFT of the plan's engines is 600 ms, but ")
    assert " was planned. The load is not above the planned load. " in second
    assert second.endswith("Measure them with `cornplug profile` and plan again.")
    _, said = site.replan("--json", requests=AS_PLANNED, ttft_s=0.6)
    assert json.loads(said)["slow"] == [second]


def test_replan_few_or_many_slow_requests_blame_no_times(site: Site) -> None:
    """Few may be a cold start; many are the load's."""
    expect_ttft(site, 0.2)
    for requests in (AS_PLANNED // 5, 2 * AS_PLANNED):
        assert "The mean TTFT" not in site.replan(requests=requests, ttft_s=0.6)[1]


def test_replan_load_within_reserve_prints_one_line(site: Site) -> None:
    assert site.replan(requests=AS_PLANNED * 9 // 8) == (
        0,
        "No change pays off: the running plan can serve the load.\n",
    )


def test_replan_plan_for_observed_load_is_kept_at_it(site: Site) -> None:
    """And is not when the load that the file tells of comes back."""
    site.replan(requests=2 * AS_PLANNED)
    assert site.replan("-o", str(site.folder / "plan"), requests=2 * AS_PLANNED)[0] == CHANGE_STATUS
    path = site.folder / "plan/plan.json"
    new = Plan.load(path)
    # An hour later: younger replicas would stay whatever the load is.
    new.model_copy(update={"groups": [g.model_copy(update={"since": 0.0}) for g in new.groups]}).save(path)
    site.replan()  # the first snapshot under the new plan
    for _ in range(2):
        said = site.replan(requests=2 * AS_PLANNED)
        assert said == (0, "The load is the load for which the running plan was made.\n")
    assert "requires a change (saves " in site.replan(requests=AS_PLANNED)[1]


def test_replan_doubled_load_in_two_windows_acts(site: Site) -> None:
    status, said = site.replan(requests=2 * AS_PLANNED)
    assert status == 0
    assert said.startswith("This window requires a change")
    assert said.endswith("The next window must confirm this.\n")
    status, said = site.replan("-o", str(site.folder / "next"), requests=2 * AS_PLANNED)
    assert status == CHANGE_STATUS
    assert said == GOLDEN
    new = Plan.load(site.folder / "next/plan.json")
    assert new.cost_per_hour == pytest.approx(7.34)
    assert all(g.since is not None for g in new.groups)


GOLDEN = """\
Change: the utilisation of llm7-PD-a100-sglang-tp1-online would be 150 %, but at most 95 % is allowed.
  chat/short: rate 7.5 → 15
1. add 1 × a100
2. start 1 × llm7/PD (sglang TP1) on A100-80 (a100)
Cost: $3.67/h → $7.34/h
"""


def test_replan_one_odd_window_does_not_act(site: Site) -> None:
    assert site.replan(requests=3 * AS_PLANNED)[0] == 0
    assert site.replan(requests=AS_PLANNED)[0] == 0
    status, said = site.replan(requests=3 * AS_PLANNED)
    assert (status, said[:11]) == (0, "This window")


def test_replan_two_windows_that_disagree_do_not_act(site: Site) -> None:
    assert site.replan(requests=3 * AS_PLANNED)[0] == 0
    status, said = site.replan(requests=AS_PLANNED // 5)
    assert (status, said[:11]) == (0, "This window")


def test_json_tells_all_of_it(site: Site) -> None:
    site.replan(requests=2 * AS_PLANNED)
    status, said = site.replan("--json", requests=2 * AS_PLANNED)
    told = json.loads(said)
    assert (status, told["act"], told["waiting"]) == (CHANGE_STATUS, True, False)
    assert told["observed"] == [
        {"demand": "chat/short", "what": "rate", "planned": 7.5, "observed": pytest.approx(15)}
    ]
    assert [s["kind"] for s in told["steps"]] == ["nodes", "start"]
    assert told["saves_per_hour"] == pytest.approx(-3.67)


def test_replan_load_beyond_stock_exits_1(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = site.replan(requests=40 * AS_PLANNED)
    assert status == 1


class Metrics(BaseHTTPRequestHandler):
    """An engine at which ten requests have come in since one last looked."""

    engine = VLLM()

    def do_GET(self) -> None:
        self.engine.serve(10, 400, 60)
        body = self.engine.text.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_replan_window_reads_engine_twice(address: str, within: TimeLimits) -> None:
    before, after = replan._snapshots([address], {}, 0.5)
    assert before is not None
    window = observed_load.window_between(before[address], after[address])
    assert window.requests == 10
    assert window.seconds >= 0.5
    within.check(window.seconds, 5)


def test_replan_without_window_starts_at_last_run(address: str) -> None:
    last = {address: MetricsSnapshot(time.time() - 100, {})}
    before, _ = replan._snapshots([address], last, None)
    assert before == last


def test_replan_state_of_other_plan_is_dropped(site: Site) -> None:
    site.replan(requests=2 * AS_PLANNED)
    path = site.folder / "plan/plan.json"
    Plan.load(path).model_copy(update={"name": "other"}).save(path)
    assert site.replan(requests=2 * AS_PLANNED) == (
        0,
        "Saved the first snapshot. Run again when there are newer metrics.\n",
    )


def test_metrics_that_have_not_changed_are_no_window(site: Site) -> None:
    state = site.folder / "plan/plan-state.json"
    before = replan_state.ReplanState.model_validate_json(state.read_bytes())
    site.at_s -= 60
    status, said = site.replan()
    assert (status, said[:14]) == (0, "Saved the firs")
    assert (
        replan_state.ReplanState.model_validate_json(state.read_bytes()).snapshots.keys()
        == before.snapshots.keys()
    )


def test_replan_bad_arguments_name_remedy(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["replan", str(site.given), "--plan", str(site.folder / "plan/plan.json")]
    assert cli.main([*base, "--metrics", f"chta={site.file}"]) == 2
    assert "no such group or class" in capsys.readouterr().err
    (site.folder / "state").write_text("{")
    assert cli.main([*base, "--metrics", str(site.file), "--state", str(site.folder / "state")]) == 2
    assert "Remove it, or use another file" in capsys.readouterr().err


def test_aged_kept_replicas_keep_since() -> None:
    old = plan(groups=[group("a", "PD", replicas=2, since=100.0), group("b", "P", replicas=1, since=100.0)])
    new = plan(groups=[group("a", "PD", replicas=1), group("b", "P", replicas=2), group("c", "D")])
    assert [g.since for g in with_start_times(old, new, 500.0).groups] == [100.0, 500.0, 500.0]
