"""Decoding while pages of other requests' prompts are saved, beside a stock engine with the same load.

Some requests decode all the time. Prompts that are new arrive beside them at fixed times, on both sides; with
cornplug every page of them is saved. A side's speed is that of the requests that decode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from driver.requests import Request, words
from driver.stage import Pair, hits

from devkit.engines import EngineServer
from gpu_sections import sides
from gpu_sections.figures import Figures
from gpu_sections.sides import Size

AIM: Final = 1.02


@dataclass(frozen=True, slots=True)
class Load:
    """What both sides get in a round."""

    rounds: int
    decodes: int
    """Requests that decode."""
    tokens: int
    """Tokens that each of them decodes."""
    prompt_tokens: int
    """Tokens of each prompt that arrives beside them."""
    every_s: float
    """Time between two arrivals, in seconds."""


_LOAD: Final = Load(rounds=6, decodes=16, tokens=500, prompt_tokens=2000, every_s=0.5)
_SMALL_LOAD: Final = Load(rounds=1, decodes=2, tokens=40, prompt_tokens=200, every_s=0.5)
_SIZE: Final = Size(tokens=4096, kv_gib=12, requests=32)


def measure(figures: Figures) -> None:
    """Measure with CUDA graphs, as users decode; where they do not start, without."""
    load = _SMALL_LOAD if figures.rehearse else _LOAD
    with figures.step("checkpoint"):
        model = sides.large_model(figures)
    store = "1GiB" if figures.rehearse else "16GiB"
    for graphs in (True, False):
        done = False
        with (
            figures.step("with CUDA graphs" if graphs else "without CUDA graphs"),
            sides.engines(figures, _SIZE, graphs=graphs) as here,
            here.store(store),
        ):
            with here.pair(model, "decode") as pair:
                _compare(figures, pair, load)
            done = True
        if done:
            return


def _compare(figures: Figures, pair: Pair, load: Load) -> None:
    seeds = iter(range(10_000))
    for server in (pair.stock, pair.cornplug):
        _speed(server, load, seeds)  # warms up
    hits(pair.cornplug, "kv_page")
    before = _saves(pair.cornplug)
    speeds: dict[EngineServer, list[float]] = {pair.stock: [], pair.cornplug: []}
    for i in range(load.rounds):
        for server in pair.in_turn(i):
            speeds[server].append(_speed(server, load, seeds))
    hits(pair.cornplug, "kv_page")
    saved = _saves(pair.cornplug) - before
    ratios = np.asarray(speeds[pair.stock]) / np.asarray(speeds[pair.cornplug])
    for side, server in (("stock", pair.stock), ("cornplug", pair.cornplug)):
        figures.add(f"tokens a second of a request, {side}", round(float(np.median(speeds[server])), 2))
        figures.add(f"tokens a second of a request, {side}, rounds", [round(s, 2) for s in speeds[server]])
    figures.add("time of a token, of stock's", round(float(np.median(ratios)), 4))
    figures.add("aim", AIM)
    figures.add("KV pages saved meanwhile", saved)
    if not saved:
        raise SystemExit("no page was saved meanwhile: this measured something else")


def _saves(server: EngineServer) -> int:
    return int(server.metric("cornplug_saves_total", kind="kv_page"))


def _speed(server: EngineServer, load: Load, seeds: Iterator[int]) -> float:
    """Median of the decoding requests' tokens a second, while new prompts arrive."""
    decodes = [Request(words(64, next(seeds)), max_tokens=load.tokens) for _ in range(load.decodes)]
    with _arrivals(server, load, seeds), ThreadPoolExecutor(load.decodes) as pool:
        answers = list(pool.map(lambda request: request.ask(server), decodes))
    # From the request on: a server that is busy sends the first tokens together with later ones.
    return float(np.median([len(answer.token_ids) / answer.total_s for answer in answers]))


@contextmanager
def _arrivals(server: EngineServer, load: Load, seeds: Iterator[int]) -> Iterator[None]:
    """While new prompts arrive at fixed times, however long the ones before take."""
    end = threading.Event()
    with ThreadPoolExecutor(8) as pool:

        def arrive() -> None:
            due = time.monotonic()
            while not end.wait(max(0.0, due - time.monotonic())):
                pool.submit(
                    Request(words(load.prompt_tokens, 20_000 + next(seeds)), max_tokens=1).ask, server
                )
                due += load.every_s

        thread = threading.Thread(target=arrive)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
