"""What the store's rules must keep: LRU's savings on public traces, guarantees beside an app that scans."""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from cornplug.config import NamespaceConfig
from cornplug.replay import (
    ReplayScore,
    StoreReplay,
    TokenCost,
    TraceAccess,
    TraceRequest,
    distinct_bytes,
    read_trace,
    replay,
)

from .lru import LRU

MOONCAKE = Path(__file__).parents[2] / "benchmarks" / "traces"
MIB, GIB = 1 << 20, 1 << 30
STORE_BYTES = 4 * GIB
DURATION_S = 240.0
IMAGE_MIB = 0.5, 8.0
"""Embeddings of images of 64 to 1024 tokens, 4096 wide, in bfloat16."""
IMAGE_S_PER_MIB = 8e-3
"""Of a tower."""
PAGE_BYTES, PAGE_S = 4 * MIB, 4 * 0.6e-3
"""A KV page at 0.6 ms of prefill per MiB."""
GUARANTEES = {"images": NamespaceConfig(share=0.3), "chat": NamespaceConfig(share=0.5)}


@pytest.mark.parametrize(
    "percent", [pytest.param(5, marks=pytest.mark.more), 10, pytest.param(20, marks=pytest.mark.more)]
)
@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("conversation", 300),
        ("synthetic", 300),
        pytest.param("conversation", None, marks=[pytest.mark.more, pytest.mark.timeout(1200)]),
        pytest.param("synthetic", None, marks=[pytest.mark.more, pytest.mark.timeout(1200)]),
    ],
)
def test_store_saves_no_less_than_lru_on_mooncakes_traces(
    name: str, requests: int | None, percent: int
) -> None:
    trace = read_trace(MOONCAKE / f"mooncake_{name}.jsonl.gz", TokenCost())[:requests]
    capacity = distinct_bytes(trace) * percent // 100
    lru = replay(trace, LRU(capacity)).total.saved_s
    assert lru > 0
    assert replay(trace, StoreReplay(capacity)).total.saved_s >= 0.98 * lru


def test_store_beside_a_scan_saves_twice_lru_and_keeps_guarantees() -> None:
    """`images` Zipf 0.9; `chat` of 40 sessions; `documents` read once, 400 MiB/s; 4 GiB."""
    trace = _three_apps()
    mixed = replay(trace, StoreReplay(STORE_BYTES, GUARANTEES))
    lru = replay(trace, LRU(STORE_BYTES))
    assert mixed.total.saved_s >= 2.2 * lru.total.saved_s
    for app, rules in GUARANTEES.items():
        alone = _alone(app, int(STORE_BYTES * rules.share)).total.hit_rate
        assert mixed.by_app[app].hit_rate >= 0.9 * alone > 0
    assert mixed.by_app["documents"].hits == 0, "every document is read once"


def _alone(app: str, capacity_bytes: int) -> ReplayScore:
    return replay([one for one in _three_apps() if one.app == app], StoreReplay(capacity_bytes))


@cache
def _three_apps() -> list[TraceRequest]:
    draw, keys = random.Random(13), count(1 << 32)
    requests = [*_images(draw), *_chat(draw, keys), *_documents(draw, keys)]
    return sorted(requests, key=lambda request: request.time_s)


def _images(draw: random.Random) -> list[TraceRequest]:
    weights = [1 / (rank + 1) ** 0.9 for rank in range(1000)]
    mib = [math.exp(draw.uniform(*map(math.log, IMAGE_MIB))) for _ in weights]
    images = [TraceAccess(key, int(one * MIB), one * IMAGE_S_PER_MIB) for key, one in enumerate(mib)]
    return [
        TraceRequest(draw.uniform(0, DURATION_S), "images", (image,), is_prefix=True)
        for image in draw.choices(images, weights, k=int(10 * DURATION_S))
    ]


def _chat(draw: random.Random, keys: count[int]) -> list[TraceRequest]:
    """Sessions of 8 to 32 pages: each turn, 30 s after the one before on average, adds two."""
    requests = []
    for _ in range(40):
        time_s, pages = draw.uniform(0, 30), [next(keys) for _ in range(8)]
        while time_s < DURATION_S:
            accesses = tuple(TraceAccess(key, PAGE_BYTES, PAGE_S) for key in pages)
            requests.append(TraceRequest(time_s, "chat", accesses, is_prefix=True))
            time_s += draw.expovariate(1 / 30)
            pages = [next(keys) for _ in range(8)] if len(pages) >= 32 else [*pages, next(keys), next(keys)]
    return requests


def _documents(draw: random.Random, keys: count[int]) -> list[TraceRequest]:
    """Of 100 pages each: one a second is 400 MiB/s."""
    return [
        TraceRequest(
            second + draw.random(),
            "documents",
            tuple(TraceAccess(next(keys), PAGE_BYTES, PAGE_S) for _ in range(100)),
            is_prefix=True,
        )
        for second in range(int(DURATION_S))
    ]
