"""Time to first token after everything on the host was killed, with the prefixes on the store's disk.

    python benchmarks/disk_restart.py [--quick] [--out DIR]

An engine with cornplug answers prompts of about 1,500 tokens; when the store has them on disk, the engine and
the store are killed, and the page cache forgets the disk's files. Then a new store with the same disk, a
fresh engine with cornplug and a fresh stock engine get the same prefixes with a new last question, in turns.
Each prefix is read from disk once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from driver import models
from driver.prefixes import ask_fresh_pair
from driver.requests import Request, words
from driver.stage import VLLM, Stage, hits, options, stage
from driver.table import Report

from devkit.engines import StoreProcess, wait_until

TARGET = 0.3
_LLM = {"hidden_size": 1024, "layers": 16, "heads": 16}
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4")
_PREFIX_TOKENS = 1500
_WRITTEN_S = 300


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers = 8 if chosen.quick else _LLM["layers"]
    report = Report(
        name="disk_restart",
        title="After a restart of the host, 1.5k-token prefix on disk: time to first token",
        quick=chosen.quick,
        set_up=[
            f"Qwen2 of {layers} layers of 1024 (16 heads of 64), float32, random weights: a page has "
            f"{layers // 2} MiB.",
            f"Prefixes of about {_PREFIX_TOKENS} tokens, then a last question that no engine has seen.",
            "Engine and store were killed (SIGKILL) once all pages were on disk; the page cache then gave up "
            "the disk's files (fdatasync, POSIX_FADV_DONTNEED).",
            "Stock and cornplug: same checkpoint and flags, prefix caching on, both fresh, warmed up with "
            "the same unrelated prompts, asked in turns; the other one idles meanwhile.",
        ],
    )
    model = models.qwen2_text(**{**_LLM, "layers": layers})
    with stage(flags=_FLAGS, kv_gib=3) as here:
        measure(report, here, model, 3 if chosen.quick else 8)
    report.show()
    report.write(chosen.out)
    return 0


def measure(report: Report, here: Stage, model: Path, count: int) -> None:
    """Fill `report` with `count` prefixes."""
    disk = here.folder / "disk"
    asked = [Request(words(_PREFIX_TOKENS, i)) for i in range(count)]
    _serve_and_kill(here, model, disk, asked)
    _forget(disk)
    with _store(here, disk) as store, here.pair(model, "second") as pair:
        row = "TTFT, prefix on disk"
        ask_fresh_pair(report, pair, asked, warm_tokens=_PREFIX_TOKENS, row=row, target=TARGET)
        stat = store.stat().disk
    assert stat is not None, "the store has a disk"
    report.facts["pages that the store read from disk"] = f"{stat.reads}"
    bytes_a_prefix = sum(file.stat().st_size for file in disk.glob("segment-*")) // count
    times = list(islice(_device_times(disk, bytes_a_prefix), count))
    report.facts["the device alone, for as many bytes as a prefix has"] = (
        f"{np.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}) for {bytes_a_prefix >> 20} MiB"
    )


def _store(here: Stage, disk: Path) -> StoreProcess:
    """Not started."""
    flags = ("--disk", str(disk), "--disk-size", "8GiB")
    return StoreProcess(here.store_socket, *flags, size="6GiB", env=here.env)


def _serve_and_kill(here: Stage, model: Path, disk: Path, asked: Sequence[Request]) -> None:
    store, first = _store(here, disk), here.cornplug(model, "first", VLLM, "--cornplug-save", "always")
    store.start()
    try:
        first.start()
        pages = 0
        for request in asked:
            pages += (request.then("who is this").ask(first).prompt_tokens - 1) // 64
        hits(first, "kv_page")  # two more steps: saved pages are committed

        store.settle(deadline_s=_WRITTEN_S)

        def written() -> bool:
            stat = store.stat()
            return stat.disk is not None and stat.disk.entries >= stat.entries and not stat.disk.queued

        wait_until(written, deadline_s=_WRITTEN_S, what="all pages on disk")
        if store.stat().entries < 0.95 * pages:
            raise SystemExit(f"the store has {store.stat().entries} of {pages} pages: no fair measurement")
    finally:
        first.kill()
        store.kill()


def _forget(disk: Path) -> None:
    """Have the page cache give up the disk's files, as after a restart."""
    for file in disk.glob("segment-*"):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _device_times(disk: Path, size_bytes: int) -> Iterator[float]:
    """Seconds of plain reads of so many bytes, one after another, that the page cache does not have."""
    _forget(disk)
    for file in sorted(disk.glob("segment-*")):
        with file.open("rb", buffering=0) as segment:
            for _ in range(file.stat().st_size // size_bytes):
                began_s, left = time.perf_counter(), size_bytes
                while left and (got := len(segment.read(min(left, 8 << 20)))):
                    left -= got
                yield time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
