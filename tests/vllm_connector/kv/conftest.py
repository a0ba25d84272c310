"""Engines of one cache group under vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from cornplug.vllm_connector.kv import idle_saves
from devkit import checkpoints

from ..rig import Engine
from .core_rig import BLOCKS, Clock, Core


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Flags of an engine of 16-token blocks. One for all: vLLM takes seconds to resolve it."""
    model = checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "t")
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=1024, block_size=16, max_num_batched_tokens=1024,
        enable_prefix_caching=True, async_scheduling=False, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


@pytest.fixture
def core(config: Any, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Core]:
    clock = Clock()
    monkeypatch.setattr(idle_saves, "time", clock)

    def make(**options: Any) -> Core:
        return Core(config, engine(blocks=BLOCKS, **{"save": "second", **options}), clock)

    return make
