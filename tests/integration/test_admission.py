"""The middleware in a real `vllm serve`, with one API server process and with two."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from devkit import checkpoints
from devkit.engines import VllmServer

QOS = """
[qos]
default = "standard"
[qos.classes.premium]
share = 0.5
deadline_s = 600
api_keys = ["k"]
[qos.classes.standard]
deadline_s = 0.05
"""

BUSY = 160
"""Requests of premium: long enough that the first of the others, which is let in, comes back meanwhile."""


COUNTS = ("1", "2")
"""API server processes."""


@pytest.fixture(scope="module", params=COUNTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    (folder / "qos.toml").write_text(QOS)
    model = checkpoints.llava(folder / "llava")
    flags = ["--middleware", "cornplug.vllm_connector.admission.Admission", "--max-num-seqs", "1"]
    counts = ["--api-server-count", str(request.param)]
    env = {"CORNPLUG_CONFIG": str(folder / "qos.toml")}
    with VllmServer(model, *flags, *counts, log=folder / "log", env=env) as running:
        yield running


def test_admission_late_requests_are_refused_and_the_rest_answered(server: VllmServer) -> None:
    def ask(key: str) -> httpx.Response:
        body = {"model": "model", "prompt": "one two three", "max_tokens": 48, "ignore_eos": True}
        return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    # One client: making one takes longer than the tiny model does, and no queue would come about. Each
    # request has a connection of its own: a kept one may be closing, after 5 s, on the server's side.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        httpx.Client(base_url=server.url, timeout=300, trust_env=False, limits=limits) as http,
        ThreadPoolExecutor(24) as threads,
    ):
        # Premium keeps a queue there, under which the rate is measured.
        busy = [threads.submit(ask, "k") for _ in range(BUSY)]
        refused: list[httpx.Response] = []
        while not all(one.done() for one in busy):
            answer = ask("unknown")
            if answer.status_code != 200:
                refused.append(answer)
            assert http.get("/health").status_code == 200
    assert {one.result().status_code for one in busy} == {200}, "premium has ten minutes"
    assert refused
    assert {one.status_code for one in refused} <= {429, 503}
    assert all(int(one.headers["retry-after"]) >= 1 and "error" in one.json() for one in refused)
    # A single one may be late: clients, two servers and the engine have two cores here.
    assert statistics.median(one.elapsed.total_seconds() for one in refused) < 2
    counted = sum(
        server.metric("cornplug_admission_total", qos="standard", outcome=outcome)
        for outcome in ("over_share", "overloaded")
    )
    assert counted == len(refused)
    # The first of each server may come before vLLM's figures are read.
    let_in = (
        server.metric("cornplug_admission_total", qos="premium", outcome=o) for o in ("admitted", "blind")
    )
    assert sum(let_in) == BUSY
