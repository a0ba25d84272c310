"""Threads of the disk: order, results, errors, pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.disk.record_format import RecordDamaged


@pytest.fixture
def workers() -> Iterator[DiskWorkers]:
    made = DiskWorkers()
    yield made
    made.close()


def _collect(workers: DiskWorkers, until: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 50
    while not until():
        assert time.monotonic() < end_s, "no result came"
        workers.wait(0.1)
        workers.collect()


def test_disk_workers_writes_are_done_in_order_on_one_thread(workers: DiskWorkers) -> None:
    done: list[int | DiskFailure] = []
    threads: set[int] = set()

    def work(i: int) -> Callable[[], int]:
        def run() -> int:
            threads.add(threading.get_ident())
            return i

        return run

    for i in range(50):
        workers.write(work(i), done.append)
    _collect(workers, lambda: len(done) == 50)
    assert done == list(range(50))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_disk_workers_reads_pass_a_write_that_hangs(workers: DiskWorkers) -> None:
    go, done = threading.Event(), list[object]()
    workers.write(lambda: go.wait(10), done.append)
    workers.read(lambda: "read", done.append)
    _collect(workers, lambda: bool(done))
    assert done == ["read"]
    go.set()
    _collect(workers, lambda: len(done) == 2)


def test_disk_workers_errors_of_the_disk_are_results(workers: DiskWorkers) -> None:
    done: list[object] = []

    def broken() -> None:
        raise OSError(28, "full")

    def damaged() -> None:
        raise RecordDamaged("other bytes")

    workers.write(broken, done.append)
    workers.write(damaged, done.append)
    workers.write(lambda: 1, done.append)
    _collect(workers, lambda: len(done) == 3)
    assert [type(one) for one in done] == [OSError, RecordDamaged, int]


def test_disk_workers_pace_bounds_bytes_in_a_second_until_hurried() -> None:
    workers, done = DiskWorkers(write_bytes_s=1000), list[object]()
    try:
        began_s = time.monotonic()
        for _ in range(3):
            workers.write(lambda: 1, done.append, size_bytes=200)
        _collect(workers, lambda: len(done) == 3)
        assert time.monotonic() - began_s >= 0.4
        workers.write(lambda: 1, done.append, size_bytes=60_000)
        workers.write(lambda: 1, done.append)
        workers.lift_rate_limit()
        _collect(workers, lambda: len(done) == 5)
    finally:
        workers.close()
