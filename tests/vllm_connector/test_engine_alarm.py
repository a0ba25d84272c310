"""The alarm that wakes an engine core, and vLLM's own loop that it wakes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from cornplug.vllm_connector.cpu_use import WAKE_TIMER, WakeTimer, _run_busy_loop


@pytest.fixture
def rung() -> queue.Queue[float]:
    return queue.Queue()


@pytest.fixture
def alarm(rung: queue.Queue[float]) -> Iterator[WakeTimer]:
    alarm = WakeTimer()
    alarm.bind(lambda: rung.put(time.monotonic()))
    yield alarm
    alarm.bind(None)


def threads() -> int:
    return sum(thread.name == "cornplug-alarm" for thread in threading.enumerate())


def test_engine_alarm_rings_once_and_not_before_its_time(alarm: WakeTimer, rung: queue.Queue[float]) -> None:
    began = time.monotonic()
    assert alarm.schedule(0.05)
    assert rung.get(timeout=10) >= began + 0.05
    assert alarm.schedule(0.01)
    rung.get(timeout=10)
    with pytest.raises(queue.Empty):
        rung.get(timeout=0.3)


def test_engine_alarm_set_again_is_put_off(alarm: WakeTimer, rung: queue.Queue[float]) -> None:
    # Longer than a pause of the machine: none of them rings meanwhile.
    for _ in range(5):
        assert alarm.schedule(3.0)
        time.sleep(0.02)
    last = time.monotonic()
    assert threads() == 1
    assert rung.get(timeout=30) >= last + 2.9 - 0.02
    assert rung.empty()


def test_engine_alarm_without_a_loop_says_so(alarm: WakeTimer, rung: queue.Queue[float]) -> None:
    assert not WakeTimer().schedule(0.01)
    assert alarm.schedule(2.0)
    alarm.bind(None)
    assert not alarm.schedule(0.01)
    with pytest.raises(queue.Empty):
        rung.get(timeout=2.2)


@pytest.mark.parametrize("core_class", [EngineCoreProc, DPEngineCoreProc])
def test_engine_alarm_wakes_vllms_loop(core_class: type[EngineCoreProc]) -> None:
    """The loop blocks on its queue, and leaves that by a request or by our alarm alone."""
    core = core_class.__new__(core_class)
    core.input_queue = queue.Queue()
    work = iter([False, True])
    core.has_work = lambda: next(work)  # type: ignore[method-assign]
    core.is_running = lambda: True  # type: ignore[method-assign]
    core._idle_state_callbacks = []
    core.aborts_queue, core.process_input_queue_block = queue.Queue(), True

    def loop(core: EngineCoreProc) -> str:
        assert WAKE_TIMER.schedule(0.01)
        core._process_input_queue()
        return "stepped"

    assert _run_busy_loop(loop, core) == "stepped"
    assert not WAKE_TIMER.schedule(0.01)


@pytest.mark.parametrize("running", [True, False])
def test_engine_alarm_knows_when_replicas_compute_in_step(running: bool) -> None:
    core = DPEngineCoreProc.__new__(DPEngineCoreProc)
    core.engines_running = running
    assert _run_busy_loop(lambda core: WAKE_TIMER.has_waiting_replicas(), core) == running
    assert not WAKE_TIMER.has_waiting_replicas()


def test_engine_alarm_replica_of_a_dense_model_waits_for_nobody() -> None:
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.engines_running = True
    assert not _run_busy_loop(lambda core: WAKE_TIMER.has_waiting_replicas(), core)
