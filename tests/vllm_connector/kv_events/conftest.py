"""Engines with KV events under vLLM's own scheduler, over one store in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from cornplug.vllm_connector.kv import page_events
from devkit import checkpoints

from ..kv.core_rig import BLOCKS, Clock, Core
from ..rig import Engine


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Flags of an engine with KV events. One for all: vLLM resolves it slowly."""
    model = checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "t")
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=1024, block_size=16, max_num_batched_tokens=1024,
        enable_prefix_caching=True, async_scheduling=False, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    # vLLM looks at the model's class in a process of its own, which imports all of it.
    with mock.patch.object(registry, "_run_in_subprocess", side_effect=lambda look: look()):
        config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


class Announcing(Core):
    """An engine, and what a router knows of it."""

    def __init__(self, config: Any, engine: Engine, clock: Clock) -> None:
        super().__init__(config, engine, clock)
        self.events: list[Any] = []
        publisher = SimpleNamespace(publish=lambda batch: self.events.extend(batch.events))
        self.scheduler.kv_event_publisher = publisher

    def stored(self, medium: str = "CPU") -> list[BlockStored]:
        return [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]

    def known(self, medium: str = "CPU") -> set[Any]:
        """Blocks that a router believes on this medium."""
        known: set[Any] = set()
        for event in self.events:
            if getattr(event, "medium", None) == medium:
                if isinstance(event, BlockStored):
                    known.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    assert known >= set(event.block_hashes), "removed, and not stored before"
                    known.difference_update(event.block_hashes)
        return known

    def rest(self, seconds: float = 0.1) -> None:
        """Let time pass, with steps as of an engine that answers other requests."""
        for _ in range(4):
            self.clock.now += seconds
            self.step()

    def hashes(self, tokens: Sequence[int], count: int) -> list[Any]:
        """vLLM's hashes of a prompt's first blocks."""
        return list(self.add_unscheduled(tokens).block_hashes[:count])

    def add_unscheduled(self, tokens: Sequence[int]) -> Any:
        scheduler, self.scheduler = self.scheduler, mock.Mock()
        try:
            return self.add(tokens)
        finally:
            self.scheduler = scheduler


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(page_events, "time", clock)
    return clock


@pytest.fixture
def announcing(config: Any, engine: Callable[..., Engine], clock: Clock) -> Callable[..., Announcing]:
    def make(**options: Any) -> Announcing:
        own = copy.copy(config)
        own.cache_config = copy.copy(config.cache_config)
        own.cache_config.block_size = options.get("block_size", 16)
        return Announcing(own, engine(blocks=BLOCKS, **{"events": True, **options}), clock)

    return make
