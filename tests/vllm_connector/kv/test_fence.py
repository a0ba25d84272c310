"""An error of any kind in a hook of the scheduler half ends sharing, and never the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv_copies.mover import PolledMover

from ..rig import Engine
from .core_rig import BLOCKS, PROMPT, Core

Make = Callable[..., Core]
HOOKS = ["matched_tokens", "allocated", "moves", "acknowledged", "loaded", "finished", "saves_open"]


@pytest.mark.parametrize(
    ("hook", "calls"), [(hook, calls) for hook in HOOKS for calls in (0, 1) if (hook, calls) != ("loaded", 1)]
)
def test_error_in_a_hook_ends_sharing_only(
    core: Make,
    engine: Callable[..., Engine],
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    calls: int,
) -> None:
    engine().run("a", PROMPT)
    one, left = core(save="always"), [calls]
    half: Any = one.engine.connector._scheduler
    original = getattr(half, hook)

    def fails(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("a lost entry")
        return original(*args)

    monkeypatch.setattr(half, hook, fails)
    # The first two load, the others compute: each request is answered.
    for number in range(8):
        request = one.add([*PROMPT[:128], *[number + 300] * 40] if number < 2 else [number + 400] * 80)
        while not request.is_finished():
            one.step()
            one.drain()
    one.sleep()
    one.step()
    assert one.engine.counts["misses", "kv_page", "error"] == 1
    assert one.pool.get_num_free_blocks() == BLOCKS - 1
    assert one.scheduler.reset_prefix_cache()


class Copy:
    """A copy that has happened; or whose event says that it failed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def done(self) -> bool:
        if self.fails:
            raise ValueError("an event of a lost device")
        return True

    wait = done


@pytest.mark.parametrize("how", ["poll", "wait"])
def test_failed_copy_leaves_the_copies_beside_it(how: str) -> None:
    mover, ended = PolledMover(), list[str]()

    def job(name: str, copy: Copy, error: Exception | None = None) -> Any:
        try:
            yield copy
            if error is not None:
                raise error
            ended.append(f"{name} whole")
        finally:
            ended.append(f"{name} over")

    mover.submit(job("a", Copy()))
    mover.submit(job("b", Copy(fails=True)))
    mover.submit(job("c", Copy(), ValueError("a kernel")))
    mover.submit(job("d", Copy()))
    getattr(mover, how)()
    assert ended == ["a whole", "a over", "b over", "c over", "d whole", "d over"]
    assert mover.is_idle()
    assert mover.works


def test_copies_that_go_on_failing_are_no_longer_begun() -> None:
    mover = PolledMover()

    def job() -> Any:
        raise MemoryError
        yield

    for _ in range(8):
        assert mover.works
        mover.submit(job())
    assert not mover.works
