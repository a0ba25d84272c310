"""Real engines for script/test: every promise once, on as few engine starts as possible.

Seven vLLM servers (two of them 0.33 on runner V2 with a GPU's KV layout) and two SGLang servers start, each
once per session. The files' names give their order: the last engines of one file are stopped by the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from integration.stack import ASKS, Stack, always_sharing, forget_prefixes, services, settle_saves

from devkit import checkpoints
from devkit.engines import Answer, EngineServer, VllmServer
from devkit.processes import at_once, together
from devkit.sglang_engine import SglangServer

CHUNKED = ("--block-size", "32", "--max-num-batched-tokens", "256")
"""Small blocks and chunked prefill on vLLM."""
CHUNKED_SGLANG = ("--chunked-prefill-size", "256")
CALM = ("--cornplug-encoder-deadline", "60")
"""A busy machine is no reason for a miss."""


@pytest.fixture(scope="session", autouse=True)
def always_share(own_settings: Path) -> Iterator[None]:
    with always_sharing() as patch:
        patch.setenv("CORNPLUG_STORE_SECRET_FILE", str(own_settings / "secret"))
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Two Qwen2-VL checkpoints with a bit-identical vision tower and different language models."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "q": checkpoints.qwen2_vl(folder / "q", tower_seed=0, llm_seed=1),
        "r": checkpoints.qwen2_vl(folder / "r", tower_seed=0, llm_seed=2, layers=3),
    }


@pytest.fixture(scope="session")
def stock(
    models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Answer]:
    """Answers of stock engines to every ask, by (model, index); "sglang:q" is SGLang's."""
    folder = tmp_path_factory.mktemp("stock")
    servers: dict[str, EngineServer] = {
        "q": VllmServer(models["q"], *CHUNKED, log=folder / "q.log"),
        "r": VllmServer(models["r"], log=folder / "r.log"),
        "sglang:q": SglangServer(models["q"], *CHUNKED_SGLANG, log=folder / "sglang-q.log"),
    }
    with together(*servers.values()):

        def answers(name: str) -> dict[tuple[str, int], Answer]:
            return {(name, i): ask.put(servers[name]) for i, ask in enumerate(ASKS)}

        found: dict[tuple[str, int], Answer] = {}
        for part in at_once(*(lambda name=name: answers(name) for name in servers)):
            found |= part
        return found


@pytest.fixture(scope="session")
def stack(
    models: Mapping[str, Path],
    stock: dict[tuple[str, int], Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """A store and an encoder service."""
    with services(tmp_path_factory.mktemp("stack"), models, stock) as stack:
        stack.encoder.start()
        yield stack


@pytest.fixture(scope="session")
def apps(stack: Stack) -> Stack:
    """The stack with three engines that share: a (vLLM, q), b (vLLM, r), s (SGLang, q)."""
    stack.start(
        a=stack.vllm("a", "q", *CHUNKED, *CALM),
        b=stack.vllm("b", "r", *CALM),
        s=stack.sglang("s", "q", *CHUNKED_SGLANG, *CALM),
    )
    return stack


def forget(stack: Stack, engine: EngineServer) -> None:
    """Wait until the idle engine has saved its prompts, then empty its own prefix cache."""
    assert stack.store is not None
    settle_saves(engine, stack.store)
    forget_prefixes(engine)


def shareable(answer: Answer) -> int:
    """Number of prompt tokens in whole pages that another engine can have stored."""
    return (answer.prompt_tokens - 1) // 64 * 64
