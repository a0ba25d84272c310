"""What steps, copies and waits are taken for, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from collaborators import recorded
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from cornplug.engine_common.load_policy import LoadRule
from cornplug.sglang_hooks.kv import storage_hooks
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv_pages import costs as kv_costs
from cornplug.sglang_hooks.kv_pages.costs import LoadPace

from ..hooked import hook_of

process_batch_result = hook_of(storage_hooks, "Scheduler.process_batch_result")
check_prefetch_progress = hook_of(storage_hooks, "UnifiedRadixCache.check_prefetch_progress")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()  # type: ignore[return-value]


def scene(clock: Clock) -> tuple[LoadPace, LoadRule, Any]:
    """A pace, the rule that it feeds, and SGLang's scheduler over a cache whose storage has it."""
    with recorded(kv_costs, "LoadRule") as rules:
        pace = LoadPace("pays", 1000.0, clock)
    storage = CornplugStorage.__new__(CornplugStorage)
    storage.pace, storage.idle_backups = pace, None
    cache = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=storage))
    return pace, rules[0], SimpleNamespace(tree_cache=cache, busy=False)


def step(scheduler: Any, tokens: int, launched_s: float, *, extend: bool = True) -> None:
    """As `process_batch_result` of SGLang's, of a copied batch, at the clock's time."""
    reqs: Any = [object()] * (1 if extend else tokens)
    batch = ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.EXTEND if extend else ForwardMode.DECODE,
        extend_lens=[tokens] if extend else None,
        launch_ts=launched_s,
    )
    process_batch_result(None, scheduler, batch.copy(), None)


def test_costs_of_overlapped_steps_exclude_waiting(clock: Clock) -> None:
    """SGLang launches a batch while the one before runs."""
    pace, _, scheduler = scene(clock)
    for tokens in (1000, 2000, 1000, 2000, 1000, 2000):
        launched = clock.now - (0.05 if scheduler.busy else 0.0)
        scheduler.busy = True
        clock.now += tokens * 1e-4
        step(scheduler, tokens, launched)
    assert pace.compute_s(1000) == pytest.approx(0.1, rel=0.2)


def test_costs_of_decoding_steps_are_measured(clock: Clock) -> None:
    pace, _, scheduler = scene(clock)
    launched, clock.now = clock.now, clock.now + 0.25
    step(scheduler, 4, launched, extend=False)
    step(SimpleNamespace(tree_cache=SimpleNamespace()), 4, launched)  # a cache without our storage
    assert pace.compute_s(4) == pytest.approx(0.25)


def test_load_pace_time_until_noticed_is_measured(clock: Clock) -> None:
    pace, rule, scheduler = scene(clock)

    def progress(self: Any, request: Any) -> bool:
        return clock.now >= 101.0

    pace.record_queued("r", 64)
    assert not check_prefetch_progress(progress, scheduler.tree_cache, "r")
    assert pace.is_waiting("r")
    pace.record_copy(64_000, 0.25)
    clock.now = 101.0
    assert check_prefetch_progress(progress, scheduler.tree_cache, "r")
    assert not pace.is_waiting("r")
    # 0.25 s a copy of this size, and 0.75 s until somebody looked.
    assert rule.load_s(64_000) == pytest.approx(1.0)


def test_load_pace_queued_loads_measure_copies_only(clock: Clock) -> None:
    pace, rule, _ = scene(clock)
    pace.record_queued("a", 64)
    pace.record_queued("b", 64)
    clock.now += 5
    pace.record_copy(64_000, 0.25)
    pace.record_prefetch_end("a")
    pace.record_prefetch_end("b")
    assert rule.load_s(64_000) == pytest.approx(0.25)


def test_load_pace_abandoned_requests_are_forgotten(clock: Clock) -> None:
    pace, _, _ = scene(clock)
    for i in range(1034):
        pace.record_queued(i, 1)
    assert [i for i in range(1034) if pace.is_waiting(i)] == list(range(10, 1034))
