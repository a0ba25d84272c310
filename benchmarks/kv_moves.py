"""How fast KV moves between an engine's blocks and the store, beside a plain memcpy.

    python benchmarks/kv_moves.py [--quick] [--out DIR]

A slice of a 7B model's cache (some of its layers, 32 heads of 128, bfloat16) in the layout of
vLLM's CPU backend, found and verified as an engine does. One KVWorker saves the pages of a
prompt into a real pool store of another process and loads them into other blocks; memcpy
moves the same bytes between two buffers of this process. Speeds are of one thread.
"""

from __future__ import annotations

import argparse
import hashlib
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

from cornplug.codec import PayloadHeader, PayloadKind, checksum, encode_header
from cornplug.config import StoreConfig
from cornplug.engine_common.rank_pages import RankPages
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.vllm_connector.kv.group_worker import GroupWorker
from cornplug.vllm_connector.kv.metadata import PageLoad, PageSave, PageWrite
from cornplug.vllm_connector.kv.worker import KVWorker
from cornplug.vllm_connector.kv_copies.layout import WriteOp
from devkit.processes import StoreProcess

_HEADS, _DIM, _PAGE_TOKENS = 32, 128, 64
_BLOCK_TOKENS = 128
_DEADLINE_S = 5.0


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half the bytes, fewer rounds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    described = machine.describe()
    tokens, rounds = (1024, 5) if args.quick else (2048, 15)
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as name:
        folder = Path(name)
        config = StoreConfig(
            socket=folder / "s.sock", size_bytes=1 << 30, secret_file=folder / "secret", autostart=False
        )
        secret = {"CORNPLUG_STORE_SECRET_FILE": str(config.secret_file)}
        with StoreProcess(config.socket, size="1GiB", env=secret):
            store = PoolStore(config, connect_timeout_s=10)
            try:
                speeds = Moves(store, layers=4, tokens=tokens).measure(rounds)
            finally:
                store.close()
    show(speeds, described, args.out, quick=args.quick)
    return 0


