"""An embedding that is damaged after vLLM's scheduler half has leased it: the engine's tower encodes the
image in the step for which the embedding was promised, on every rank, and the engine answers as it did
before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.faults import flip_everything
from integration.stack import Stack, count, forget_prefixes, same_answers, services, settle_saves

from devkit import checkpoints
from devkit.engines import Answer, EngineServer, data_url, photos
from devkit.vllm_beds import next_vllm

*IMAGES, OTHER = ({"type": "image_url", "image_url": {"url": data_url(photos()[i].data)}} for i in range(3))
TEXT = {"type": "text", "text": "What is shown? Name the source, and keep to the question."}


def ask(server: EngineServer, *content: dict[str, Any]) -> Answer:
    return server.chat([{"role": "user", "content": [*content, TEXT]}], max_tokens=6, top_logprobs=5)


@contextmanager
def started(folder: Path, bed: str, *flags: str) -> Iterator[tuple[Stack, EngineServer]]:
    """A store and one engine, without an encoder service: what the store lacks, the engine encodes."""
    command = next_vllm() if bed.startswith("next-") else None
    model = checkpoints.qwen2_vl(folder / "model")
    with services(folder, {"m": model}, {}) as stack:
        where: dict[str, Any] = {"bed": bed.removeprefix("next-"), "command": command}
        # Without KV pages, each request needs its embeddings.
        env = {
            "CORNPLUG_ENGINE_SHARE_KV": "false",
            "CORNPLUG_STORE_LOAD_WHEN": "always",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # A small machine has no cores of its own for each rank.
        }
        engine = stack.vllm("engine", "m", *flags, env=env, **where)
        stack.start(engine=engine)
        yield stack, engine


@pytest.mark.more
@pytest.mark.parametrize(
    ("bed", "flags"), [("v1-one", ()), ("v1", ("--tensor-parallel-size", "2")), ("next-v2-gpu", ())]
)
def test_damaged_embedding_is_encoded_in_the_step_that_expected_it(
    bed: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with started(tmp_path, bed, *flags) as (stack, engine):
        assert stack.store is not None
        before = ask(engine, *IMAGES)
        ask(engine, OTHER)
        settle_saves(engine, stack.store)
        # Damaged entries are deleted when the step has ended, so the next request encodes and saves again.
        for damaged, expected in ((False, (2, 0)), (True, (0, 2)), (False, (0, 0)), (False, (2, 0))):
            forget_prefixes(engine)
            httpx.post(f"{engine.url}/reset_encoder_cache", trust_env=False, timeout=30).raise_for_status()
            ask(engine, OTHER)  # vLLM does not report the reset; the first encoded item shows it
            if damaged:
                flip_everything(stack.store.pid)
            hits = count(engine, "hits_total", kind="embedding", source="store")
            lost = count(engine, "misses_total", kind="embedding", reason="corrupt")
            same_answers([ask(engine, *IMAGES)], [before])
            settle_saves(engine, stack.store)
            found = (
                count(engine, "hits_total", kind="embedding", source="store") - hits,
                count(engine, "misses_total", kind="embedding", reason="corrupt") - lost,
            )
            assert found == expected
