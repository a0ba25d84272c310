"""Videos on real engines: the rows and the KV that a fresh engine takes are those that it would compute.

The families whose videos a release of vLLM shares in a dtype are the lines that passed here: script/docs
writes `cornplug/checkpoints/tested_releases.py` from the results that a run keeps. Here each line is
shared on trial (`devkit/family_trials.py`). A video comes as JPEG frames in a data URL, its rate as an option
of the request.

In bfloat16 an answer says little of a row: there the lines show what is found, and that nothing is far off.
The float32 line shows that rows of videos are in place, and `test_families.py` that the service's rows are as
near in bfloat16 as the engine's.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from integration.stack import Stack, count, same_answers, services, settle_saves
from PIL import Image

from cornplug.checkpoints.tested_releases import VALIDATED
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


NEAR = 0.1
"""In bfloat16: difference of log-probabilities of requests that compute other parts of their prompts."""


def lines() -> list[object]:
    """(bed, family, dtype) of each line."""
    beds, dtypes = ("v1-one", "next-v1-one"), ("float32", "bfloat16")
    return [(bed, family, dtype) for bed in beds for family in FAMILIES for dtype in dtypes]


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


ASKS: Mapping[str, Callable[[EngineServer], Answer]] = {
    "plain": ask,
    "other words": lambda server: ask(server, before="Be brief. "),
    "other rate": lambda server: ask(server, fps=0.5),
}


@dataclass(frozen=True)
class Scene:
    stack: Stack
    """A store, a service that does not run yet, and the engines "first" and "second"."""
    stock: Mapping[str, Answer]
    """Stock's answers to `ASKS`."""
    dtype: str

    def as_stock(self, answer: Answer, name: str = "plain") -> None:
        """Fails unless the answer is stock's; in bfloat16 unless its first token is about as likely."""
        stock = self.stock[name]
        if self.dtype == "float32":
            same_answers([answer], [stock])
        else:
            assert answer.top_logprobs[0] == pytest.approx(stock.top_logprobs[0], abs=NEAR)


@contextmanager
def started(folder: Path, bed: str, family: str, dtype: str) -> Iterator[Scene]:
    command = next_vllm() if bed.startswith("next-") else None
    own = bed.removeprefix("next-")
    model = FAMILIES[family](folder / "model")
    trial = trial_environment(folder, {family})
    flags = (RATES, "--dtype", dtype)
    with services(folder, {"m": model}, {}, dtype) as stack:
        stock = VllmServer(model, *flags, log=folder / "stock.log", bed=own, vllm=command)
        apps = ("first", "second")
        stack.start(
            stock=stock,
            **{app: stack.vllm(app, "m", *flags, bed=own, command=command, env=trial) for app in apps},
        )
        answers = {name: put(stock) for name, put in ASKS.items()}
        stock.stop()
        yield Scene(stack, answers, dtype)


def embeddings(server: EngineServer, name: str, **labels: str) -> float:
    return count(server, f"{name}_total", kind="embedding", **labels)


def taken(server: EngineServer) -> float:
    """Tokens whose KV came out of the store."""
    return count(server, "saved_tokens_total")


@pytest.mark.support("Families: videos equal the engine's", "{family}")
@pytest.mark.parametrize(("bed", "family", "dtype"), lines())
def test_video_of_another_engine_or_the_service_answers_as_stock(
    bed: str, family: str, dtype: str, tmp_path: Path
) -> None:
    with started(tmp_path, bed, family, dtype) as scene:
        stack = scene.stack
        first, second = stack.servers["first"], stack.servers["second"]
        scene.as_stock(ask(first))
        wait_until(
            lambda: embeddings(first, "saves", outcome="stored") == 1, deadline_s=30, what="the stored rows"
        )
        assert stack.store is not None
        settle_saves(first, stack.store)
        a_fresh_engine_takes_rows_and_kv(scene, second)
        another_rate_is_another_video(scene, second, timed=family in TIMED)
        stack.encoder.start()
        the_service_takes_over(scene, second)


def a_fresh_engine_takes_rows_and_kv(scene: Scene, second: EngineServer) -> None:
    answer = ask(second)
    scene.as_stock(answer)
    assert taken(second) >= 0.9 * ((answer.prompt_tokens - 1) // PAGE * PAGE)
    # Other pages: all rows are needed, out of the store or, since the first request, of the engine's memory.
    scene.as_stock(ASKS["other words"](second), "other words")
    assert embeddings(second, "hits", source="store") == 1, missed(second)
    assert embeddings(second, "misses") == 0, "its tower ran"


def another_rate_is_another_video(scene: Scene, second: EngineServer, *, timed: bool) -> None:
    other, plain = (scene.stock[name].top_logprobs[0] for name in ("other rate", "plain"))
    if timed:  # else the rate would show in nothing
        assert other != pytest.approx(plain, abs=1e-4)
    before, hits = taken(second), embeddings(second, "hits")
    scene.as_stock(ASKS["other rate"](second), "other rate")
    assert embeddings(second, "hits") == hits
    assert embeddings(second, "misses") == 1
    assert taken(second) == before


def the_service_takes_over(scene: Scene, second: EngineServer) -> None:
    """Each ask has a new salt: nothing stored serves it. The engine looks for a service every second."""
    salts = (f"service {i}" for i in itertools.count())

    def encodes() -> bool:
        scene.as_stock(ask(second, salt=next(salts)))
        return embeddings(second, "hits", source="service_computed") > 0

    wait_until(encodes, deadline_s=60, what="rows that the service encoded")


def missed(server: EngineServer) -> dict[str, float]:
    """Counters that explain a failure."""
    return {k: v for k, v in server.metrics().items() if k.startswith("cornplug_misses") and v}


def test_validated_families_of_video_have_a_line_here() -> None:
    assert all(family in FAMILIES for *_, kind, family in VALIDATED if kind == "video")
