"""A model with several cache groups under vLLM's own scheduler, around our connector.

The "model" computes KV that is a pure function of the tokens so far. Before a request's tokens are computed,
every byte that their attention would read is checked; a block that vLLM gives away is overwritten at once.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from cornplug.store.base import Store
from cornplug.vllm_connector import kv_connector
from cornplug.vllm_connector.kv import tracked_requests
from cornplug.vllm_connector.kv_connector import CornplugConnector

from ..rig import DIM, HEADS, POISON, Backend, runtime

LAYERS = 4
WINDOWED, FULL, ALSO_WINDOWED = [0, 3], [1], [2]
"""Layers of the cache groups, in vLLM's order."""


class GroupCore:
    """One engine of `tp` ranks."""

    def __init__(
        self,
        config: Any,
        connect: Callable[[], Store],
        *,
        window: int = 48,
        tp: int = 1,
        block_size: int = 16,
        blocks: int = 96,
        page_tokens: int = 32,
        backend: Backend | None = None,
        **fields: Any,
    ) -> None:
        self.config, self.window, self.tp, self.block_size = config, window, tp, block_size
        self.counts: dict[tuple[str, ...], float] = {}
        fields = {"save": "always", **fields}
        cache = self._cache(window, blocks)
        run = lambda extra: runtime(connect(), page_tokens=page_tokens, **fields)  # noqa: E731
        ours, self.ranks = self._config(), []
        with (
            mock.patch.object(kv_connector, "runtime", side_effect=run),
            mock.patch.object(tracked_requests, "kv_identity", return_value=(b"lm" * 16, {"model": "rig"})),
            mock.patch("vllm.distributed.get_tensor_model_parallel_world_size", return_value=tp),
        ):
            self.connector = CornplugConnector(ours, KVConnectorRole.SCHEDULER, cache)
            for rank in range(tp):
                with mock.patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=rank):
                    worker = CornplugConnector(ours, KVConnectorRole.WORKER, cache)
                self.ranks.append(GroupRank(worker, ours, range(rank * HEADS // tp, (rank + 1) * HEADS // tp),
                                            blocks, block_size, backend or Backend()))  # fmt: skip
        self.aggregator = KVOutputAggregator(tp)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=block_size, log_stats=False
        )
        self.scheduler.connector = self.connector
        take = self.connector.get_kv_connector_stats
        self.connector.get_kv_connector_stats = lambda: self._count(take())  # type: ignore[method-assign]
        self.connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        give = self.pool.get_new_blocks
        self.pool.get_new_blocks = lambda number: self._given(give(number))
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.requests: list[Request] = []
        self.failed = 0
        self._made: dict[str, tuple[list[int], list[float]]] = {}

    def _cache(self, window: int, blocks: int) -> KVCacheConfig:
        sizes: Any = {
            "block_size": self.block_size,
            "num_kv_heads": HEADS // self.tp,
            "head_size": DIM,
            "dtype": torch.float32,
        }
        kinds = [
            (WINDOWED, SlidingWindowSpec(**sizes, sliding_window=window)),
            (FULL, FullAttentionSpec(**sizes)),
            (ALSO_WINDOWED, SlidingWindowSpec(**sizes, sliding_window=window)),
        ]
        groups = [
            KVCacheGroupSpec([f"model.layers.{i}.attn" for i in layers], spec) for layers, spec in kinds
        ]
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    def _config(self) -> Any:
        return SimpleNamespace(
            kv_transfer_config=KVTransferConfig(
                kv_connector="CornplugConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
            ),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: HEADS, get_total_num_hidden_layers=lambda: LAYERS
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=1,
                tensor_parallel_size=self.tp,
            ),
            speculative_config=None,
            cache_config=SimpleNamespace(block_size=self.block_size),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )

    def _count(self, stats: Any) -> None:
        for metric, rows in (stats.data if stats is not None else {}).items():
            for labels, values in rows:
                key = (metric.removeprefix("cornplug_").removesuffix("_total"), *labels[1:])
                self.counts[key] = self.counts.get(key, 0) + sum(values)

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _given(self, blocks: list[Any]) -> list[Any]:
        for rank in self.ranks:
            for cache in rank.caches.values():
                cache[[block.block_id for block in blocks]] = POISON
        return blocks

    def add(self, tokens: Sequence[int], max_tokens: int = 1, **fields: Any) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        name = f"r{len(self.requests)}"
        request = Request(name, list(tokens), params, None, block_hasher=self.hasher, **fields)
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        output = self.scheduler.schedule()
        moves = self._moves(output)
        outputs: Any = [SimpleNamespace(kv_connector_output=rank.execute(moves)) for rank in self.ranks]
        answer = self.aggregator.aggregate(outputs)
        assert answer is not None
        names, requests = list(moves.ends), self.scheduler.requests
        done = {name: moves.ends[name] >= requests[name].num_tokens for name in names}
        self.failed += len(answer.kv_connector_output.failed_recving or ())
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                [[7] if done[name] else [] for name in names],
                kv_connector_output=answer.kv_connector_output,
            ),
        )

    def _moves(self, output: Any) -> Any:
        scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
        ends = {name: requests[name].num_computed_tokens for name in scheduled}
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in scheduled}
        bases = {name: self._base(requests[name]) for name in scheduled}
        starts = {name: ends[name] - count for name, count in scheduled.items()}
        windows = [self.window, 0, self.window]
        return SimpleNamespace(
            ends=ends, tables=tables, bases=bases, starts=starts, windows=windows,
            meta=output.kv_connector_metadata,
        )  # fmt: skip

    def _base(self, request: Request) -> list[float]:
        """What the "model" makes of each token and all before it; below 1000, so exact in float32."""
        state, made = self._made.setdefault(request.request_id, ([0], []))
        for token in request.all_token_ids[len(made) :]:
            state[0] = zlib.crc32(token.to_bytes(4, "big"), state[0])
            made.append(float(state[0] % 1000))
        return made

    def answer(self, tokens: Sequence[int], max_tokens: int = 1, **fields: Any) -> Request:
        """A request until it is finished."""
        request = self.add(tokens, max_tokens, **fields)
        while not request.is_finished():
            self.step()
            self.drain()
        return request

    def settle(self) -> None:
        for _ in range(100_000):
            if not self.scheduler.has_requests():
                return
            self.step()
            self.drain()
        raise AssertionError("the engine stays awake")

    def drain(self) -> None:
        for rank in self.ranks:
            rank.connector._worker.drain()  # type: ignore[union-attr]

    def loaded(self) -> float:
        return self.counts.get(("saved_tokens",), 0)

    def saved(self, outcome: str = "stored") -> float:
        return self.counts.get(("saves", "kv_page", outcome), 0)

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.connector.shutdown()


