"""Time to first token of a fresh engine for prompts that another engine has served.

Beside a fresh stock engine, and beside an engine with vLLM's native offloading, which keeps its pages in its
own process: that engine served the prompts itself, and only its prefix cache on the GPU is emptied.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from driver.requests import Request, words
from driver.stage import VLLM, Stage, hits

from devkit.engines import Answer, EngineServer
from devkit.processes import together
from gpu_sections import sides
from gpu_sections.figures import Figures
from gpu_sections.sides import Size

_LENGTHS: Final = {"2k": 2000, "8k": 8000, "32k": 32000}
_SMALL_LENGTHS: Final = {"600": 600, "1200": 1200}
_WARM_UP_TOKENS: Final = 700
_SIZE: Final = Size(tokens=34816, kv_gib=12, requests=4)
_SMALL_SIZE: Final = Size(tokens=2048, kv_gib=1, requests=4)
_OFFLOADED_GIB: Final = 20
STOCK, CORNPLUG, NATIVE = "stock", "cornplug", "native offloading"


def measure(figures: Figures) -> None:
    """Add each side's times, and the ratios of their medians."""
    lengths, rounds = (_SMALL_LENGTHS, 1) if figures.rehearse else (_LENGTHS, 3)
    size, store = (_SMALL_SIZE, "1GiB") if figures.rehearse else (_SIZE, "24GiB")
    with figures.step("checkpoint"):
        model = sides.large_model(figures)
    asked = {
        name: [Request(words(tokens, 10 * tokens + i), max_tokens=4) for i in range(rounds)]
        for name, tokens in lengths.items()
    }
    with sides.engines(figures, size) as here, here.store(store):
        here.env["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
        with here.cornplug(model, "first") as first:
            for requests in asked.values():
                for request in requests:
                    request.then("who is this").ask(first)
            hits(first, "kv_page")  # two more steps: saved pages are committed
        _measure_fresh(figures, here, model, asked)


def _measure_fresh(figures: Figures, here: Stage, model: Path, asked: dict[str, list[Request]]) -> None:
    offloading = ("--kv-offloading-size", "1" if figures.rehearse else str(_OFFLOADED_GIB))
    servers = {
        STOCK: here.stock(model),
        CORNPLUG: here.cornplug(model, "second"),
        NATIVE: here.stock(model, VLLM, *offloading),
    }
    with ExitStack() as running:
        running.enter_context(together(*servers.values()))
        for server in servers.values():
            for i in range(2):
                Request(words(_WARM_UP_TOKENS, 900 + i)).ask(server)
        for requests in asked.values():
            for request in requests:
                request.then("who is this").ask(servers[NATIVE])
        for name, requests in asked.items():
            with figures.step(f"{name} tokens"):
                _one_length(figures, servers, name, requests)


def _one_length(
    figures: Figures, servers: dict[str, EngineServer], name: str, requests: list[Request]
) -> None:
    times: dict[str, list[float]] = {side: [] for side in servers}
    tokens = equal = 0
    before = _saved(servers[CORNPLUG])
    for i, request in enumerate(requests):
        question = request.then("what happens next")
        _forget(servers[NATIVE])
        order = list(servers)[i % len(servers) :] + list(servers)[: i % len(servers)]
        answers: dict[str, Answer] = {side: question.ask(servers[side]) for side in order}
        for side, answer in answers.items():
            times[side].append(answer.ttft_s)
        tokens += answers[STOCK].prompt_tokens
        equal += answers[STOCK].token_ids == answers[CORNPLUG].token_ids
    loaded = _saved(servers[CORNPLUG]) - before
    medians = {side: float(np.median(of)) for side, of in times.items()}
    for side, median in medians.items():
        figures.add(f"{name}: TTFT, {side}, s", round(median, 4))
        figures.add(f"{name}: TTFT, {side}, samples", [round(t, 4) for t in times[side]])
    figures.add(f"{name}: cornplug of stock", round(medians[CORNPLUG] / medians[STOCK], 3))
    figures.add(f"{name}: cornplug of native offloading", round(medians[CORNPLUG] / medians[NATIVE], 3))
    figures.add(f"{name}: prompt tokens, and those from the store", [tokens, int(loaded)])
    figures.add(f"{name}: answers equal to stock's", f"{equal} of {len(requests)}")
    if loaded < 0.9 * tokens:
        raise SystemExit(f"{loaded:.0f} of {tokens} prompt tokens came from the store: no fair measurement")


def _saved(server: EngineServer) -> float:
    hits(server, "kv_page")  # two more steps: all is counted
    return server.metric("cornplug_saved_tokens_total")


def _forget(server: EngineServer) -> None:
    """Empty the prefix cache on the GPU, not the host memory behind it."""
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=30, trust_env=False).raise_for_status()
