"""Workers of an engine that only waits sleep, and vLLM's own message still wakes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from time_limits import TimeLimits
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.utils.network_utils import get_open_zmq_ipc_path

from cornplug.vllm_connector import cpu_use, plugin


@pytest.fixture
def conditions() -> Iterator[tuple[SpinCondition, SpinCondition]]:
    """(writer, reader) of one shared-memory queue."""
    plugin.register()
    context, address = zmq.Context(), get_open_zmq_ipc_path()
    writer = SpinCondition(False, context, address)
    reader = SpinCondition(True, context, address)
    yield writer, reader
    cpu_use.record_step_start(computes=True)
    context.destroy(linger=0)


def waited_s(reader: SpinCondition, timeout_ms: int | None = None) -> float:
    began = time.monotonic()
    reader.wait(timeout_ms)
    return time.monotonic() - began


def test_worker_sleeps_after_step_without_tokens(conditions: tuple[SpinCondition, SpinCondition]) -> None:
    _, reader = conditions
    cpu_use.record_step_start(computes=True)
    reader.busy_loop_s = 0.01
    time.sleep(0.02)
    cpu_use.record_step_start(computes=False)
    reader.record_read()
    assert waited_s(reader) >= 0.04
    assert waited_s(reader, 10) >= 0.008


@pytest.mark.parametrize("last", [True, False])
def test_worker_spins_a_second_after_step_with_tokens(
    conditions: tuple[SpinCondition, SpinCondition], last: bool, within: TimeLimits
) -> None:
    _, reader = conditions
    reader.busy_loop_s = 60
    cpu_use.record_step_start(computes=True)
    cpu_use.record_step_start(computes=last)
    reader.record_read()
    with within(25, "asleep: 50 s"):
        for _ in range(1000):
            reader.wait(None)


def test_sleeping_worker_wakes_at_message(
    conditions: tuple[SpinCondition, SpinCondition], within: TimeLimits
) -> None:
    writer, reader = conditions
    reader.busy_loop_s = 0
    cpu_use.record_step_start(computes=False)
    stop = threading.Event()

    def notify() -> None:
        while not stop.wait(0.002):
            writer.notify()

    thread = threading.Thread(target=notify)
    thread.start()
    try:
        # The subscription takes a moment to reach the writer.
        within.check(min(waited_s(reader) for _ in range(50)), 0.04)
    finally:
        stop.set()
        thread.join()
