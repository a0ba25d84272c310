"""How fast KV moves between SGLang's host pool and the store, in each host layout, beside a plain memcpy.

    python benchmarks/kv_moves_sglang.py [--quick] [--threads N | --cpu-time] [--out DIR]

Pages of Llama 3 8B (32 layers, 8 heads of 128, bfloat16) in host memory of SGLang's shapes. As under SGLang,
cornplug's writer saves them into a real store of another process, and its reader loads them into other
pages. "before" are the same reader and writer with one page at a time, through memory of a page's size.
Speeds are of one thread; with `--threads` also of so many side by side. On a machine whose cores other work
shares, `--cpu-time` counts the seconds that this process computes in place of those that pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machine
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cornplug.codec import checksum
from cornplug.config import StoreConfig
from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.shared_flags import load_settings
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace, PageHashIndex
from cornplug.sglang_hooks.kv_pages.reader import PageReader, PoolContext, RankPool
from cornplug.sglang_hooks.kv_pages.writer import PageWriter
from cornplug.store.client import PoolStore
from devkit.page_by_page import PageByPage
from devkit.processes import StoreProcess

_PAGE = PageGeometry(page_tokens=64, heads=8, layers=32, dim=128, dtype="bfloat16")
_LAYOUTS = ("page_first", "layer_first", "page_first_direct", "page_head")
_DEADLINE_S = 5.0
_MEMCPY = "memcpy"

Speeds = dict[str, list[float]]

_clock: Callable[[], float] = time.perf_counter


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half the bytes, fewer rounds")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--threads", type=int, default=1, help="also with so many side by side")
    either.add_argument("--cpu-time", action="store_true", help="count this process's CPU seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if args.cpu_time:
        global _clock
        _clock = time.process_time
    described = machine.describe()
    pages, rounds = (8, 3) if args.quick else (16, 9)
    speeds: Speeds = {}
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as name:
        folder = Path(name)
        config = StoreConfig(
            socket=folder / "s.sock", size_bytes=1 << 30, secret_file=folder / "secret", autostart=False
        )
        secret = {"CORNPLUG_STORE_SECRET_FILE": str(config.secret_file)}
        with StoreProcess(config.socket, size="1GiB", env=secret):
            store = PoolStore(config, connect_timeout_s=10)
            try:
                speeds |= plain_copies(pages * _PAGE.page_bytes, rounds)
                for layout in _LAYOUTS:
                    speeds |= HostMoves(store, layout, pages, args.threads).measure(rounds)
            finally:
                store.close()
    flags = " --quick" * args.quick + " --cpu-time" * args.cpu_time
    flags += f" --threads {args.threads}" * (args.threads > 1)
    show(speeds, described, args.out, flags)
    return 0


def plain_copies(size: int, rounds: int) -> Speeds:
    """GB/s of memcpy between two buffers of this process, and with the store's checksum after it."""
    here, there = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)

    def copied_and_summed() -> None:
        np.copyto(there, here)
        checksum(there.data)

    ways: dict[str, Callable[[], float]] = {
        _MEMCPY: lambda: _timed(lambda: np.copyto(there, here)),
        "memcpy and checksum": lambda: _timed(copied_and_summed),
    }
    return _in_turns(ways, size, rounds)


