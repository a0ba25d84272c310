"""An error of any kind in a hook ends sharing, and never the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv_copies.mover import ByteBudget, PolledMover

from ..conftest import open_in
from ..rig import Engine
from .core_rig import BLOCKS, PROMPT, Core

Make = Callable[..., Core]
HOOKS = [
    "matched_tokens",
    "handle_allocation",
    "build_metadata",
    "handle_acks",
    "end_load",
    "finish_request",
    "has_open_saves",
]
"""Of the scheduler half."""
WORKER_HOOKS = ["begin_step", "start_loads", "start_saves", "record_step_end"]


def fail_in(half: Any, hook: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a method of a half raise in every call after the first `after`, before it does anything."""
    original, left = getattr(half, hook), [after]

    def fails(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("a lost entry")
        return original(*args, **kwargs)

    monkeypatch.setattr(half, hook, fails)


def answers_all(one: Core) -> None:
    """The engine answers every request, the first two by loads if it can, and frees every block."""
    for number in range(8):
        request = one.add([*PROMPT[:128], *[number + 300] * 40] if number < 2 else [number + 400] * 80)
        while not request.is_finished():
            one.step()
            one.drain()
    one.sleep()
    one.step()
    assert one.pool.get_num_free_blocks() == BLOCKS - 1
    assert one.scheduler.reset_prefix_cache()


@pytest.mark.parametrize(
    ("hook", "after"),
    [(hook, after) for hook in HOOKS for after in (0, 1) if (hook, after) != ("end_load", 1)],
)
def test_error_in_a_hook_of_the_scheduler_half_ends_sharing_only(
    core: Make,
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    after: int,
) -> None:
    engine().run("a", PROMPT)
    one = core(save="always")
    fail_in(one.engine.half, hook, after, monkeypatch)
    answers_all(one)
    assert one.engine.counts["misses", "kv_page", "error"] == 1


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize(("hook", "after"), [(hook, after) for hook in WORKER_HOOKS for after in (0, 1)])
def test_error_in_a_hook_of_a_worker_half_ends_sharing_only(
    core: Make,
    engine: Callable[..., Engine],
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    after: int,
    accelerator: bool,
) -> None:
    engine().run("a", PROMPT)
    one = core(save="always", accelerator=accelerator, second_runner=accelerator)
    fail_in(one.engine.ranks[0].worker, hook, after, monkeypatch)
    answers_all(one)
    assert one.engine.counts["misses", "kv_page", "error"] >= 1
    # What the store has is whole: every byte that another engine loads is checked.
    assert open_in(store) == (0, 0)
    engine(save="never", blocks=256).run("b", [*PROMPT[:128], *[300] * 40])


class Copy:
    """A copy that has happened; or whose event says that it failed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def is_done(self) -> bool:
        if self.fails:
            raise ValueError("an event of a lost device")
        return True

    wait = is_done


@pytest.mark.parametrize("how", ["poll", "wait"])
def test_failed_copy_leaves_the_copies_beside_it(how: str) -> None:
    mover, ended = PolledMover(ByteBudget(1e9)), list[str]()

    def job(name: str, copy: Copy, error: Exception | None = None) -> Any:
        try:
            yield copy
            if error is not None:
                raise error
            ended.append(f"{name} whole")
        finally:
            ended.append(f"{name} over")

    mover.submit(job("a", Copy()), "load")
    mover.submit(job("b", Copy(fails=True)), "load")
    mover.submit(job("c", Copy(), ValueError("a kernel")), "load")
    mover.submit(job("d", Copy()), "load")
    getattr(mover, how)()
    assert ended == ["a whole", "a over", "b over", "c over", "d whole", "d over"]
    assert mover.is_idle()
    assert mover.is_healthy


def test_copies_that_go_on_failing_are_no_longer_begun() -> None:
    mover = PolledMover(ByteBudget(1e9))

    def job() -> Any:
        raise MemoryError
        yield

    for _ in range(8):
        assert mover.is_healthy
        mover.submit(job(), "load")
    assert not mover.is_healthy
