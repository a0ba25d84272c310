"""`vllm serve MODEL --mm-encoder-only --kv-connector cornplug` beside an engine that takes its rows.

The producer is asked as the proxy of vLLM's disaggregated encoder asks: each medium in a request of its own,
for one token. vLLM's second model runner has no such engine on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.stack import Stack, count, same_answers, services
from integration.test_family_videos import missed, video

from devkit import checkpoints
from devkit.engines import Answer, EngineServer, VllmServer, data_url, photos, wait_until
from devkit.vllm_beds import next_vllm

BEDS = ("v1-one", "v1", "next-v1-one")
IMAGES = [{"type": "image_url", "image_url": {"url": data_url(photos()[i].data)}} for i in range(2)]
VIDEO = {"type": "video_url", "video_url": {"url": video()}}
TEXT = {"type": "text", "text": "What is shown? Name the source, and keep to the question."}
ASKS: Mapping[str, list[dict[str, Any]]] = {
    "two images": [*IMAGES, TEXT],
    "a video": [VIDEO, TEXT],
}
MEDIA = [*IMAGES, VIDEO]


def ask(server: EngineServer, name: str) -> Answer:
    return server.chat([{"role": "user", "content": ASKS[name]}], max_tokens=6, top_logprobs=5)


def encode(server: EngineServer, *content: Mapping[str, Any]) -> None:
    """Ask for one token; the answer has none."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": list(content)}],
        "max_tokens": 1,
        "stream": False,
    }
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("stop", "")


@contextmanager
def started(folder: Path, bed: str) -> Iterator[tuple[Stack, Mapping[str, Answer]]]:
    """A store, no encoder service, engines "producer" and "consumer", and stock's answers."""
    command = next_vllm() if bed.startswith("next-") else None
    where: dict[str, Any] = {"bed": bed.removeprefix("next-"), "command": command}
    model = checkpoints.qwen2_5_vl(folder / "model")
    with services(folder, {"m": model}, {}) as stack:
        stock = VllmServer(model, log=folder / "stock.log", bed=where["bed"], vllm=command)
        stack.start(
            stock=stock,
            producer=stack.vllm("producer", "m", "--mm-encoder-only", **where),
            consumer=stack.vllm("consumer", "m", **where),
        )
        answers = {name: ask(stock, name) for name in ASKS}
        stock.stop()
        yield stack, answers


@pytest.mark.parametrize("bed", BEDS)
def test_engine_takes_the_rows_of_an_engine_that_runs_its_encoder_only(bed: str, tmp_path: Path) -> None:
    with started(tmp_path, bed) as (stack, stock):
        producer, consumer = stack.servers["producer"], stack.servers["consumer"]
        encode(producer, TEXT)
        assert stack.stat().entries == 0
        for number, medium in enumerate(MEDIA):
            encode(producer, medium)
            assert stack.stat().entries == number + 1, "the answer came before the rows were stored"
        for name, answer in stock.items():
            same_answers([ask(consumer, name)], [answer])
        assert hits(consumer) == len(MEDIA), missed(consumer)
        assert count(consumer, "misses_total", kind="embedding") == 0, "its tower ran"
        assert count(consumer, "saves_total", kind="embedding") == 0
        the_producer_reports_its_saves(producer)
        rows_that_the_store_has_lost_come_again(stack, producer)


def hits(server: EngineServer) -> float:
    return count(server, "hits_total", kind="embedding", source="store")


def absent(producer: EngineServer) -> float:
    """Media that its tower encoded."""
    return producer.metric("cornplug_misses_total", kind="embedding", reason="absent")


def the_producer_reports_its_saves(producer: EngineServer) -> None:
    def reported() -> bool:
        encode(producer, TEXT)
        return producer.metric("cornplug_saves_total", kind="embedding", outcome="stored") == len(MEDIA)

    wait_until(reported, deadline_s=20, what="counted saves")
    assert absent(producer) == len(MEDIA)
    assert not [name for name in producer.metrics() if 'kind="kv_page"' in name]


def rows_that_the_store_has_lost_come_again(stack: Stack, producer: EngineServer) -> None:
    """Out of vLLM's own cache, without its tower."""
    assert stack.store is not None
    stack.store.stop()
    stack.start_store()

    def stored() -> bool:
        for medium in IMAGES:
            encode(producer, medium)
        return stack.stat().entries >= len(IMAGES)

    wait_until(stored, deadline_s=30, what="images in the new store")
    assert absent(producer) == len(MEDIA), "its tower ran again"
