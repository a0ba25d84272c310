"""A model with several cache groups under vLLM's own scheduler, around our connector.

The "model" computes KV that is a pure function of the tokens so far. Before a request's tokens are computed,
every byte that their attention would read is checked; a block that vLLM gives away is overwritten at once.
With `states` its windowed layers keep a recurrent state instead, in the blocks that vLLM's runners choose
(`preprocess_mamba` in vllm/v1/worker/mamba_utils.py).
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from collaborators import recorded
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
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
    MambaSpec,
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
STATES: Any = {"shapes": ((3, 8), (2, 4)), "dtypes": (torch.float32, torch.float32)}
STATE_BYTES = 4 * (3 * 8 + 2 * 4)


class GroupCore:
    """One engine of `tp` ranks."""

    layers: Sequence[Sequence[int]] = (WINDOWED, FULL, ALSO_WINDOWED)
    """Of each group."""
    speculative: Any = None
    """vLLM's settings of a draft."""

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
        states: bool = False,
        backend: Backend | None = None,
        events: bool = False,
        hash_algo: str = "sha256",
        **fields: Any,
    ) -> None:
        """`hash_algo`: as the engine says; the rig's own prefix cache always has SHA-256."""
        self.hash_algo = hash_algo
        self.states, self.config = states, self._aligned(config, block_size) if states else config
        if events or self.speculative is not None:
            self.config = copy.copy(self.config)
            self.config.speculative_config = self.speculative
        if events:
            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.window, self.tp, self.block_size = window, tp, block_size
        self._state_blocks: dict[str, int] = {}
        """Request -> place of the block with its running state."""
        self.counts: dict[tuple[str, ...], float] = {}
        fields = {"save": "always", **fields}
        cache = self._cache(window, blocks)
        run = lambda extra: runtime(connect(), page_tokens=page_tokens, **fields)  # noqa: E731
        ours, self.ranks = self._config(), []
        with (
            mock.patch.object(kv_connector, "get_runtime", side_effect=run),
            mock.patch.object(tracked_requests, "kv_identity", return_value=(b"lm" * 16, {"model": "rig"})),
            mock.patch("vllm.distributed.get_tensor_model_parallel_world_size", return_value=tp),
            recorded(kv_connector, "KVScheduler") as halves,
            recorded(kv_connector, "KVWorker") as self.workers,
        ):
            self.connector = CornplugConnector(ours, KVConnectorRole.SCHEDULER, cache)
            self.half = halves[0] if halves else None
            for rank in range(tp):
                with mock.patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=rank):
                    worker = CornplugConnector(ours, KVConnectorRole.WORKER, cache)
                self.ranks.append(GroupRank(worker, ours, range(rank * HEADS // tp, (rank + 1) * HEADS // tp),
                                            blocks, block_size, backend or Backend(), states,
                                            self.layers))  # fmt: skip
        self.aggregator = KVOutputAggregator(tp)
        self.scheduler = Scheduler(
            self.config, cache, StructuredOutputManager(config), block_size=block_size, log_stats=False
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
        self.events: list[Any] = []
        """Of vLLM's and cornplug's, in order, where they are enabled."""
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: self.events.extend(batch.events)
        )
        self._made: dict[str, tuple[list[int], list[float]]] = {}

    @staticmethod
    def _aligned(config: Any, block_size: int) -> Any:
        """The flags of an engine that keeps states at the ends of its blocks."""
        found = copy.copy(config)
        found.cache_config = copy.copy(config.cache_config)
        found.cache_config.mamba_cache_mode = "align"
        found.cache_config.block_size = found.cache_config.mamba_block_size = block_size
        return found

    def _cache(self, window: int, blocks: int) -> KVCacheConfig:
        sizes: Any = {
            "block_size": self.block_size,
            "num_kv_heads": HEADS // self.tp,
            "head_size": DIM,
            "dtype": torch.float32,
        }
        kept: Any = SlidingWindowSpec(**sizes, sliding_window=window)
        if self.states:
            kept = MambaSpec(block_size=self.block_size, mamba_cache_mode="align", **STATES)
        kinds = zip(self.layers, (kept, FullAttentionSpec(**sizes), kept), strict=True)
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
            speculative_config=self.speculative,
            cache_config=SimpleNamespace(
                block_size=self.block_size,
                prefix_match_unit=None,
                prefix_caching_hash_algo=self.hash_algo,
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
            kv_events_config=self.config.kv_events_config,
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
        aggregated = self.aggregator.aggregate(outputs)
        assert aggregated is not None
        names, requests = list(moves.ends), self.scheduler.requests
        done = {name: moves.ends[name] >= requests[name].num_tokens for name in names}
        self.failed += len(aggregated.kv_connector_output.failed_recving or ())
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                [self._sampled(output, name) if done[name] else [] for name in names],
                kv_connector_output=aggregated.kv_connector_output,
            ),
        )

    def _sampled(self, output: Any, name: str) -> list[int]:
        """The tokens that a step of a request makes, whose prompt is computed."""
        return [7]

    def _moves(self, output: Any) -> Any:
        scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
        ends = {name: requests[name].num_computed_tokens for name in scheduled}
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in scheduled}
        bases = {name: self._base(requests[name]) for name in scheduled}
        starts = {name: ends[name] - count for name, count in scheduled.items()}
        windows = [self.window, 0, self.window]
        over = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        for name in over.union(output.scheduled_cached_reqs.resumed_req_ids):
            self._state_blocks.pop(name, None)
        before = {
            name: self._state_blocks.get(name, (start - 1) // self.block_size)
            for name, start in starts.items()
        }
        self._state_blocks |= {name: (end - 1) // self.block_size for name, end in ends.items()}
        return SimpleNamespace(
            ends=ends, tables=tables, bases=bases, starts=starts, windows=windows, states=before,
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
            rank.connector.unregister_kv_caches()  # waits for its copies

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
        states: bool,
        layers: Sequence[Sequence[int]],
    ) -> None:
        self.connector, self.heads, self.size, self.layers = connector, heads, size, layers
        self.states = {*WINDOWED, *ALSO_WINDOWED} if states else set()
        self.caches = {
            f"model.layers.{i}.attn": self._memory(i, blocks) for i in sorted(itertools.chain(*layers))
        }
        config.compilation_config.static_forward_context.update(
            {name: _layer(cache, backend) for name, cache in self.caches.items()}
        )
        connector.register_kv_caches(dict(reversed(self.caches.items())))

    def _memory(self, layer: int, blocks: int) -> torch.Tensor:
        if layer in self.states:
            return torch.full((blocks, 1, 1, STATE_BYTES), int(POISON), dtype=torch.int8)
        return torch.full((blocks, len(self.heads), self.size, 2 * DIM), POISON)

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
        groups = zip(moves.tables[name], self.layers, moves.windows, strict=True)
        for table, layers, window in groups:
            read = range(max(0, start - window + 1) if window else 0, start)
            for layer in layers:
                cache = self.caches[f"model.layers.{layer}.attn"]
                if layer in self.states:
                    self._advance(cache, table, moves, name, layer)
                    continue
                there = cache[self._places(table, read)]
                assert torch.equal(there, self._values(base, layer, read)), (name, layer, read)
                written = range(start, min(end, len(base)))
                cache[self._places(table, written)] = self._values(base, layer, written)

    def _advance(self, cache: torch.Tensor, table: Sequence[int], moves: Any, name: str, layer: int) -> None:
        """Compute a state at the end of this step from that at its start."""
        start, end, base = moves.starts[name], moves.ends[name], moves.bases[name]
        if start:
            there = cache[table[moves.states[name]]]
            assert torch.equal(there, self._state(base, layer, start)), (name, layer, start)
        block = table[(end - 1) // self.size]
        assert block, "the block that stands for none"
        cache[block] = self._state(base, layer, min(end, len(base)))

    def _state(self, base: Sequence[float], layer: int, tokens: int) -> torch.Tensor:
        """A layer's state behind so many tokens, as the bytes of a block."""
        where = torch.arange(STATE_BYTES // 4, dtype=torch.float32) + layer * 64 + self.heads.start * 512
        return (where * 1024 + base[tokens - 1]).view(torch.int8)[None, None]

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


def _layer(cache: torch.Tensor, backend: Backend) -> Any:
    """What vLLM's forward context has of a layer."""
    if cache.dtype != torch.int8:
        return SimpleNamespace(impl=backend)
    states, at = [], 0
    for shape, dtype in zip(STATES["shapes"], STATES["dtypes"], strict=True):
        size = math.prod(shape) * dtype.itemsize
        states.append(cache[:, 0, 0, at : at + size].view(dtype).view(-1, *shape))
        at += size
    return SimpleNamespace(kv_cache=tuple(states))


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of up to 300 tokens that share prefixes of many lengths."""
    chance, made = random.Random(seed), [[1] * 40]
    for number in range(count):
        kept = chance.choice(made)[: chance.choice([0, 32, 40, 64, 100, 128, 160, 192])]
        made.append([*kept, *[number + 2] * chance.randint(20, 110)])
    return made[1:]
