"""Weights that are replaced from a checkpoint while an engine runs: it shares again, as that checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.stack import forget_prefixes

from devkit import checkpoints
from devkit.engines import data_url, photos, wait_until
from devkit.processes import StoreProcess, together
from devkit.sglang_engine import SglangServer, sglang_python

pytestmark = [
    pytest.mark.integration,
    pytest.mark.stress,
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
]

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


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[StoreProcess]:
    with StoreProcess(folder / "store.sock") as store:
        yield store


def sharing(store: StoreProcess, model: Path, name: str) -> SglangServer:
    env = {"CORNPLUG_STORE_AUTOSTART": "false", "CORNPLUG_STORE_LOAD_WHEN": "always"}
    return SglangServer(
        model, "--cornplug-app", name, "--cornplug-store", str(store.socket),
        log=store.socket.parent / f"{name}.log", env=env,
    )  # fmt: skip


def update(server: SglangServer, path: Path) -> None:
    answer = httpx.post(
        f"{server.url}/update_weights_from_disk", json={"model_path": str(path)}, timeout=120, trust_env=False
    )
    assert answer.json()["success"], answer.text


def look(server: SglangServer, *, system: str = "You see well.") -> tuple[int, ...]:
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


def wait_for_image(server: SglangServer) -> None:
    """Until the server has counted one that it took from the store."""
    wait_until(
        lambda: server.metric("cornplug_hits_total", what="embedding", source="store") > 0,
        deadline_s=20,
        what="an embedding from the store",
    )


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
        assert updated.metric("cornplug_hits_total", what="embedding") == 0, "none of the old tower"
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
