"""A vLLM engine's loop around our KV connector, without the engine: what `scheduler.py` and
`kv_connector_model_runner_mixin.py` of vLLM 0.32 call, in their order, with their assertions.

The "model" computes KV that is a pure function of the tokens so far, so that every byte in a
rank's cache can be checked, whoever put it there.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from collaborators import kept, recorded
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu import kv_connector as second_runner

from cornplug.config import Config, EngineConfig, StoreConfig
from cornplug.metrics import Tally
from cornplug.store.base import Store
from cornplug.vllm_connector import kv_connector
from cornplug.vllm_connector.kv import group_worker, tracked_requests
from cornplug.vllm_connector.kv import scheduler as kv_scheduler
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest
from cornplug.vllm_connector.kv_connector import CornplugConnector
from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes

from .late_device import LateDevice

HEADS, LAYERS, DIM = 4, 4, 8
POISON = -7.0
"""In every block that was given away: reading one after that is noticed."""
SECRET = bytes(range(32))


def runtime(
    store: Store,
    *,
    page_tokens: int = 32,
    app: str = "test",
    deadline_s: float = 0.1,
    load_when: Any = "always",
    save: Any = "always",
    **fields: Any,
) -> Any:
    """What `cornplug.vllm_connector.runtime.runtime` gives, over any store; each page is saved at once."""
    config = Config(
        store=StoreConfig(deadline_s=deadline_s, load_when=load_when),
        engine=EngineConfig(app=app, page_tokens=page_tokens, save=save, **fields),
    )
    return SimpleNamespace(
        config=config,
        app=app,
        secret=SECRET,
        store=store,
        deadline_s=config.store.deadline_s,
        background_timeout_s=config.store.background_timeout_s,
    )


def tracked_of(engine: Engine, request_id: str) -> TrackedRequest:
    """What the scheduler half knows of a request."""
    found = kept(engine.half, TrackedRequest)
    return next(tracked for tracked in found if tracked.request.request_id == request_id)


@dataclass(eq=False)
class Request:
    """What the connector sees of vLLM's Request."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    resumable: bool = False
    status: str = "waiting"
    num_computed_tokens: int = 0
    local_tokens: int = 0
    """Tokens that the engine's own prefix cache holds for it."""
    external_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.status == "finished"


def base_value(tokens: Sequence[int], position: int) -> float:
    """What the "model" makes of the tokens up to a position; below 1000, so exact in float32."""
    return float(zlib.crc32(repr(list(tokens[: position + 1])).encode()) % 1000)


def expected(tokens: Sequence[int], position: int, heads: range, layers: range) -> torch.Tensor:
    """KV of one token, shape (layers, 2, heads, DIM)."""
    shape = LAYERS + 1, 2, HEADS, DIM  # one for a draft model
    where = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    part = where[layers.start : layers.stop, :, heads.start : heads.stop]
    return part * 1024 + base_value(tokens, position)


class Backend:
    """A token-major attention backend: K and V side by side, as FlashAttention keeps them."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        size, dim = cache.shape[2], key.shape[2]
        cache[slots // size, :, slots % size, :dim] = key
        cache[slots // size, :, slots % size, dim:] = value


class LatentBackend(Backend):
    """One of MLA, whose layer gives it caches without heads."""

    def do_kv_cache_update(  # type: ignore[override]
        self,
        compressed: torch.Tensor,
        rotary: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        size = cache.shape[1]
        cache[slots // size, slots % size] = torch.cat([compressed, rotary.squeeze(1)], dim=-1)


def mla_layer(impl: Any, kv_lora_rank: int, qk_rope_head_dim: int) -> Any:
    """vLLM's layer, as far as the write of its cache reads it."""
    layer: Any = object.__new__(MLAAttention)
    sizes = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    layer.__dict__.update(sizes, impl=impl, kv_cache_dtype="auto", _k_scale=torch.tensor(1.0))
    return layer


