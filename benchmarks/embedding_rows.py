"""A stored embedding on its way to two workers of vLLM: its rows in the step's metadata, or their lease.

    python benchmarks/embedding_rows.py [--quick] [--out DIR]

A store's daemon, the scheduler half here and two worker halves in processes of their own, with vLLM's own
message queue between them, as with --tensor-parallel-size 2. The scheduler reads or leases an entry, sends
the metadata of a step, and is told when both workers have the rows in their encoder cache, in turns of one
way after the other. With a lease, each worker copies and verifies the rows. Rows of 1 MiB (a small image) and
88 MiB (the largest of Qwen3-VL: 5,632 tokens of 8,192 numbers in bfloat16)."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from driver.stage import options
from driver.table import Report, Row
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from cornplug.codec import PayloadKind
from cornplug.config import StoreConfig
from cornplug.engine_common.embeddings import ExpectedEmbedding
from cornplug.store.base import Store
from cornplug.store.client import PoolStore
from cornplug.store.payload import NewPayload, get_payload, put_payload
from cornplug.vllm_connector.media import worker as ec_worker
from cornplug.vllm_connector.media.embedding_leases import EmbeddingLeases
from cornplug.vllm_connector.media.encoder_requests import PendingEmbedding
from cornplug.vllm_connector.media.metadata import ArrivedEmbedding, CornplugECMetadata
from cornplug.vllm_connector.media.worker import ECWorker
from devkit.engines import StoreProcess

RANKS: Final = 2
SHAPES: Final = {"1 MiB": (256, 2048), "88 MiB": (5632, 8192)}
_NAME: Final = "cp1-" + "ab" * 32
_WAIT_S: Final = 60.0
_DEADLINE_S: Final = 5.0
WAYS: Final = ("metadata", "lease")


class Engine:
    """The scheduler half's end, and its workers."""

    def __init__(self, store: Store, queue: MessageQueue, told: Any) -> None:
        self._store, self._queue, self._told = store, queue, told
        run: Any = SimpleNamespace(store=store, deadline_s=_DEADLINE_S)
        self._leases = EmbeddingLeases(run, RANKS)

    def step(self, way: str, key: bytes, shape: tuple[int, int]) -> tuple[float, float]:
        """(seconds until both workers have the rows, CPU seconds of this thread) of one hit."""
        expected = ExpectedEmbedding(key, *shape, "bfloat16")
        item = PendingEmbedding(_NAME, expected, 2 * shape[0] * shape[1], 0.0, 0.0)
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        item.arrived = self._leases.lease(_NAME, expected) if way == "lease" else self._read(key)
        assert item.arrived is not None, "the store has it"
        self._leases.mark_sent(item)
        self._queue.enqueue(CornplugECMetadata([item.arrived]))
        cpu_s = time.thread_time() - cpu_s
        ends_s = []
        for _ in range(RANKS):
            acks, at_s, there = self._told.get(timeout=_WAIT_S)
            assert there == shape, there
            if acks is not None:
                self._leases.handle_acks(acks)
            ends_s.append(at_s)
        return max(ends_s) - began_s, cpu_s

    def _read(self, key: bytes) -> ArrivedEmbedding:
        found = get_payload(self._store, key, deadline_s=_DEADLINE_S)
        assert found is not None, "the store has it"
        return ArrivedEmbedding(_NAME, found[0].dtype, found[0].shape, found[1])


def work(rank: int, handle: Any, steps: int, told: Any, config: StoreConfig) -> None:
    """A worker half, for so many steps."""
    # The ranks' vote needs torch.distributed. It is not measured here.
    ec_worker.find_common = list  # type: ignore[assignment]
    store = PoolStore(config, connect_timeout_s=10)
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready()
    run: Any = SimpleNamespace(store=store, background_timeout_s=0.0)
    worker = ECWorker(run, publishes=False, device="cpu", rank=rank)
    for _ in range(steps):
        cache: dict[str, Any] = {}
        worker.load(cache, queue.dequeue(timeout=_WAIT_S))
        told.put((worker.take_acks(), time.perf_counter(), tuple(cache[_NAME].shape)))
    worker.close()
    store.close()


@contextmanager
def engine(folder: Path, steps: int) -> Iterator[tuple[Engine, Store]]:
    """A store's daemon, an engine's halves that take so many steps."""
    spawned = multiprocessing.get_context("spawn")
    with ExitStack() as ends:
        ends.enter_context(StoreProcess(folder / "s.sock", size="1GiB"))
        config = StoreConfig(socket=folder / "s.sock", autostart=False)
        store = ends.enter_context(closing(PoolStore(config, connect_timeout_s=10)))
        queue, told = MessageQueue(RANKS, RANKS), spawned.Queue()
        handle = queue.export_handle()
        workers = [
            spawned.Process(target=work, args=(rank, handle, steps, told, config)) for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        queue.wait_until_ready()
        yield Engine(store, queue, told), store
        for worker in workers:
            worker.join(_WAIT_S)


def main() -> int:
    """Measure, print and write."""
    chosen = options(__doc__)
    count = 5 if chosen.quick else 20
    report = Report(
        name="embedding_rows",
        title="A stored embedding on its way to two workers",
        quick=chosen.quick,
        sides=("rows in the metadata", "lease in the metadata"),
        set_up=[
            "Scheduler half and two worker halves with vLLM's message queue, a store's daemon, on the CPU.",
            "From the lookup until both workers have the rows in their encoder cache, the ways in turns.",
            "CPU is of the scheduler's thread, on which vLLM's engine core waits.",
        ],
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        engine(Path(folder), len(SHAPES) * 2 * (count + 1)) as (here, store),
    ):
        for i, (name, shape) in enumerate(SHAPES.items()):
            key = bytes([i]) * 32
            rows = np.random.default_rng(i).integers(0, 1 << 16, shape, np.uint16)
            put_payload(
                store,
                NewPayload(rows.tobytes(), PayloadKind.EMBEDDING, key=key, dtype="bfloat16", shape=shape),
                app="bench",
                deadline_s=5,
            )
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for turn in range(count + 1):
                for way in WAYS:
                    taken = here.step(way, key, shape)
                    if turn:  # The first one makes connections and pages.
                        times[way].append(taken)
            for j, what in enumerate(("until both workers have the rows", "CPU of the scheduler's thread")):
                by_way = {way: [1e3 * taken[j] for taken in of] for way, of in times.items()}
                report.rows.append(
                    Row(name=f"{name}: {what}", unit="ms", stock=by_way["metadata"], cornplug=by_way["lease"])
                )
    report.show()
    report.write(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
