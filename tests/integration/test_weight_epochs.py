"""Weights that are replaced while an engine runs, from a checkpoint or by a trainer that names them: it
shares again, as that checkpoint or under that name."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from integration.stack import PREAMBLE, forget_prefixes
from safetensors.torch import load_file

from devkit import checkpoints
from devkit.engines import EngineServer, VllmServer, data_url, photos, wait_until
from devkit.processes import StoreProcess, together
from devkit.sglang_engine import SglangServer, sglang_python

TOKENS = [(7 * i + 300) % 600 for i in range(700)]
SHAREABLE = 640
"""Of them, in whole pages of 64; the last token is always computed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("epochs")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """Two checkpoints of one shape."""
    return {
        "old": checkpoints.qwen2_vl(folder / "old"),
        "new": checkpoints.qwen2_vl(folder / "new", llm_seed=21, tower_seed=22),
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """Empty: pages and embeddings of one test would be hits of the other engine's."""
    with StoreProcess(tmp_path / "store.sock") as store:
        yield store


def sharing(store: StoreProcess, model: Path, name: str, *flags: str) -> SglangServer:
    env = {"CORNPLUG_STORE_AUTOSTART": "false", "CORNPLUG_STORE_LOAD_WHEN": "always"}
    return SglangServer(
        model, "--cornplug-app", name, "--cornplug-store", str(store.socket), *flags,
        log=store.socket.parent / f"{name}.log", env=env,
    )  # fmt: skip


def update(server: SglangServer, path: Path) -> None:
    answer = httpx.post(
        f"{server.url}/update_weights_from_disk", json={"model_path": str(path)}, timeout=120, trust_env=False
    )
    assert answer.json()["success"], answer.text


def look(server: EngineServer, *, system: str = "You see well.") -> tuple[int, ...]:
    """Tokens about an image. Behind another `system` its embedding is shared, and no page of KV."""
    image = {"type": "image_url", "image_url": {"url": data_url(photos()[0].data)}}
    words = {"type": "text", "text": "what is this?"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": [image, words]},
    ]
    return server.chat(messages, max_tokens=8).token_ids


def answer(server: SglangServer) -> tuple[tuple[int, ...], int]:
    """(tokens, tokens of the prompt that came from the store)"""
    found = server.generate(TOKENS, max_tokens=8)
    return found.output_ids, found.cached["storage"]


def wait_for_image(server: EngineServer) -> None:
    """Until the server has counted one that it took from the store."""
    wait_until(
        lambda: server.metric("cornplug_hits_total", kind="embedding", source="store") > 0,
        deadline_s=20,
        what="an embedding from the store",
    )


@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")
@pytest.mark.support(
    "Weights", "an update from a checkpoint: shares again, as that checkpoint", engine="sglang"
)
def test_sglang_whose_weights_were_updated_shares_as_the_new_checkpoint(
    store: StoreProcess, models: dict[str, Path], folder: Path
) -> None:
    updated = sharing(store, models["old"], "updated")
    fresh = sharing(store, models["new"], "fresh")
    stock = SglangServer(models["new"], log=folder / "stock.log")
    with together(updated, stock):
        before, seen_before = answer(updated)[0], look(updated)
        expected, seen_expected = answer(stock)[0], look(stock)
        otherwise = look(stock, system="Be brief.")
        assert (before, seen_before) != (expected, seen_expected)
        wait_until(lambda: store.stat().entries > SHAREABLE // 64, deadline_s=20, what="the old pages")

        update(updated, models["new"])
        assert answer(updated) == (expected, 0), "no page of the old weights"
        assert look(updated) == seen_expected
        assert updated.metric("cornplug_hits_total", kind="embedding") == 0, "none of the old tower"
        old_entries = store.stat().entries
        wait_until(
            lambda: store.stat().entries > old_entries + SHAREABLE // 64 - 2, deadline_s=30, what="new pages"
        )

        update(updated, models["old"])
        assert answer(updated) == (before, SHAREABLE), "the pages of the first epoch"
        assert look(updated) == seen_before
        store.settle()
    with fresh:
        forget_prefixes(fresh)
        tokens, stored = answer(fresh)
        assert tokens == expected
        assert stored >= 0.9 * SHAREABLE
        assert look(fresh) == seen_expected
        assert look(fresh, system="Be brief.") == otherwise
        wait_for_image(fresh)


def train(server: SglangServer, path: Path, version: str | None) -> None:
    """Update a server's weights from tensors, in two buckets; the version comes with the last."""

    def call(what: str, body: dict[str, Any]) -> None:
        answer = httpx.post(f"{server.url}/{what}", json=body, timeout=120, trust_env=False)
        assert answer.json()["success"], answer.text

    tensors = [row for file in sorted(path.glob("*.safetensors")) for row in load_file(file).items()]
    middle = len(tensors) // 2
    forget_prefixes(server)
    call("begin_weight_update", {})
    for bucket, named in ((tensors[:middle], None), (tensors[middle:], version)):
        sent = base64.b64encode(pickle.dumps(bucket)).decode()
        call("update_weights_from_tensor", {"serialized_named_tensors": [sent], "weight_version": named})
    call("end_weight_update", {})


@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")
@pytest.mark.support("Weights", "an update by a trainer that names it: shares again", engine="sglang")
def test_sglang_servers_whose_trainer_named_their_weights_share(
    store: StoreProcess, models: dict[str, Path], folder: Path
) -> None:
    with SglangServer(models["new"], log=folder / "stock-trained.log") as stock:
        expected, seen_expected = answer(stock)[0], look(stock)
    trusting = ("--cornplug-trust-weight-version", "true")
    one = sharing(store, models["old"], "one", *trusting)
    two = sharing(store, models["old"], "two", *trusting)
    with together(one, two):
        assert answer(one)[0] != expected
        old_entries = store.stat().entries
        train(one, models["new"], "run/1")
        assert answer(one) == (expected, 0), "no page of the checkpoint, old or new"
        assert look(one) == seen_expected
        wait_until(
            lambda: store.stat().entries > old_entries + SHAREABLE // 64 - 2, deadline_s=30, what="new pages"
        )
        store.settle()

        train(two, models["new"], "run/1")
        tokens, stored = answer(two)
        assert tokens == expected
        assert stored >= 0.9 * SHAREABLE, "the pages of the server that was given the same version"
        assert look(two) == seen_expected

        train(two, models["new"], "run/2")
        assert answer(two) == (expected, 0), "no page of another version"
        train(one, models["new"], None)
        assert answer(one) == (expected, 0), "no page of weights without a name"
        train(one, models["old"], "run/3")
        train(one, models["new"], "run/1")
        tokens, stored = answer(one)
        assert (tokens, stored >= 0.9 * SHAREABLE) == (expected, True)


def vllm(folder: Path, model: Path, name: str, *flags: str) -> VllmServer:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "CORNPLUG_STORE_AUTOSTART": "false",
        "CORNPLUG_STORE_LOAD_WHEN": "always",
        # vLLM wants a NUMA node a rank unless it is told otherwise.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return VllmServer(model, "--block-size", "32", *flags, log=folder / f"{name}.log", env=env)


def post(server: VllmServer, path: str, body: dict[str, Any] | None = None, **query: Any) -> None:
    url = f"{server.url}/{path}"
    httpx.post(url, json=body, params=query, timeout=120, trust_env=False).raise_for_status()


def reload(server: VllmServer, path: Path) -> None:
    post(server, "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})


def ask(server: VllmServer) -> tuple[tuple[int, ...], float]:
    """(tokens, pages that came from the store)"""
    before = server.metric("cornplug_hits_total", kind="kv_page")
    tokens = server.chat(f"{PREAMBLE} What is a cache?", max_tokens=8, ignore_eos=True).token_ids
    return tokens, server.metric("cornplug_hits_total", kind="kv_page") - before


def ask_until_stored(server: VllmServer) -> tuple[int, ...]:
    """Tokens, once all pages came from the store: the first request of an epoch may find its checkpoint
    unread."""
    found: list[tuple[int, ...]] = []

    def stored() -> bool:
        post(server, "reset_prefix_cache")
        tokens, pages = ask(server)
        found.append(tokens)
        return pages > 2

    wait_until(stored, deadline_s=60, what="pages from the store")
    assert len(set(found)) == 1
    return found[0]


_PROCESSES: Final = {
    "one process of each kind": (),
    "two ranks, two API servers": ("--tensor-parallel-size", "2", "--api-server-count", "2"),
}


@pytest.mark.parametrize("processes", _PROCESSES)
@pytest.mark.support("Weights", "a reload from a checkpoint, {processes}: shares again, as that one")
def test_vllm_whose_weights_were_reloaded_shares_as_the_new_checkpoint(
    store: StoreProcess, models: dict[str, Path], tmp_path: Path, processes: str
) -> None:
    flags = _PROCESSES[processes]
    ours = (*flags, "--kv-connector", "cornplug", "--cornplug-store", str(store.socket))
    reloaded = vllm(tmp_path, models["old"], "reloaded", *ours)
    fresh = vllm(tmp_path, models["new"], "fresh-vllm", *ours)
    stock = vllm(tmp_path, models["new"], "stock-vllm", *flags)
    with together(reloaded, stock):
        before, seen_before = ask_until_stored(reloaded), look(reloaded)
        expected, seen_expected = ask(stock)[0], look(stock)
        otherwise = look(stock, system="Be brief.")
        assert (before, seen_before) != (expected, seen_expected)
        post(reloaded, "pause", mode="abort")
        reload(reloaded, models["new"])
        post(reloaded, "resume")
        held = reloaded.metric("cornplug_hits_total", kind="embedding")
        assert ask(reloaded) == (expected, 0), "no page of the old weights"
        assert look(reloaded) == seen_expected
        assert reloaded.metric("cornplug_hits_total", kind="embedding") == held, "none of the old tower"
        assert ask_until_stored(reloaded) == expected

        reload(reloaded, models["old"])
        post(reloaded, "reset_prefix_cache")
        assert ask_until_stored(reloaded) == before, "the pages of the first epoch"
        assert look(reloaded) == seen_before
        store.settle()
    with fresh:
        assert ask_until_stored(fresh) == expected
        assert look(fresh) == seen_expected
        assert look(fresh, system="Be brief.") == otherwise
        wait_for_image(fresh)
