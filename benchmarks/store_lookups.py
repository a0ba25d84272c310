"""Cost of lookups and copying reads in the store: by the table, by a message, and in LMDB.

    python benchmarks/store_lookups.py [--seconds 3] [--out DIR]

A daemon process and 1 or 8 client processes, none pinned, 30,000 other entries in the store. Paced: each
client asks 200 times a second, at Poisson times, and finds all processes asleep. Closed loop: each asks
again as soon as it has its answer. A lookup is of 1 or 256 keys, half of them present, answers checked:
`contains` (the table), `contains_by_message`, or one `get` a key in a read transaction of LMDB, in /dev/shm
where there is one (`pip install lmdb`, else its rows are missing). A read is `get_payload_into` of entries
of 512 MiB together, by the table or by a lease, beside memcpy. Rows of one kind follow each other in the
same run. Latency is of the call, in the client; the daemon's CPU is of the whole row.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import machine
from rich.console import Console
from rich.table import Table

from cornplug.codec import PayloadKind
from cornplug.config import StoreConfig
from cornplug.store.base import Leases, Reservation, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.payload import NewPayload, get_payload_into, put_payload

RATE_HZ: Final = 200.0
CLIENTS: Final = (1, 8)
KEYS: Final = (1, 256)
SIZES: Final = (64 << 10, 1 << 20)
LOOKUPS: Final = ("table", "message", "lmdb")
READS: Final = ("table", "lease", "memcpy")
_DEADLINE_S: Final = 5.0
_SIZE_BYTES: Final = 4 << 30
_OTHERS: Final = 30_000
_READ_BYTES: Final = 512 << 20
_BATCH: Final = 1024


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        return client(*args.client, seconds=args.seconds)
    described = machine.describe()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-", dir=_shared_folder())))
        config = StoreConfig(
            socket=folder / "s.sock", size_bytes=_SIZE_BYTES, secret_file=folder / "secret", autostart=False
        )
        daemon = stack.enter_context(served(config))
        fill(config)
        ways = [way for way in LOOKUPS if way != "lmdb" or importlib.util.find_spec("lmdb") is not None]
        if "lmdb" in ways:
            fill_lmdb(folder)
        rows = [
            measure(config, daemon, way, clients, keys, rate, args.seconds)
            for rate in (RATE_HZ, 0.0)
            for keys in KEYS
            for clients in CLIENTS
            for way in ways
        ]
        reads = [measure_reads(config, size, args.seconds) for size in SIZES]
    show(rows, reads, described, args.out)
    return 0


def _shared_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def names(count: int) -> list[bytes]:
    """Keys of a question; every second one is in the store."""
    return [digest(f"q{i}") for i in range(count)]


def stored() -> list[bytes]:
    return names(max(KEYS))[::2] + [digest(f"o{i}") for i in range(_OTHERS)]


def fill(config: StoreConfig) -> None:
    store = PoolStore(config, connect_timeout_s=10)
    keys = stored()
    for at in range(0, len(keys), _BATCH):
        rooms = store.reserve(
            [(key, 64) for key in keys[at : at + _BATCH]], ReserveTerms("bench"), deadline_s=_DEADLINE_S
        )
        written = [(room, b"") for room in rooms if isinstance(room, Reservation)]
        if len(written) < len(rooms) or not all(store.commit(written, deadline_s=_DEADLINE_S)):
            raise SystemExit("the store did not take the entries")
    store.close()


def fill_lmdb(folder: Path) -> None:
    import lmdb

    with lmdb.open(str(folder / "lmdb"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for key in stored():
            txn.put(key, b"x" * 64)


@contextmanager
def served(config: StoreConfig) -> Iterator[int]:
    """The daemon's process id."""
    command = [sys.executable, "-m", "cornplug.store.daemon.main", "--socket", str(config.socket)]
    command += ["--size", str(config.size_bytes), "--secret-file", str(config.secret_file)]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 30
        while not config.socket.exists():
            if daemon.poll() is not None or time.monotonic() > end_s:
                raise SystemExit("the store did not start")
            time.sleep(0.01)
        yield daemon.pid
    finally:
        daemon.terminate()
        daemon.wait()


def client(folder: str, way: str, secret: str, keys: str, rate: str, *, seconds: float) -> int:
    """Ask for so long; print the latencies in microseconds as JSON."""
    asked, expected = names(int(keys)), bytes(1 - i % 2 for i in range(int(keys)))
    lookup, close = opened(way, Path(folder), Path(secret))
    waits = random.Random(os.getpid())
    print("ready", flush=True)
    sys.stdin.readline()
    took_us, late = [], 0
    began_s = due_s = time.perf_counter()
    while due_s - began_s < seconds:
        if float(rate):
            due_s += waits.expovariate(float(rate))
            time.sleep(max(0.0, due_s - time.perf_counter()))
        asked_s = time.perf_counter()
        if lookup(asked) != expected:
            raise SystemExit("a wrong answer")
        now_s = time.perf_counter()
        took_us.append((now_s - asked_s) * 1e6)
        late += bool(float(rate)) and asked_s - due_s > 1 / float(rate)
        due_s = due_s if float(rate) else now_s
    close()
    print(json.dumps({"took_us": took_us, "late": late}))
    return 0


