"""Data-parallel replicas of one `vllm serve` share the pool: each takes the other's pages from the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from integration.stack import PREAMBLE, wait_for_saves

from devkit import checkpoints
from devkit.engines import VllmServer
from devkit.processes import StoreProcess

WORDS: Final = f"{PREAMBLE} {PREAMBLE} What is a replica?"
PAGE: Final = 64


MODELS: Final = {"dense": checkpoints.qwen2_text, "mixture of experts": checkpoints.qwen3_vl_moe}
"""Replicas of a mixture of experts compute in step (vLLM's DPEngineCoreProc)."""


@pytest.fixture(params=MODELS)
def replicas(request: pytest.FixtureRequest, short_path: Path) -> Iterator[tuple[VllmServer, StoreProcess]]:
    """A server of two replicas, and a store."""
    model, socket = MODELS[request.param](short_path / "model"), short_path / "s"
    ours = ("--kv-connector", "cornplug", "--cornplug-app", "dp", "--cornplug-store", str(socket))
    with (
        StoreProcess(socket, log=short_path / "store.log") as store,
        VllmServer(model, *ours, "--data-parallel-size", "2", log=short_path / "log") as server,
    ):
        yield server, store


def ask(server: VllmServer, replica: int) -> dict[str, Any]:
    """The whole answer of one replica."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": WORDS}],
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    url, headers = f"{server.url}/v1/chat/completions", {"X-data-parallel-rank": str(replica)}
    answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.timeout(400)
@pytest.mark.support("Sharing", "data-parallel replicas of one host")
def test_vllm_replica_continues_what_another_replica_computed(
    replicas: tuple[VllmServer, StoreProcess],
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
