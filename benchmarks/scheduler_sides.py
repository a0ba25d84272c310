"""vLLM's own scheduler with and without cornplug's connector, step by step in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from cornplug.metrics import Tally
from cornplug.vllm_connector.cpu_use import IdleBackoff
from cornplug.vllm_connector.kv.scheduler import KVScheduler
from cornplug.vllm_connector.kv_connector import CornplugConnector
from devkit import checkpoints

_BLOCK_TOKENS: Final = 16
_BLOCKS: Final = 8192


class Side:
    """vLLM's scheduler with some running requests; `kv` is cornplug's half, None for the stock side."""

    def __init__(
        self, config: Any, running: int, kv: KVScheduler | None, acks_of: Callable[[Any], Any]
    ) -> None:
        import torch

        spec = FullAttentionSpec(block_size=_BLOCK_TOKENS, num_kv_heads=8, head_size=8, dtype=torch.bfloat16)
        cache = KVCacheConfig(_BLOCKS, [], [KVCacheGroupSpec(["model.layers.0.attn"], spec)])
        self._scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=_BLOCK_TOKENS, log_stats=False
        )
        self._acks_of, self._acks = acks_of, None
        if kv is not None:
            connector: Any = CornplugConnector.__new__(CornplugConnector)
            connector._scheduler, connector._worker, connector._tally = kv, None, Tally()
            connector._kv_cache_config = cache
            connector._connector_metadata, connector._idle_backoff = None, IdleBackoff()
            connector._detached_blocks, connector._unsent_loads = {}, []
            self._scheduler.connector = connector
            connector.bind_kv_cache_manager(self._scheduler.kv_cache_manager)
        hasher = get_request_block_hasher(_BLOCK_TOKENS, sha256)
        params = SamplingParams(max_tokens=1 << 10, ignore_eos=True)
        for i in range(running):
            # The requests differ, and reach the end of a page in different steps.
            tokens = [(31 * n + 7919 * i + 3) % 128_000 for n in range(1 + i % 64)]
            self._scheduler.add_request(Request(f"side-{i}", tokens, params, None, block_hasher=hasher))

    def step(self) -> tuple[float, float]:
        """Schedule a step and take its output. Returns the thread's CPU seconds, and those on the clock."""
        began, cpu = time.perf_counter(), time.thread_time()
        output = self._scheduler.schedule()
        took, used = time.perf_counter() - began, time.thread_time() - cpu
        names = list(output.num_scheduled_tokens)
        answer = KVConnectorOutput(kv_connector_worker_meta=self._acks)
        meta = output.kv_connector_metadata
        self._acks = self._acks_of(meta) if meta is not None else None
        done = ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, [[7] for _ in names],
            kv_connector_output=answer if meta is not None else None,
        )  # fmt: skip
        began, cpu = time.perf_counter(), time.thread_time()
        self._scheduler.update_from_output(output, done)
        return used + time.thread_time() - cpu, took + time.perf_counter() - began


def sides(
    running: int, steps: int, pause_s: float, kv: KVScheduler, acks_of: Callable[[Any], Any]
) -> dict[str, list[tuple[float, float]]]:
    """(CPU, clock) seconds of each step of "stock" and "cornplug", which take turns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="cp-")))
        args = EngineArgs(
            model=str(checkpoints.qwen2_text(folder / "t")), dtype="float32", max_model_len=1024,
            block_size=_BLOCK_TOKENS, max_num_seqs=running, max_num_batched_tokens=32768,
            enable_prefix_caching=True, async_scheduling=False, kv_cache_memory_bytes=1 << 20,
        )  # fmt: skip
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = _BLOCKS
        init_none_hash(sha256)
        both = {
            "stock": Side(config, running, None, lambda meta: None),
            "cornplug": Side(config, running, kv, acks_of),
        }
        for side in both.values():
            # Prompts, and the step in which every request is looked at.
            side.step()
            side.step()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
        for _ in range(steps):
            for name, side in both.items():
                found[name].append(side.step())
                time.sleep(pause_s)
    return found