def opened(
    way: str, folder: Path, secret: Path
) -> tuple[Callable[[list[bytes]], bytes], Callable[[], object]]:
    """A function that looks keys up, and one that ends it."""
    if way == "lmdb":
        import lmdb

        env = lmdb.open(str(folder / "lmdb"), readonly=True)

        def lookup(keys: list[bytes]) -> bytes:
            with env.begin(buffers=True) as txn:
                get = txn.get
                return bytes([get(key) is not None for key in keys])

        return lookup, env.close
    store = PoolStore(
        StoreConfig(socket=folder / "s.sock", secret_file=secret, autostart=False), connect_timeout_s=10
    )
    ask = store.contains if way == "table" else store.contains_by_message
    return lambda keys: ask(keys, deadline_s=_DEADLINE_S), store.close


def measure(
    config: StoreConfig, daemon: int, way: str, clients: int, keys: int, rate_hz: float, seconds: float
) -> dict[str, Any]:
    """One row: percentiles over all clients, calls a second together, the daemon's CPU."""
    words = [sys.executable, __file__, "--seconds", str(seconds), "--client", str(config.socket.parent), way]
    words += [str(config.secret_file), str(keys), str(rate_hz)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(words, **pipes) for _ in range(clients)]  # type: ignore[call-overload]
    for one in running:
        one.stdout.readline()
    cpu_s, began_s = cpu(daemon), time.perf_counter()
    for one in running:
        one.stdin.write("go\n")
        one.stdin.flush()
    answers = [json.loads(one.communicate()[0]) for one in running]
    spent_s = time.perf_counter() - began_s
    took = sorted(us for answer in answers for us in answer["took_us"])
    return {
        "pace": f"{rate_hz:g}/s each" if rate_hz else "closed loop",
        "clients": clients,
        "keys": keys,
        "way": way,
        "p50_us": took[len(took) // 2],
        "p99_us": took[len(took) * 99 // 100],
        "calls_per_s": len(took) / spent_s,
        "daemon_cores": (cpu(daemon) - cpu_s) / spent_s,
        "late": sum(answer["late"] for answer in answers) / len(took),
    }


class LeasedReads:
    """A store whose payloads are read by a lease."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self.view, self.release = store.view, store.release

    def lease(self, keys: list[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        return self._store.lease(keys, ttl_s=ttl_s, deadline_s=deadline_s)


def measure_reads(config: StoreConfig, size: int, seconds: float) -> dict[str, Any]:
    """Median microseconds of reading a payload in each way, in turns of one way after the other."""
    store = PoolStore(config, connect_timeout_s=10)
    count = _READ_BYTES // size
    keys = [digest(f"r{size} {i}") for i in range(count)]
    source = random.Random(1).randbytes(size)
    for key in keys:
        done = put_payload(
            store,
            NewPayload(source, PayloadKind.FEATURE, key=key, dtype="uint8", shape=(size,)),
            app="bench",
            deadline_s=_DEADLINE_S,
        )
        if done != "stored":
            raise SystemExit(f"the store did not take a payload: {done}")
    target = memoryview(bytearray(size))
    leases = store.lease(keys, ttl_s=60, deadline_s=_DEADLINE_S)
    views = [store.view(lease.location) for lease in leases if lease is not None]
    store.release([lease.token for lease in leases if lease is not None], deadline_s=_DEADLINE_S)
    leased = LeasedReads(store)

    def read(way: str, i: int) -> None:
        if way == "memcpy":
            target[:] = views[i]
        elif (
            get_payload_into(store if way == "table" else leased, keys[i], target, deadline_s=_DEADLINE_S)
            is None
        ):
            raise SystemExit("a payload is gone")

    took: dict[str, list[float]] = {way: [] for way in READS}
    end_s = time.perf_counter() + len(READS) * seconds
    while time.perf_counter() < end_s:
        for way in READS:
            for i in range(count):
                began_s = time.perf_counter()
                read(way, i)
                took[way].append((time.perf_counter() - began_s) * 1e6)
    if target != source:
        raise SystemExit("wrong bytes")
    store.delete(keys, deadline_s=_DEADLINE_S)
    store.close()
    return {"size_bytes": size} | {f"{way}_us": sorted(us)[len(us) // 2] for way, us in took.items()}


def cpu(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(
    rows: list[dict[str, Any]], reads: list[dict[str, Any]], described: dict[str, Any], out: Path
) -> None:
    tables = [
        (
            "Lookups",
            ["pace", "keys", "clients", "by", "p50 us", "p99 us", "calls/s", "daemon, % of a core"],
            [
                [
                    row["pace"], str(row["keys"]), str(row["clients"]), row["way"], f"{row['p50_us']:.1f}",
                    f"{row['p99_us']:.0f}", f"{row['calls_per_s']:,.0f}", f"{100 * row['daemon_cores']:.1f}",
                ]
                for row in rows
            ],
        ),
        (
            "Verified copying reads, and memcpy of the same bytes",
            ["KiB", *(f"{way}, us" for way in READS), "lease : table"],
            [
                [
                    str(row["size_bytes"] >> 10), *(f"{row[f'{way}_us']:.0f}" for way in READS),
                    f"{row['lease_us'] / row['table_us']:.1f}",
                ]
                for row in reads
            ],
        ),
    ]  # fmt: skip
    lines = [f"# Lookups in the store\n\n{__doc__.partition(chr(10))[0]}\n"]
    for title, heads, cells in tables:
        table = Table(*heads, title=title)
        for each in cells:
            table.add_row(*each)
        Console(width=110).print(table)
        lines += [f"## {title}\n", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        lines += ["| " + " | ".join(each) + " |" for each in cells] + [""]
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n```\n" + json.dumps(described, indent=1) + "\n```\n"
    (out / "store_lookups.md").write_text(text)
    found = {"machine": described, "rows": rows, "reads": reads}
    (out / "store_lookups.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
