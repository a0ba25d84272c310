"""Cost of a lookup in the store to engines that ask now and then, and to engines that ask all the time.

    python benchmarks/store_lookups.py [--seconds 5] [--out DIR]

A daemon process and 1, 4 or 8 client processes, none pinned. Paced: each client asks 200 times a second, at
Poisson times, and finds all processes asleep. Closed loop: each asks again as soon as it has its answer. A
lookup is one `contains` of 1 or 256 keys, half of them present, answers checked. Latency is of the call, in
the client; the daemon's CPU is of the whole row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import machine
from rich.console import Console
from rich.table import Table

from cornplug.codec import PayloadKind
from cornplug.config import StoreConfig
from cornplug.store.client import PoolStore
from cornplug.store.payload import put_payload

RATE_HZ: Final = 200.0
CLIENTS: Final = (1, 4, 8)
KEYS: Final = (1, 256)
_DEADLINE_S: Final = 5.0
_SIZE_BYTES: Final = 64 << 20


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument(
        "--client", nargs=4, metavar=("SOCKET", "SECRET", "KEYS", "RATE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.client:
        return client(*args.client, seconds=args.seconds)
    described = machine.describe()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-")))
        config = StoreConfig(
            socket=folder / "s.sock", size_bytes=_SIZE_BYTES, secret_file=folder / "secret", autostart=False
        )
        daemon = stack.enter_context(served(config))
        fill(config)
        rows = [
            measure(config, daemon, clients, keys, rate, args.seconds)
            for rate in (RATE_HZ, 0.0)
            for keys in KEYS
            for clients in CLIENTS
        ]
    show(rows, described, args.out)
    return 0


def names(count: int) -> list[bytes]:
    """Keys of a question; every second one is in the store."""
    return [hashlib.sha256(f"q{i}".encode()).digest() for i in range(count)]


def fill(config: StoreConfig) -> None:
    store = PoolStore(config, connect_timeout_s=10)
    for key in names(max(KEYS))[::2]:
        put_payload(
            store, b"x" * 64, kind=PayloadKind.FEATURE, key=key, dtype="uint8", shape=(64,), app="bench",
            deadline_s=_DEADLINE_S,
        )  # fmt: skip
    store.close()


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


def client(socket: str, secret: str, keys: str, rate: str, *, seconds: float) -> int:
    """Ask for so long; print the latencies in microseconds as JSON."""
    config = StoreConfig(socket=Path(socket), secret_file=Path(secret), autostart=False)
    store = PoolStore(config, connect_timeout_s=10)
    asked, expected = names(int(keys)), bytes(1 - i % 2 for i in range(int(keys)))
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
        if store.contains(asked, deadline_s=_DEADLINE_S) != expected:
            raise SystemExit("the store gave a wrong answer")
        now_s = time.perf_counter()
        took_us.append((now_s - asked_s) * 1e6)
        late += bool(float(rate)) and asked_s - due_s > 1 / float(rate)
        due_s = due_s if float(rate) else now_s
    store.close()
    print(json.dumps({"took_us": took_us, "late": late}))
    return 0


def measure(
    config: StoreConfig, daemon: int, clients: int, keys: int, rate_hz: float, seconds: float
) -> dict[str, Any]:
    """One row: percentiles over all clients, calls a second together, the daemon's CPU."""
    words = [sys.executable, __file__, "--seconds", str(seconds), "--client", str(config.socket)]
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
        "p50_us": took[len(took) // 2],
        "p99_us": took[len(took) * 99 // 100],
        "calls_per_s": len(took) / spent_s,
        "daemon_cores": (cpu(daemon) - cpu_s) / spent_s,
        "late": sum(answer["late"] for answer in answers) / len(took),
    }


def cpu(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(rows: list[dict[str, Any]], described: dict[str, Any], out: Path) -> None:
    table = Table(
        "pace", "clients", "keys", "p50 us", "p99 us", "calls/s", "daemon, % of a core", title="contains"
    )
    lines = [
        "| pace | clients | keys | p50 us | p99 us | calls/s | daemon, % of a core |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            row["pace"], str(row["clients"]), str(row["keys"]), f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}", f"{row['calls_per_s']:,.0f}", f"{100 * row['daemon_cores']:.0f}",
        ]  # fmt: skip
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    Console(width=110).print(table)
    out.mkdir(parents=True, exist_ok=True)
    text = f"# Lookups in the store\n\n{__doc__.partition(chr(10))[0]}\n\n" + "\n".join(lines) + "\n\n```\n"
    text += json.dumps(described, indent=1) + "\n```\n"
    (out / "store_lookups.md").write_text(text)
    (out / "store_lookups.json").write_text(json.dumps({"machine": described, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
