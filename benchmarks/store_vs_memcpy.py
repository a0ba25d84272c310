"""How much of memcpy's speed the pool keeps, and the cost of a lookup.

    python benchmarks/store_vs_memcpy.py [--out result.json] [--seconds 1.0] [--core 1]

A daemon process, and this process as its client, pinned to one core. For each size the
working set is many times the L3 cache, so that memcpy and store both move data between
DRAM and DRAM, and every buffer was touched before. `put`, `get_into` and `get_fresh` are whole calls
of `cornplug.store.payload`, one entry each: control messages, copy, checksum, verification.
`put_batch` and `get_batch` do the same for 16 MiB of entries a call, as connectors do;
`get_unverified` is the latter without checksums, to show the cost of verification.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cornplug.codec import PayloadHeader, PayloadKind, decode_header, encode_header
from cornplug.config import StoreConfig
from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.payload import NewPayload, copy_checksummed, get_payload, get_payload_into, put_payload

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
WORKING_SET = 512 << 20
DEADLINE_S = 5.0
TARGET = 0.7
WAYS = ("put", "put_batch", "get_into", "get_batch", "get_fresh", "get_unverified")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="least time per measurement")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args()
    others = os.sched_getaffinity(0) - {args.core} or {args.core}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-")))
        config = StoreConfig(
            socket=folder / "s.sock", size_bytes=WORKING_SET, secret_file=folder / "secret", autostart=False
        )
        stack.callback(_serve(config, others))
        os.sched_setaffinity(0, {args.core})
        store = PoolStore(config, connect_timeout_s=10)
        stack.callback(store.close)
        warm(store)
        rows = [measure_size(store, size, args.seconds) for size in SIZES]
        question = measure_contains(store, args.seconds)
    result = {"machine": machine(), "sizes": rows, "contains_256_keys_us": question}
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def warm(store: PoolStore) -> None:
    """Touch every page of the arena from here, as a long-running engine has."""
    give_up_s = time.monotonic() + 30
    rounds = Rounds(store, 1 << 20)
    while store.stat(deadline_s=DEADLINE_S).entries < rounds.count:
        check(time.monotonic() < give_up_s)
        for key in rounds.keys:
            put_payload(
                store,
                NewPayload(
                    rounds.part(rounds.source, 0), PayloadKind.FEATURE, key=key, dtype="uint8", shape=(1,)
                ),
                app="bench",
                deadline_s=DEADLINE_S,
            )
    rounds.empty()


def _serve(config: StoreConfig, cores: set[int]) -> Callable[[], object]:
    command = [sys.executable, "-m", "cornplug.store.daemon.main", "--socket", str(config.socket)]
    command += ["--size", str(config.size_bytes), "--secret-file", str(config.secret_file)]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    os.sched_setaffinity(daemon.pid, cores)
    while not config.socket.exists():
        if daemon.poll() is not None:
            raise SystemExit(f"the store did not start (exit status {daemon.returncode})")
        time.sleep(0.01)

    def end() -> None:
        daemon.terminate()
        daemon.wait()

    return end


class Rounds:
    """Each way to move the whole working set once, in payloads of `size` bytes."""

    def __init__(self, store: PoolStore, size: int) -> None:
        self.store, self.size = store, size
        self.count = WORKING_SET // size
        # Connectors ask for the pages of a request at once; one call covers this many payloads.
        self.batch = max(1, (16 << 20) // size)
        rng = np.random.default_rng(1)
        self.source = memoryview(rng.integers(0, 256, WORKING_SET, dtype=np.uint8))
        self.target = memoryview(np.ones(WORKING_SET, dtype=np.uint8))
        self.keys = [hashlib.sha256(f"{size} {i}".encode()).digest() for i in range(self.count)]
        self.fresh: list[object] = [None] * max(1, (64 << 20) // size)

    def part(self, buffer: memoryview, i: int) -> memoryview:
        return buffer[i * self.size : (i + 1) * self.size]

    def memcpy(self) -> None:
        for i in range(self.count):
            self.part(self.target, i)[:] = self.part(self.source, i)

    def put(self) -> None:
        for i in range(self.count):
            outcome = put_payload(
                self.store,
                NewPayload(
                    self.part(self.source, i),
                    PayloadKind.FEATURE,
                    key=self.keys[i],
                    dtype="uint8",
                    shape=(self.size,),
                ),
                app="bench",
                deadline_s=DEADLINE_S,
            )
            check(outcome == "stored")

    def get_into(self) -> None:
        for i in range(self.count):
            target = self.part(self.target, i)
            check(get_payload_into(self.store, self.keys[i], target, deadline_s=DEADLINE_S) is not None)

    def get_fresh(self) -> None:
        for i in range(self.count):
            self.fresh[i % len(self.fresh)] = get_payload(self.store, self.keys[i], deadline_s=DEADLINE_S)

    def put_batch(self) -> None:
        for first in range(0, self.count, self.batch):
            wanted = [(key, self.size) for key in self.keys[first : first + self.batch]]
            rooms = self.store.reserve(wanted, ReserveTerms("bench"), deadline_s=DEADLINE_S)
            written = []
            for i, room in enumerate(rooms, first):
                check(isinstance(room, Reservation))
                target = self.store.view(room.location, writable=True)
                sums = copy_checksummed(target, self.part(self.source, i), 1, checksum_of="source")
                written.append(
                    (
                        room,
                        encode_header(
                            PayloadHeader(PayloadKind.FEATURE, room.key, "uint8", (self.size,), sums)
                        ),
                    )
                )
            check(all(self.store.commit(written, deadline_s=DEADLINE_S)))

    def get_batch(self, *, verified: bool = True) -> None:
        for first in range(0, self.count, self.batch):
            keys = self.keys[first : first + self.batch]
            held = self.store.lease(keys, ttl_s=30, deadline_s=DEADLINE_S)
            for i, lease in enumerate(held, first):
                check(lease is not None)
                target, source = self.part(self.target, i), self.store.view(lease.location)
                if verified:
                    sums = copy_checksummed(target, source, 1, checksum_of="target")
                    check(decode_header(lease.meta, key=lease.key).checksums == sums)
                else:
                    target[:] = source
            self.store.release([lease.token for lease in held], deadline_s=DEADLINE_S)

    def get_unverified(self) -> None:
        self.get_batch(verified=False)

    def empty(self) -> None:
        self.store.delete(self.keys, deadline_s=DEADLINE_S)


def check(right: bool) -> None:
    if not right:
        raise SystemExit("the store did not do as it should")


def measure_size(store: PoolStore, size: int, seconds: float) -> dict[str, float]:
    """MB/s of each way at one size; best of several rounds over the whole working set."""
    rounds = Rounds(store, size)
    best = {"memcpy": 0.0, **dict.fromkeys(WAYS, 0.0)}
    # Ways take turns, and the best round of each counts: on a shared machine a neighbour slows
    # whole rounds down, memcpy's as well as ours.
    end_s = time.perf_counter() + seconds * len(best)
    done = 0
    while done < 3 or time.perf_counter() < end_s:
        done += 1
        for name in best:
            if name.startswith("put"):
                rounds.empty()
            began_s = time.perf_counter()
            getattr(rounds, name)()
            best[name] = max(best[name], WORKING_SET / (time.perf_counter() - began_s) / 1e6)
    check(rounds.target == rounds.source)
    rounds.empty()
    return {"size_bytes": float(size), **best}


def measure_contains(store: PoolStore, seconds: float) -> dict[str, float]:
    """Microseconds of `contains` with 256 keys, half of them present."""
    keys = [hashlib.sha256(f"q{i}".encode()).digest() for i in range(256)]
    for each in keys[::2]:
        put_payload(
            store,
            NewPayload(b"x" * 64, PayloadKind.FEATURE, key=each, dtype="uint8", shape=(64,)),
            app="bench",
            deadline_s=DEADLINE_S,
        )
    took: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        mask = store.contains(keys, deadline_s=DEADLINE_S)
        took.append((time.perf_counter() - began_s) * 1e6)
        if mask != b"\1\0" * 128:
            raise SystemExit("contains gave a wrong answer")
    took.sort()
    return {"p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "samples": float(len(took))}


def machine() -> dict[str, str]:
    names = [
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return {
        "cpu": f"{len(names)} x {names[0] if names else platform.processor()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def show(result: dict[str, object]) -> None:
    console = Console(width=110)
    console.print(*(f"{name}: {text}" for name, text in result["machine"].items()), sep="\n")  # type: ignore[attr-defined]
    table = Table("size", "memcpy", *WAYS, title="MB/s, and as a part of memcpy")
    for row in result["sizes"]:  # type: ignore[attr-defined]
        base = row["memcpy"]
        cells = [f"{row[way]:.0f} ({row[way] / base:.2f})" for way in WAYS]
        table.add_row(f"{row['size_bytes'] / (1 << 20):g} MiB", f"{base:.0f}", *cells)
    console.print(table)
    question = result["contains_256_keys_us"]
    console.print(f"contains, 256 keys: p50 {question['p50']:.0f} us, p99 {question['p99']:.0f} us")  # type: ignore[index]
    console.print(f"targets: put and get >= {TARGET} of memcpy from 1 MiB, contains p50 <= 100 us")


if __name__ == "__main__":
    sys.exit(main())