def backend_write() -> WriteOp:
    """The cache-write operation of vLLM's CPU attention, on the same views as its backend."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, _BLOCK_TOKENS, _DIM, "auto")

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, block_tokens, _ = cache.shape
        planes = cache.view(blocks, heads, 2 * block_tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, *planes, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    return write


class Moves:
    """One worker, one store, one prompt's pages."""

    def __init__(self, store: PoolStore, layers: int, tokens: int) -> None:
        self.store = store
        self.page = PageGeometry(
            page_tokens=_PAGE_TOKENS, heads=_HEADS, layers=layers, dim=_DIM, dtype="bfloat16"
        )
        mine = RankSlice(heads=range(_HEADS), layers=range(layers), writes=True)
        blocks = tokens // _BLOCK_TOKENS
        write = backend_write()
        self.caches = [
            torch.zeros(2 * blocks, _HEADS, _BLOCK_TOKENS, 2 * _DIM, dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        generator = torch.Generator().manual_seed(0)
        for cache in self.caches:
            key, value = (
                torch.randn(tokens, _HEADS, _DIM, generator=generator).to(torch.bfloat16) for _ in range(2)
            )
            write(key, value, cache, torch.arange(tokens))
        impl = SimpleNamespace(do_kv_cache_update=lambda _, *rest: write(*rest))
        names = [str(i) for i in range(layers)]
        group = GroupWorker(RankPages(self.page, mine, store), _BLOCK_TOKENS, _DEADLINE_S)
        self.worker = KVWorker([group], [names])
        layer = SimpleNamespace(impl=impl)
        self.worker.register(dict(zip(names, self.caches, strict=True)), dict.fromkeys(names, layer))
        # Scattered, as blocks of a busy engine are; loads go into the other half.
        order = np.random.default_rng(0).permutation(blocks)
        self.source = tuple(int(b) for b in order)
        self.target = tuple(int(b) + blocks for b in reversed(order))
        self.tokens = tokens
        self.keys = [hashlib.sha256(f"page {i}".encode()).digest() for i in range(tokens // _PAGE_TOKENS)]
        self.bytes = len(self.keys) * self.page.page_bytes

    def save(self) -> float:
        """Seconds to copy all pages out and commit them; the store is emptied of them first."""
        self.store.delete(self.keys, deadline_s=_DEADLINE_S)
        began = time.perf_counter()
        replies = self.store.reserve(
            [(key, self.page.page_bytes) for key in self.keys], ReserveTerms("bench"), deadline_s=_DEADLINE_S
        )
        given = [reservation for reservation in replies if isinstance(reservation, Reservation)]
        _expect(len(given) == len(self.keys), f"reservations {replies}")
        writes = tuple(
            PageWrite(i, reservation.token, reservation.location) for i, reservation in enumerate(given)
        )
        self.worker.start_saves([PageSave("r", writes, self.source)])
        self.worker.drain()
        acks = self.worker.take_acks()
        _expect(acks is not None and not acks.failed_writes and not acks.unusable_reason, f"{acks}")
        assert acks is not None
        metas = []
        for reservation in given:
            sums = acks.written[reservation.token]
            segments = tuple(sums[i] for i in range(self.page.segments))
            header = PayloadHeader(
                PayloadKind.KV_PAGE, reservation.key, self.page.dtype, self.page.shape, segments
            )
            metas.append((reservation, encode_header(header)))
        _expect(all(self.store.commit(metas, deadline_s=_DEADLINE_S)), "commit")
        return time.perf_counter() - began

    def load(self) -> float:
        """Seconds to lease, verify and copy in all pages."""
        began = time.perf_counter()
        leases = self.store.lease(self.keys, ttl_s=30, deadline_s=_DEADLINE_S)
        _expect(None not in leases.metas, "a page is gone")
        self.worker.start_loads([PageLoad("r", 0, self.tokens, 0, leases, array("q", self.target))])
        self.worker.drain()
        acks = self.worker.take_acks()
        _expect(acks is None or not acks.failed_loads, f"{acks}")
        self.store.release(leases.unique_tokens, deadline_s=_DEADLINE_S)
        return time.perf_counter() - began

    def check_loaded(self) -> None:
        """Loaded blocks equal the saved ones."""
        for cache in self.caches:
            _expect(torch.equal(cache[list(self.source)], cache[list(self.target)]), "loaded blocks differ")

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """GB/s of each way, one figure a round; the first round of each warms up."""
        here, there = np.ones(self.bytes, dtype=np.uint8), np.ones(self.bytes, dtype=np.uint8)

        def copied_and_summed() -> None:
            np.copyto(there, here)
            checksum(there.data)

        ways: dict[str, Callable[[], float]] = {
            "memcpy": lambda: _timed(lambda: np.copyto(there, here)),
            "memcpy and checksum": lambda: _timed(copied_and_summed),
            "save": self.save,
            "load": self.load,
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(rounds + 1):
            for name, way in ways.items():
                seconds = way()
                if i:
                    speeds[name].append(self.bytes / seconds / 1e9)
        self.check_loaded()
        return speeds


def show(speeds: dict[str, list[float]], described: dict[str, Any], folder: Path, *, quick: bool) -> None:
    """Print the table; write kv_moves.md, .json and .png."""
    base = float(np.median(speeds["memcpy"]))
    table = Table(title="KV between blocks and store", caption="GB/s of one thread, median (quartiles)")
    lines = ["# KV between blocks and store", "", f"`python benchmarks/kv_moves.py{' --quick' * quick}`", ""]
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
    (folder / "kv_moves.md").write_text("\n".join([*lines, "", "![speeds](kv_moves.png)", ""]))
    content = {"benchmark": "kv_moves", "quick": quick, "machine": described, "gb_per_s": speeds}
    (folder / "kv_moves.json").write_text(json.dumps(content, indent=1) + "\n")
    _plot(speeds, folder / "kv_moves.png")


def _plot(speeds: dict[str, list[float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.4), layout="constrained")
    axes.boxplot(list(speeds.values())[::-1], orientation="horizontal", tick_labels=list(speeds)[::-1])
    axes.set_xlim(left=0)
    axes.set_xlabel("GB/s of one thread")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _expect(held: bool, what: str) -> None:
    if not held:
        raise SystemExit(f"kv_moves: {what}")


if __name__ == "__main__":
    sys.exit(main())
