"""Tensor-parallel SGLang on one store: pages that two ranks write are whole for every reader, a flush in
the middle of a save ends nothing, and where KV cannot be shared the server is stock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from integration.stack import forget_prefixes

from devkit import checkpoints
from devkit.engines import wait_until
from devkit.processes import StoreProcess, together
from devkit.sglang_engine import SglangServer, sglang_python

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
]

TOKENS = [(7 * i + 300) % 600 for i in range(700)]
SHAREABLE = 640
"""Of them, in whole pages of 64; the last token is always computed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return checkpoints.qwen2_text(folder / "model")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[StoreProcess]:
    with StoreProcess(folder / "store.sock") as store:
        yield store


@pytest.fixture(scope="module")
def servers(store: StoreProcess, model: Path) -> Iterator[Mapping[str, SglangServer]]:
    """Two ranks, one rank, and a server whose flags exclude sharing."""
    flags = {"two": ("--tp-size", "2"), "one": (), "chunks": ("--chunked-prefill-size", "100")}
    servers = {name: server(store, model, name, *args) for name, args in flags.items()}
    with together(*servers.values()):
        yield servers


def server(store: StoreProcess, model: Path, name: str, *args: str) -> SglangServer:
    folder = store.socket.parent
    env = {
        "CORNPLUG_STORE_AUTOSTART": "false",
        # Each rank its own core, and not the same one twice.
        **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "--tp-size" in args else {}),
    }
    return SglangServer(
        model, "--cornplug-app", name, "--cornplug-store", str(store.socket), *args,
        log=folder / f"{name}.log", env=env,
    )  # fmt: skip


@pytest.mark.support("Sharing", "pages of two ranks are read by one", engine="sglang")
def test_sglang_pages_of_two_ranks_are_read_by_one(
    store: StoreProcess, servers: Mapping[str, SglangServer]
) -> None:
    two, one = servers["two"], servers["one"]
    wrote = two.generate(TOKENS, max_tokens=8)
    assert wrote.cached["storage"] == 0
    # Both ranks copy it in one turn once they idle.
    wait_until(lambda: store.stat().entries >= SHAREABLE // 64, deadline_s=90, what="pages of an idle server")
    # SGLang stops the ranks' threads one after the other, in the middle of a write too.
    for i in range(1, 6):
        for _ in range(2):
            two.generate([i, *TOKENS], max_tokens=1)
        forget_prefixes(two)
    store.settle()
    again = two.generate(TOKENS, max_tokens=8)
    assert again.cached["storage"] == SHAREABLE
    assert again.output_ids == wrote.output_ids

    read = one.generate(TOKENS, max_tokens=8)
    assert read.cached["storage"] == SHAREABLE
    assert read.output_ids == wrote.output_ids
    # The store has nothing of this prompt, and the server waits for nothing.
    assert one.generate([9, *TOKENS], max_tokens=1).cached["storage"] == 0
    assert two.metric("cornplug_saves_total", kind="kv_page", outcome="write_failed") == 0


def test_sglang_flags_without_shareable_kv_run_as_stock(
    store: StoreProcess, servers: Mapping[str, SglangServer]
) -> None:
    server = servers["chunks"]
    first = server.generate(TOKENS, max_tokens=4)
    again = server.generate(TOKENS, max_tokens=4)
    info = httpx.get(f"{server.url}/server_info", timeout=10, trust_env=False).json()
    assert again.output_ids == first.output_ids
    assert again.cached_tokens == len(TOKENS) - 1  # pages of one token, as stock has them
    assert (info["page_size"], info["enable_hierarchical_cache"]) == (1, False)
    assert "KV is not shared, only embeddings: --chunked-prefill-size 100" in server.log.read_text()
    assert not store.stat().bytes_by_app.get("chunks")