class BrokenBackend(Backend):
    """Keeps no V: a cache that cannot be mapped."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        cache[slots // cache.shape[2], :, slots % cache.shape[2], : key.shape[2]] = key


@dataclass
class Rank:
    """One worker process: its connector and its caches, (blocks, heads, block_size, planes * dim)."""

    connector: CornplugConnector
    heads: range
    layers: range
    caches: dict[str, torch.Tensor]
    slots: int
    """Of one block of the caches: the engine's block size, or a part of it."""
    active: second_runner.ActiveKVConnector | None = None
    worker: Any = None
    """The connector's worker half, until an error replaces it."""
    pages: Any = None
    """Its `RankPages`."""
    arena: Any = None
    """Its `LateArena`, if its accelerator copies the store's memory by itself."""

    def place(self, request: Request, block_size: int, position: int) -> tuple[int, int]:
        """(block of the caches, slot in it)"""
        block, slot = request.blocks[position // block_size], position % block_size
        return block * (block_size // self.slots) + slot // self.slots, slot % self.slots

    def compute(self, request: Request, block_size: int, start: int, end: int) -> None:
        for position in range(start, end):
            block, slot = self.place(request, block_size, position)
            values = expected(request.all_token_ids, position, self.heads, self.layers)
            for cache, planes in zip(self.caches.values(), values, strict=True):
                cache[block, :, slot] = self._side_by_side(planes)

    def check(self, request: Request, block_size: int, end: int) -> None:
        """Every byte of the first `end` tokens is what the model would have computed."""
        for position in range(end):
            block, slot = self.place(request, block_size, position)
            values = expected(request.all_token_ids, position, self.heads, self.layers)
            for cache, planes in zip(self.caches.values(), values, strict=True):
                theirs = self._side_by_side(planes)
                assert torch.equal(cache[block, :, slot], theirs), (request.request_id, position)

    def _side_by_side(self, planes: torch.Tensor) -> torch.Tensor:
        """K before V, shape (heads, 2 * DIM); of latents there is one plane."""
        return torch.cat(planes.unbind(), dim=-1)[:, : next(iter(self.caches.values())).shape[3]]


class Pool(list[int]):
    """The engine's free blocks, and what the connector calls of vLLM's BlockPool.

    A block of a finished request keeps its bytes until it is given to another request.
    """

    enable_caching = False
    hash_block_size = 1 << 30
    """No block is in KV events."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))
        self.blocks = [SimpleNamespace(block_id=block, is_null=False) for block in range(count)]
        self.watchers: dict[int, Callable[[Any], None]] = {}
        self.overwrite: Callable[[list[int]], None] = lambda blocks: None

    def pop(self, index: Any = -1) -> int:
        block = super().pop(index)
        self.overwrite([block])
        if block in self.watchers:
            self.watchers.pop(block)(self.blocks[block])
        return block

    def touch(self, blocks: Iterable[Any]) -> None:
        assert not any(block.block_id in self for block in blocks)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        self.watchers |= {block.block_id: on_reuse for block in blocks}


_PARTS: Final = {
    "half": (kv_connector, "KVScheduler"),
    "tally": (kv_connector, "Tally"),
    "costs": (kv_scheduler, "LoadCosts"),
    "offers": (kv_scheduler, "LoadOffers"),
    "saves": (kv_scheduler, "PageSaves"),
    "idle": (kv_scheduler, "IdleSaves"),
    "identity": (tracked_requests, "CurrentIdentity"),
    "adapters": (tracked_requests, "BackgroundLoraDigests"),
}
"""Attribute of `Engine` -> class of which its connector makes one object."""


class Engine:
    """One engine of `tp` x `pp` ranks. `connect` gives each process its store connection."""

    half: Any
    tally: Tally
    costs: Any
    offers: Any
    saves: Any
    idle: Any
    identity: Any
    adapters: Any

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        tp: int = 1,
        pp: int = 1,
        block_size: int = 16,
        page_tokens: int = 32,
        blocks: int = 64,
        backends: Sequence[Backend] | None = None,
        identity: Callable[..., Any] = lambda config: (b"lm" * 16, {"model": "rig"}),
        policy: str = "recompute",
        context_parallel: int = 1,
        extra_layers: int = 0,
        draft: int = 0,
        kernel_block: int = 0,
        accelerator: bool | str = False,
        second_runner: bool = False,
        latent: bool = False,
        events: bool = False,
        hash_algo: str = "sha256",
        ranges: Callable[[], Any] | None = None,
        **fields: Any,
    ) -> None:
        """`extra_layers`: of which only the workers' plans know. `draft`: layers of a draft model, which vLLM
        numbers from 0 again. `kernel_block`: the caches are in smaller blocks than the engine counts.
        `accelerator`: the workers copy as on one, with copies that arrive late; "arena": also to and from the
        store's memory by themselves. `second_runner`: vLLM's V2
        model runner calls the workers, the default on a GPU. `latent`: the model has MLA. `events`: KV
        events are enabled. `hash_algo`: that of the engine's own prefix cache. `ranges`: makes the memory
        that is registered with an accelerator."""
        self.second_runner, self.latent, self.events = second_runner, latent, events
        self.hash_algo, self.ranges = hash_algo, ranges
        self.block_size, self.tp, self.pp, self.draft = block_size, tp, pp, draft
        self.kernel_block, self.accelerator = kernel_block or block_size, accelerator
        self.free_blocks = Pool(blocks)
        self.requests: dict[str, Request] = {}
        self.preempted: set[str] = set()
        self.held_steps: list[Any] = []
        self._identity = identity
        self._run: Callable[[], Any] = lambda: runtime(connect(), page_tokens=page_tokens, **fields)
        config = self._config(policy, context_parallel)
        with self._patched(0), ExitStack() as stack:
            made = {name: stack.enter_context(recorded(*part)) for name, part in _PARTS.items()}
            self.connector = self._make_connector(
                config, KVConnectorRole.SCHEDULER, self.cache_config(range(LAYERS), blocks)
            )
        for name, objects in made.items():
            setattr(self, name, objects[-1] if objects else None)
        manager = SimpleNamespace(
            block_pool=self.free_blocks,
            get_blocks=lambda request_id: SimpleNamespace(
                blocks=([self.free_blocks.blocks[block] for block in self.requests[request_id].blocks],)
            ),
        )
        self.connector.bind_kv_cache_manager(manager)
        self.ranks = []
        for stage in range(pp):
            for shard in range(tp):
                plain = LatentBackend() if latent else Backend()
                backend = backends[stage * tp + shard] if backends else plain
                self.ranks.append(self._rank(config, stage, shard, blocks, backend, extra_layers))
        self.free_blocks.overwrite = self._poison
        self.aggregator = KVOutputAggregator(len(self.ranks))
        self.counts: dict[tuple[str, ...], float] = {}

    def _make_connector(self, config: Any, role: KVConnectorRole, cache: KVCacheConfig) -> CornplugConnector:
        return CornplugConnector(config, role, cache)

    def _config(self, policy: str, context_parallel: int) -> Any:
        return SimpleNamespace(
            kv_transfer_config=KVTransferConfig(
                kv_connector="CornplugConnector", kv_role="kv_both", kv_load_failure_policy=policy
            ),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: HEADS,
                get_total_num_hidden_layers=lambda: LAYERS,
                hf_config=SimpleNamespace(to_dict=dict),
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=context_parallel,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=self.pp,
                tensor_parallel_size=self.tp,
            ),
            speculative_config=SimpleNamespace(
                uses_draft_kv_cache=lambda: bool(self.draft),
                uses_dynamic_speculative_decoding=lambda: False,
                draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
                draft_parallel_config=SimpleNamespace(tensor_parallel_size=self.tp),
            ),
            cache_config=SimpleNamespace(block_size=self.block_size, prefix_caching_hash_algo=self.hash_algo),
            compilation_config=SimpleNamespace(static_forward_context={}),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=self.events, publisher="null"),
        )

    def cache_config(self, layers: range, blocks: int) -> KVCacheConfig:
        heads = 1 if self.latent else max(1, HEADS // self.tp)
        spec = (MLAAttentionSpec if self.latent else FullAttentionSpec)(
            block_size=self.block_size, num_kv_heads=heads, head_size=DIM, dtype=torch.float32
        )
        group = KVCacheGroupSpec(self._names(layers), spec)
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])

    def _names(self, layers: range) -> list[str]:
        """vLLM's names of a model's layers, and of its draft's behind them."""
        return [f"model.layers.{i}.attn" for i in layers] + [
            f"draft_model.layers.{i}.attn" for i in range(self.draft)
        ]

    @contextmanager
    def _patched(self, shard: int) -> Iterator[None]:
        with (
            mock.patch.object(kv_connector, "get_runtime", side_effect=lambda extra: self._run()),
            mock.patch.object(tracked_requests, "kv_identity", self._identity),
            mock.patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=shard),
            mock.patch("vllm.distributed.get_tensor_model_parallel_world_size", return_value=self.tp),
        ):
            yield

    def _rank(
        self, config: Any, stage: int, shard: int, blocks: int, backend: Backend, extra_layers: int
    ) -> Rank:
        per_stage = LAYERS // self.pp
        layers = range(stage * per_stage, (stage + 1) * per_stage + extra_layers)
        if self.latent:
            heads = range(1)
        elif HEADS % self.tp == 0:
            heads = range(shard * HEADS // self.tp, (shard + 1) * HEADS // self.tp)
        else:
            heads = range(shard * HEADS // self.tp, shard * HEADS // self.tp + 1)
        with (
            self._patched(shard),
            recorded(kv_connector, "KVWorker") as workers,
            recorded(kv_connector, "RankPages") as pages,
        ):
            connector = self._make_connector(
                config, KVConnectorRole.WORKER, self.cache_config(layers, blocks)
            )
        names = self._names(layers)
        layers = range(layers.start, layers.stop + self.draft)
        caches = {
            name: torch.full(
                (
                    blocks * self.block_size // self.kernel_block,
                    len(heads),
                    self.kernel_block,
                    DIM if self.latent else 2 * DIM,
                ),
                POISON,
            )
            for name in names
        }
        config.compilation_config.static_forward_context.update(
            {
                name: mla_layer(backend, 6, 2) if self.latent else SimpleNamespace(impl=backend)
                for name in caches
            }
        )
        with self._accelerated() as arenas:
            connector.register_kv_caches(dict(reversed(caches.items())))
        rank = Rank(connector, heads, layers, caches, self.kernel_block, arena=arenas[0] if arenas else None)
        rank.worker, rank.pages = (made[-1] if made else None for made in (workers, pages))
        if self.second_runner:
            with (
                mock.patch.object(second_runner, "get_kv_transfer_group", return_value=connector),
                # It registers the caches once more.
                mock.patch.object(connector, "register_kv_caches"),
            ):
                rank.active = second_runner.ActiveKVConnector(config, caches)
        return rank

    @contextmanager
    def _accelerated(self) -> Iterator[list[Any]]:
        """Give the worker that registers its caches the copies of an accelerator. Yields its `LateArena`, if
        it opens one."""
        arenas = list[Any]()
        if not self.accelerator:
            yield arenas
            return

        def copies(*args: Any, urgent: bool, **how: Any) -> BlockCopies:
            late = BlockCopies(*args, direct=False, backend=LateDevice(), **how)
            if self.accelerator == "arena":
                late.blocks.device = torch.device("cuda")
            return late

        def open_arena(*args: Any, sizes: BlockSizes, fallback: Any, **_how: Any) -> Any:
            from .late_arena import HostRanges, late_arena  # needs Triton

            ranges = (self.ranges or HostRanges)()
            arenas.append(late_arena(*args, sizes=sizes, fallback=fallback, ranges=ranges))
            return arenas[-1].moves

        with mock.patch.object(group_worker, "BlockCopies", copies):
            if self.accelerator != "arena":
                yield arenas
                return
            from cornplug.vllm_connector.kv import arena_moves

            with mock.patch.object(arena_moves, "open_arena", open_arena):
                yield arenas

    # -- requests ---------------------------------------------------------------------------

    def add(self, name: str, tokens: Sequence[int], **fields: Any) -> Request:
        request = self.requests[name] = Request(name, list(tokens), **fields)
        return request

    def finish(self, request: Request) -> None:
        """Stop token, length or abort: as `finish_requests` and `_free_request` do."""
        if request.is_finished():
            return
        delay = request.status == "loading"
        request.status = "finished"
        kept, params = self.connector.request_finished_all_groups(request, (request.blocks,))
        assert params is None
        if not (delay or kept):
            self._free(request)

    def preempt(self, request: Request) -> None:
        """Give a running request's blocks away, at once."""
        assert request.status == "running"
        self._poison(request.blocks)
        self._give_back(request)
        request.status, request.num_computed_tokens, request.local_tokens = "waiting", 0, 0
        self.preempted.add(request.request_id)

    def _free(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.free_blocks += request.blocks
        request.blocks = []

    def _poison(self, blocks: list[int]) -> None:
        for rank in self.ranks:
            for cache in rank.caches.values():
                cache.unflatten(0, (-1, self.block_size // self.kernel_block))[blocks] = POISON

    # -- the loop ---------------------------------------------------------------------------

    def schedule(self, *, chunk: int = 1 << 20, take: int | None = None) -> Any:
        """One `schedule()`: (scheduler output, connector metadata). `take` limits an offer."""
        scheduled: dict[str, int] = {}
        for request in list(self.requests.values()):
            if request.status == "loaded":
                request.status = "running"
                if request.failed and not request.num_computed_tokens:
                    self._give_back(request)
                    request.status = "waiting"
            if request.status == "waiting":
                self._admit(request, take)
            if request.status == "running":
                tokens = min(chunk, request.num_tokens - request.num_computed_tokens)
                if tokens > 0:
                    scheduled[request.request_id] = tokens
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self.preempted,
        )
        self.preempted = set()
        meta = self.connector.build_connector_meta(output)
        starts = {name: self.requests[name].num_computed_tokens for name in scheduled}
        for name, tokens in scheduled.items():
            self.requests[name].num_computed_tokens += tokens
        return SimpleNamespace(scheduled=scheduled, starts=starts, meta=meta)

    def _admit(self, request: Request, take: int | None) -> None:
        external, later = self.connector.get_num_new_matched_tokens(request, request.local_tokens)
        assert later is bool(external)
        if external is None:
            return
        if take is not None:
            external = min(external, take)
        assert request.local_tokens + external <= request.num_tokens
        wanted = -(-request.num_tokens // self.block_size)
        if len(self.free_blocks) < wanted - len(request.blocks):
            return
        request.blocks += [self.free_blocks.pop(0) for _ in range(wanted - len(request.blocks))]
        blocks = SimpleNamespace(get_block_ids=lambda: (request.blocks,))
        self.connector.update_state_after_alloc(request, blocks, external)
        request.num_computed_tokens = request.local_tokens + external
        request.external_tokens = external
        request.status = "loading" if external else "running"

    def execute(self, step: Any) -> Any:
        """One `execute_model` on every rank, and vLLM's own aggregation of what they say."""
        outputs = []
        for rank in self.ranks:
            if rank.active is not None:
                outputs.append(SimpleNamespace(kv_connector_output=self._execute_second(rank, step)))
                continue
            connector = rank.connector
            connector.bind_connector_metadata(step.meta)
            connector.handle_preemptions(step.meta)
            self._forward(rank, step)
            connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(set())
            output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            outputs.append(SimpleNamespace(kv_connector_output=output))
        aggregated = self.aggregator.aggregate(outputs)  # type: ignore[arg-type]
        assert aggregated is not None
        return aggregated.kv_connector_output

    def _forward(self, rank: Rank, step: Any) -> None:
        for name, tokens in step.scheduled.items():
            request = self.requests.get(name)
            if request is not None and request.blocks:
                start = step.starts[name]
                rank.compute(request, self.block_size, start, start + tokens)

    def _execute_second(self, rank: Rank, step: Any) -> Any:
        """As `gpu/model_runner.py`: blocks that were given away are overwritten before `pre_forward`
        (`preempt` has done that), and loads begin after the forward."""
        assert rank.active is not None
        seen = SimpleNamespace(kv_connector_metadata=step.meta, has_sync_kv_loads=False)
        with (
            mock.patch.object(second_runner, "is_forward_context_available", return_value=True),
            mock.patch.object(second_runner, "get_forward_context", return_value=None),
        ):
            rank.active.pre_forward(seen)  # type: ignore[arg-type]
            self._forward(rank, step)
            rank.active.finish_forward()
            output = rank.active.post_forward(set())
        assert output is not None
        output.invalid_block_ids = output.invalid_block_ids or set()
        return output

    def update(self, output: KVConnectorOutput) -> None:
        """`update_from_output`: failures first, then who is done."""
        for request in self.requests.values():
            if request.status == "loading":
                computed = -(-request.num_computed_tokens // self.block_size)
                bad = [i for i in range(computed) if request.blocks[i] in output.invalid_block_ids]
                if bad:
                    request.num_computed_tokens = bad[0] * self.block_size
                    request.failed = True
        self.connector.update_connector_output(output)
        for name in output.finished_recving or ():
            request = self.requests[name]
            if request.status == "loading":
                request.status = "loaded"
            else:
                assert request.is_finished()
                self._free(request)
        for name in output.finished_sending or ():
            assert self.requests[name].is_finished()
            self._free(self.requests[name])
        stats = self.connector.get_kv_connector_stats()
        for metric, rows in (stats.data if stats is not None else {}).items():
            for labels, values in rows:
                key = (metric.removeprefix("cornplug_").removesuffix("_total"), *labels[1:])
                self.counts[key] = self.counts.get(key, 0) + sum(values)

    def step(self, **how: Any) -> None:
        self.update(self.execute(self.schedule(**how)))

    def settle(self, within_s: float = 60.0, **how: Any) -> None:
        """Step until everybody has computed or finished and nothing is open, as an engine does."""
        end_s = time.monotonic() + within_s
        while self.busy():
            assert time.monotonic() < end_s, f"still busy: {self.requests}"
            self.step(**how)
            time.sleep(0.001)

    def busy(self) -> bool:
        unfinished = any(
            r.status != "running" or r.num_computed_tokens < r.num_tokens for r in self.requests.values()
        )
        return unfinished or self.connector.has_pending_push_work()

    def run(self, name: str, tokens: Sequence[int], **fields: Any) -> Request:
        """A request from its arrival to its last computed prompt token, every byte checked."""
        request = self.add(name, tokens, **fields)
        self.settle()
        self.check(request)
        return request

    def check(self, request: Request) -> None:
        for rank in self.ranks:
            rank.check(request, self.block_size, request.num_computed_tokens)

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.connector.shutdown()