class HostMoves:
    """A host pool, a reader and a writer of one rank, and one prompt's pages."""

    def __init__(self, store: PoolStore, layout: str, pages: int, threads: int) -> None:
        self._store, self._layout, self._threads = store, layout, threads
        heads, layers, planes, tokens, dim = _PAGE.shape
        slots = 2 * pages * tokens
        shape = {
            "layer_first": (planes, layers, slots, heads, dim),
            "page_first": (planes, slots, layers, heads, dim),
            "page_first_direct": (planes, 2 * pages, layers, tokens, heads, dim),
            "page_head": (planes, 2 * pages, heads, tokens, layers, dim),
        }[layout]
        values = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=_generator())
        pool = SimpleNamespace(
            page_size=tokens, size=slots, layout=layout, kv_buffer=values.view(torch.bfloat16)
        )
        self._host = HostPages(pool, latent=False)
        self._mine = RankPages(_PAGE, RankSlice(heads=range(heads), layers=range(layers), writes=True), store)
        run: Any = SimpleNamespace(
            config=load_settings({"engine.app": "bench"}),
            app="bench",
            secret=bytes(32),
            store=store,
            deadline_s=_DEADLINE_S,
            background_timeout_s=_DEADLINE_S,
            open_connection=lambda: store,
        )
        index, roots = PageHashIndex(tokens, tokens), SimpleNamespace(root=lambda space: bytes(32))
        self._hashes = [f"{layout} {i}" for i in range(pages)]
        index.record(None, self._hashes, array("q", range(pages * tokens)), CacheNamespace(None, layout))
        pace = LoadPace("always", _PAGE.page_bytes / tokens)
        context = PoolContext(run, index, Tally(), pace, lambda: False)
        pool = RankPool(self._mine, self._host)
        self.reader = PageReader(context, roots, pool)  # type: ignore[arg-type]
        self.writer = PageWriter(context, self.reader, pool, None)
        # Scattered, as pages of a busy pool are; loads go into the other half.
        order = np.random.default_rng(0).permutation(pages)
        self.source = [int(page) * tokens for page in order]
        self.target = [(int(page) + pages) * tokens for page in reversed(order)]
        self.bytes = pages * _PAGE.page_bytes
        parts = index.find(self._hashes)
        self._keys = [
            self.reader.store_keys(page, index.overlaps(page)[0], self.reader.roots())[0]
            for page in parts
            if page is not None
        ]

    def save(self) -> float:
        """Seconds to save all pages; the store is emptied of them first."""
        self._store.delete(self._keys, deadline_s=_DEADLINE_S)
        seconds = _timed(lambda: self.writer.save(self._hashes, self.source))
        _expect(self.reader.count_leading(self._hashes)[0] == len(self._hashes), "a page was not saved")
        return seconds

    def load(self) -> float:
        """Seconds to lease, verify and copy in all pages."""
        for slot in self.target:
            self._host.page(slot).zero_()
        done: list[int] = []
        seconds = _timed(lambda: done.append(self.reader.load(self._hashes, self.target)))
        _expect(done == [len(self._hashes)], f"{done} pages loaded")
        self.check_loaded()
        return seconds

    def measure(self, rounds: int) -> Speeds:
        """GB/s of each direction, one figure a round, before and now in turns."""
        ways: dict[str, PageCopies] = {
            "before": PageByPage(self._mine, self._host),
            "now": PageCopies(self._mine, self._host),
        }
        if self._threads > 1:
            ways[f"{self._threads} threads"] = PageCopies(self._mine, self._host, threads=self._threads)

        def moved(move: Callable[[], float], copies: PageCopies) -> float:
            self.reader._copies = self.writer._copies = copies
            return move()

        turns: dict[str, Callable[[], float]] = {
            f"{name}, {self._layout}, {when}": lambda move=move, copies=copies: moved(move, copies)  # type: ignore[misc]
            for name, move in (("save", self.save), ("load", self.load))
            for when, copies in ways.items()
        }
        speeds = _in_turns(turns, self.bytes, rounds)
        for copies in ways.values():
            copies.close()
        return speeds

    def check_loaded(self) -> None:
        """Loaded pages equal the saved ones."""
        for source, target in zip(self.source, self.target, strict=True):
            # As integers: some of these bits are no numbers.
            here, there = (self._host.page(slot).view(torch.int16) for slot in (source, target))
            _expect(torch.equal(here, there), "loaded pages differ")


def show(speeds: Speeds, described: dict[str, Any], folder: Path, flags: str) -> None:
    """Print the table; write kv_moves_sglang.md and .json."""
    base = float(np.median(speeds[_MEMCPY]))
    table = Table(title="KV between SGLang's host pool and the store", caption="GB/s, median (quartiles)")
    lines = [f"# {table.title}", "", f"`python benchmarks/kv_moves_sglang.py{flags}`", ""]
    lines += [*machine.line(described).split("\n"), "", "| way | GB/s | of memcpy |", "|---|--:|--:|"]
    for heading in ("way", "GB/s", "of memcpy"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for name, found in speeds.items():
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75))
        cells = [name, f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{middle / base:.2f}"]
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
    console = Console()
    console.print(table)
    console.print(machine.line(described), highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kv_moves_sglang.md").write_text("\n".join([*lines, ""]))
    content = {"benchmark": "kv_moves_sglang", "flags": flags, "machine": described, "gb_per_s": speeds}
    (folder / "kv_moves_sglang.json").write_text(json.dumps(content, indent=1) + "\n")


def _in_turns(ways: dict[str, Callable[[], float]], size: int, rounds: int) -> Speeds:
    """GB/s of each way, one figure a round; the first round warms up."""
    speeds: Speeds = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            seconds = way()
            if i:
                speeds[name].append(size / seconds / 1e9)
    return speeds


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _timed(work: Callable[[], object]) -> float:
    began = _clock()
    work()
    return _clock() - began


def _expect(held: bool, what: str) -> None:
    if not held:
        raise SystemExit(f"kv_moves_sglang: {what}")


if __name__ == "__main__":
    sys.exit(main())
