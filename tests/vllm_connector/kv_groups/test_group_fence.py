"""An error of any kind in a hook, of a model with several cache groups, ends sharing and never the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cornplug.store.memory import MemoryStore

from ..kv.test_fence import HOOKS, fail_in
from .group_rig import GroupCore

PROMPT = [(7 * i) % 251 for i in range(300)]

Make = Callable[..., GroupCore]


def answers_all(core: GroupCore) -> None:
    """The engine answers every request, by loads if it can, and frees every block."""
    for number in range(4):
        core.answer([*PROMPT, 300 + number], max_tokens=3)
    core.settle()
    assert core.pool.get_num_free_blocks() == core.pool.num_gpu_blocks - 1
    assert core.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("hook", [*HOOKS, "has_pending_frees"])
def test_error_in_a_hook_of_the_scheduler_half_of_groups_ends_sharing_only(
    cores: Make, monkeypatch: pytest.MonkeyPatch, hook: str, after: int
) -> None:
    first = cores()
    first.answer(PROMPT)
    first.settle()
    one = cores()
    fail_in(one.half, hook, after, monkeypatch)
    answers_all(one)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("hook", ["begin_step", "start_loads", "start_saves"])
def test_error_in_a_hook_of_a_worker_half_of_groups_ends_sharing_only(
    cores: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, hook: str, after: int
) -> None:
    first = cores()
    first.answer(PROMPT)
    first.settle()
    one = cores()
    fail_in(one.workers[0], hook, after, monkeypatch)
    answers_all(one)
    assert one.counts["misses", "kv_page", "error"] >= 1
    # What the store has is whole: every byte that another engine loads is checked.
    reader = cores()
    reader.answer(PROMPT, max_tokens=20)
    reader.settle()
