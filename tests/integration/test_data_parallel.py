"""Data-parallel replicas of one `vllm serve` share the pool: each takes the other's pages from the store."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from integration.stack import PREAMBLE, wait_for_saves

from devkit import checkpoints
from devkit.engines import VllmServer
from devkit.processes import StoreProcess, wait_until
from devkit.vllm_beds import REPLICAS_IN_STEP

WORDS: Final = f"{PREAMBLE} {PREAMBLE} What is a replica?"
PAGE: Final = 64


MODELS: Final = {"dense": checkpoints.qwen2_text, "mixture of experts": checkpoints.qwen3_vl_moe}


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of the model. Replicas of a mixture of experts compute in step (vLLM's `DPEngineCoreProc`)."""
    return str(request.param)


@pytest.fixture(scope="module")
def replicas(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, StoreProcess]]:
    """A server of two replicas, and a store."""
    folder, sockets = tmp_path_factory.mktemp("dp"), Path(tempfile.mkdtemp(prefix="cp-"))
    model, socket = MODELS[kind](folder / "model"), sockets / "s"
    ours = ("--kv-connector", "cornplug", "--cornplug-app", "dp", "--cornplug-store", str(socket))
    with (
        StoreProcess(socket, log=folder / "store.log") as store,
        VllmServer(
            model,
            *ours,
            "--data-parallel-size",
            "2",
            log=folder / "log",
            packages=(REPLICAS_IN_STEP,),
            # A small machine has no cores of its own for a second replica.
            env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        ) as server,
    ):
        yield server, store
    shutil.rmtree(sockets, ignore_errors=True)


def ask(server: VllmServer, replica: int, words: str = WORDS, *, tokens: int = 8) -> dict[str, Any]:
    """The whole answer of one replica, of so many tokens."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    url, headers = f"{server.url}/v1/chat/completions", {"X-data-parallel-rank": str(replica)}
    answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.support("Sharing", "data-parallel replicas of one host, {kind}")
def test_vllm_replica_continues_what_another_replica_computed(
    replicas: tuple[VllmServer, StoreProcess], kind: str
) -> None:
    server, store = replicas
    first = ask(server, 0)
    pages = (first["usage"]["prompt_tokens"] - 1) // PAGE
    # An engine stores a prompt that it had once when it idles.
    wait_for_saves(server, lambda: store.stat().entries >= 0.9 * pages, what="the prompt's pages")
    again = ask(server, 1)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    ask(server, 1)  # the counters reach /metrics with a further step
    assert server.metric("cornplug_saved_tokens_total", app="dp") >= 0.9 * pages * PAGE


def test_vllm_idle_replica_of_experts_saves_when_no_other_computes(
    replicas: tuple[VllmServer, StoreProcess], kind: str
) -> None:
    if kind == "dense":
        pytest.skip("its replicas do not wait for one another")
    server, store = replicas
    before = store.stat().entries
    with ThreadPoolExecutor() as pool:
        long = pool.submit(ask, server, 1, "A long story.", tokens=400)
        running = "vllm:num_requests_running"
        wait_until(lambda: server.metric(running, engine="1") > 0, deadline_s=60, what="the long request")
        short = ask(server, 0, f"The idle one. {WORDS}")
        time.sleep(1)  # an idle engine begins to save after 0.05 s
        assert not long.done(), "the other replica computed for too short a time"
        assert store.stat().entries == before
        long.result()
    pages = (short["usage"]["prompt_tokens"] - 1) // PAGE
    wait_for_saves(server, lambda: store.stat().entries >= before + 0.9 * pages, what="the idle one's pages")
