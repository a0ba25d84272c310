"""Engines of a model with windows, over one store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from cornplug.store.memory import MemoryStore
from devkit import checkpoints

from .group_rig import GroupCore


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Flags of an engine whose steps have at most 64 tokens. One for all: vLLM resolves it slowly."""
    model = checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "t")
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=1024, block_size=16, max_num_batched_tokens=64,
        enable_prefix_caching=True, async_scheduling=False, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    # vLLM looks at the model's class in a process of its own, which imports all of it.
    with mock.patch.object(registry, "_run_in_subprocess", side_effect=lambda look: look()):
        config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = 96
    return config


@pytest.fixture
def cores(config: Any, store: MemoryStore) -> Iterator[Callable[..., GroupCore]]:
    made: list[GroupCore] = []

    def make(**options: Any) -> GroupCore:
        made.append(GroupCore(config, options.pop("connect", store.connect), **options))
        return made[-1]

    yield make
    for core in made:
        core.close()