class GroupRank:
    """One worker process: its connector, and a cache a layer."""

    def __init__(
        self,
        connector: CornplugConnector,
        config: Any,
        heads: range,
        blocks: int,
        size: int,
        backend: Backend,
    ) -> None:
        self.connector, self.heads, self.size = connector, heads, size
        self.caches = {
            f"model.layers.{i}.attn": torch.full((blocks, len(heads), size, 2 * DIM), POISON)
            for i in range(LAYERS)
        }
        config.compilation_config.static_forward_context.update(
            {name: SimpleNamespace(impl=backend) for name in self.caches}
        )
        connector.register_kv_caches(dict(reversed(self.caches.items())))

    def execute(self, moves: Any) -> KVConnectorOutput:
        connector = self.connector
        connector.bind_connector_metadata(moves.meta)
        connector.handle_preemptions(moves.meta)
        for name in moves.ends:
            self._compute(moves, name)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    def _compute(self, moves: Any, name: str) -> None:
        start, end, base = moves.starts[name], moves.ends[name], moves.bases[name]
        groups = zip(moves.tables[name], (WINDOWED, FULL, ALSO_WINDOWED), moves.windows, strict=True)
        for table, layers, window in groups:
            read = range(max(0, start - window + 1) if window else 0, start)
            for layer in layers:
                cache = self.caches[f"model.layers.{layer}.attn"]
                there = cache[self._places(table, read)]
                assert torch.equal(there, self._values(base, layer, read)), (name, layer, read)
                written = range(start, min(end, len(base)))
                cache[self._places(table, written)] = self._values(base, layer, written)

    def _places(self, table: Sequence[int], positions: range) -> Any:
        blocks = [table[position // self.size] for position in positions]
        assert 0 not in blocks, "the block that stands for none"
        return (
            torch.tensor(blocks, dtype=torch.int64),
            slice(None),
            torch.tensor(list(positions), dtype=torch.int64) % self.size,
        )

    def _values(self, base: Sequence[float], layer: int, positions: range) -> torch.Tensor:
        """KV of these tokens, shape (tokens, heads, K before V)."""
        where = torch.arange(2 * HEADS * DIM, dtype=torch.float32).reshape(HEADS, 2 * DIM) + layer * 64
        tokens = torch.tensor([base[position] for position in positions])[:, None, None]
        return where[self.heads.start : self.heads.stop] * 1024 + tokens


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of up to 300 tokens that share prefixes of many lengths."""
    chance, made = random.Random(seed), [[1] * 40]
    for number in range(count):
        kept = chance.choice(made)[: chance.choice([0, 32, 40, 64, 100, 128, 160, 192])]
        made.append([*kept, *[number + 2] * chance.randint(20, 110)])
    return made[1:]
