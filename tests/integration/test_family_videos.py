"""Videos on real engines: the rows and the KV that a fresh engine takes are those that it would compute.

`VALIDATED_VIDEOS` of `cornplug/vllm_connector/compat.py` are the families that passed both tests here:
script/docs writes the list from the results that a run keeps. A family that is new is shared on trial
(`devkit/family_trials.py`). A video comes as JPEG frames in a data URL, its rate as an option of the request.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from integration.stack import Stack, count, services, settle_saves
from PIL import Image

from cornplug.vllm_connector.compat import VALIDATED_VIDEOS
from devkit import checkpoints
from devkit.engines import Answer, EngineServer, VllmServer, wait_until
from devkit.family_trials import trial_environment
from devkit.vllm_beds import next_vllm

PAGE = 64
FAMILIES: Mapping[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen3_vl": checkpoints.qwen3_vl,
    "qwen3_vl_moe": checkpoints.qwen3_vl_moe,
}
RATES = "--trust-request-mm-kwargs"
"""Requests may name a video's rate."""
TIMED = frozenset(FAMILIES) - {"qwen2_vl"}
"""Families whose answers follow the rate."""


def lines() -> list[object]:
    """(bed, family) of each line."""
    return [(bed, family) for bed in ("v1-one", "next-v1-one") for family in FAMILIES]


@cache
def video(seed: int = 0) -> str:
    """Eight frames, as a data URL."""
    frames = np.random.default_rng(seed).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    parts = []
    for frame in frames:
        out = io.BytesIO()
        Image.fromarray(frame).resize((224, 224)).save(out, "JPEG")
        parts.append(base64.b64encode(out.getvalue()).decode())
    return f"data:video/jpeg;base64,{','.join(parts)}"


def ask(server: EngineServer, *, fps: float = 2.0, before: str = "", salt: str | None = None) -> Answer:
    content = [
        {"type": "text", "text": f"{before}Rule: name the source, and keep to the question."},
        {"type": "video_url", "video_url": {"url": video()}},
        {"type": "text", "text": "What happens?"},
    ]
    return server.chat(
        [{"role": "user", "content": content}],
        max_tokens=6,
        cache_salt=salt,
        top_logprobs=5,
        media_io_kwargs={"video": {"fps": fps}},
    )


def same(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for row, column in zip(one.top_logprobs, other.top_logprobs, strict=True):
        assert row == pytest.approx(column, abs=1e-4)


ASKS: Mapping[str, Callable[[EngineServer], Answer]] = {
    "plain": ask,
    "other words": lambda server: ask(server, before="Be brief. "),
    "other rate": lambda server: ask(server, fps=0.5),
}


@contextmanager
def started(folder: Path, bed: str, family: str) -> Iterator[tuple[Stack, Mapping[str, Answer]]]:
    """A store, a service that does not run yet, engines "first" and "second", and stock's answers."""
    command = next_vllm() if bed.startswith("next-") else None
    own = bed.removeprefix("next-")
    model = FAMILIES[family](folder / "model")
    trial = trial_environment(folder, {family} - VALIDATED_VIDEOS)
    with services(folder, {"m": model}, {}) as stack:
        stock = VllmServer(model, RATES, log=folder / "stock.log", bed=own, vllm=command)
        apps = ("first", "second")
        stack.start(
            stock=stock,
            **{app: stack.vllm(app, "m", RATES, bed=own, command=command, env=trial) for app in apps},
        )
        answers = {name: put(stock) for name, put in ASKS.items()}
        stock.stop()
        yield stack, answers


def embeddings(server: EngineServer, name: str, **labels: str) -> float:
    return count(server, f"{name}_total", what="embedding", **labels)


def taken(server: EngineServer) -> float:
    """Tokens whose KV came out of the store."""
    return count(server, "saved_tokens_total")


@pytest.mark.support("Families: videos equal the engine's", "{family}")
@pytest.mark.parametrize(("bed", "family"), lines())
def test_video_of_another_engine_or_the_service_answers_as_stock(
    bed: str, family: str, tmp_path: Path
) -> None:
    with started(tmp_path, bed, family) as (stack, stock):
        first, second = stack.servers["first"], stack.servers["second"]
        same(ask(first), stock["plain"])
        wait_until(
            lambda: embeddings(first, "saves", outcome="stored") == 1, deadline_s=30, what="the stored rows"
        )
        assert stack.store is not None
        settle_saves(first, stack.store)
        a_fresh_engine_takes_rows_and_kv(second, stock)
        another_rate_is_another_video(second, stock, timed=family in TIMED)
        stack.encoder.start()
        the_service_takes_over(second, stock)


def a_fresh_engine_takes_rows_and_kv(second: EngineServer, stock: Mapping[str, Answer]) -> None:
    answer = ask(second)
    same(answer, stock["plain"])
    assert taken(second) >= 0.9 * ((answer.prompt_tokens - 1) // PAGE * PAGE)
    # Other pages: all rows are needed, out of the store or, since the first request, of the engine's memory.
    same(ASKS["other words"](second), stock["other words"])
    assert embeddings(second, "hits", source="store") == 1, missed(second)
    assert embeddings(second, "misses") == 0, "its tower ran"


def another_rate_is_another_video(second: EngineServer, stock: Mapping[str, Answer], *, timed: bool) -> None:
    if timed:  # else the rate would show in nothing
        assert stock["other rate"].top_logprobs[0] != pytest.approx(stock["plain"].top_logprobs[0], abs=1e-4)
    before, hits = taken(second), embeddings(second, "hits")
    same(ASKS["other rate"](second), stock["other rate"])
    assert embeddings(second, "hits") == hits
    assert embeddings(second, "misses") == 1
    assert taken(second) == before


def the_service_takes_over(second: EngineServer, stock: Mapping[str, Answer]) -> None:
    """Each ask has a new salt: nothing stored serves it. The engine looks for a service every second."""
    salts = (f"service {i}" for i in itertools.count())

    def encodes() -> bool:
        same(ask(second, salt=next(salts)), stock["plain"])
        return embeddings(second, "hits", source="service_computed") > 0

    wait_until(encodes, deadline_s=60, what="rows that the service encoded")


def missed(server: EngineServer) -> dict[str, float]:
    """Counters that explain a failure."""
    return {k: v for k, v in server.metrics().items() if k.startswith("cornplug_misses") and v}


def test_family_videos_shared_by_compat_have_a_line_here() -> None:
    assert set(FAMILIES) >= VALIDATED_VIDEOS
