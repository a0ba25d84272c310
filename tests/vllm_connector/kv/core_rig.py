"""vLLM's own scheduler and pool of blocks around the rig's connector and ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from ..rig import LAYERS, Engine

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens
BLOCKS = 64


class Clock:
    """Replaces the module's clock: no test waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Core:
    """vLLM's scheduler around the rig's ranks, which compute the bytes of its blocks."""

    def __init__(self, config: Any, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        cache = engine.cache_config(range(LAYERS), BLOCKS)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=engine.block_size, log_stats=False
        )
        self.scheduler.connector = engine.connector
        engine.connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        # The scheduler would hand the counts to the engine's front end.
        connector, take = engine.connector, engine.connector.get_kv_connector_stats
        connector.get_kv_connector_stats = lambda: self._count(take())  # type: ignore[method-assign]
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(engine.block_size, sha256)
        self.names = 0

    def _count(self, stats: Any) -> None:
        for metric, rows in (stats.data if stats is not None else {}).items():
            for labels, values in rows:
                key = (metric.removeprefix("cornplug_").removesuffix("_total"), *labels[1:])
                self.engine.counts[key] = self.engine.counts.get(key, 0) + sum(values)

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, tokens: Sequence[int], max_tokens: int = 1, name: str = "") -> Request:
        self.names += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name or f"r{self.names}", list(tokens), params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        ends = {name: self.scheduler.requests[name].num_computed_tokens for name in scheduled}
        self.engine.requests = {
            name: SimpleNamespace(  # type: ignore[misc]
                all_token_ids=list(self.scheduler.requests[name].all_token_ids),
                blocks=self.scheduler.kv_cache_manager.get_block_ids(name)[0],
                status="running",
            )
            for name in scheduled
        }
        starts = {name: ends[name] - tokens for name, tokens in scheduled.items()}
        return output, SimpleNamespace(scheduled=scheduled, starts=starts, meta=output.kv_connector_metadata)

    def execute(self, step: Any) -> None:
        output, moves = step
        connector_output = self.engine.execute(moves)
        names = list(moves.scheduled)
        requests = self.scheduler.requests
        done = {
            name: name in requests and requests[name].num_computed_tokens >= requests[name].num_tokens
            for name in names
        }
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                [[7] if done[name] else [] for name in names],
                kv_connector_output=connector_output,
            ),
        )

    def step(self) -> None:
        self.execute(self.schedule())

    def answer(self, tokens: Sequence[int], max_tokens: int = 1, name: str = "") -> Request:
        """A request until it is finished; the step after its last token is the engine's next."""
        request = self.add(tokens, max_tokens, name)
        while not request.is_finished():
            self.step()
        return request

    def sleep(self, step_s: float = 0.01) -> float:
        """Step until the engine goes to sleep. Returns the time that it was idle and awake."""
        began, end_s = self.clock.now, time.monotonic() + 60
        while self.scheduler.has_requests():
            assert time.monotonic() < end_s, "the engine stays awake"
            self.step()
            self.clock.now += step_s
            self.drain()
        return self.clock.now - began

    def drain(self) -> None:
        for rank in self.engine.ranks:
            rank.connector.unregister_kv_caches()  # waits for its copies

    def saved(self, outcome: str = "stored") -> float:
        return self.engine.counts.get(("saves", "kv_page", outcome), 0)
