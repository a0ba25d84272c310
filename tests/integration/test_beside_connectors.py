"""cornplug beside other KV connectors of one engine: each loads what it has, pages reach other engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from driver.lmcache import SITE, Lmcache
from integration.stack import PREAMBLE, count, forget_prefixes, wait_for_saves

from cornplug.host import free_port
from devkit import checkpoints
from devkit.engines import Answer, VllmServer, wait_until
from devkit.processes import StoreProcess, together
from devkit.vllm_beds import NIXL, bed_of_this_run

WORDS: Final = f"{PREAMBLE} {PREAMBLE} Who stands beside whom?"
PAGE: Final = 64
BLOCKS: Final = ("--block-size", "32")
EXTERNAL: Final = "vllm:external_prefix_cache_hits_total"
_BED: Final = "v1-one" if bed_of_this_run() == "v1" else None
"""vLLM has native offloading for GPUs only, and bed v1 has nothing that stands in for one. Its idle workers
spin, too: beside NIXL's threads they leave too little of two cores for answers in time."""
PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
def folder(short_path: Path) -> Iterator[Path]:
    """With a store at `s`, and a model."""
    checkpoints.qwen2_text(short_path / "model")
    with StoreProcess(short_path / "s", log=short_path / "store.log"):
        yield short_path


def flags(folder: Path, app: str) -> tuple[str, ...]:
    return ("--kv-connector", "cornplug", "--cornplug-app", app, "--cornplug-store", str(folder / "s"))


def alone(folder: Path) -> VllmServer:
    """An engine whose only KV connector is cornplug."""
    return VllmServer(folder / "model", *flags(folder, "alone"), log=folder / "alone.log")


def continues(server: VllmServer, first: Answer) -> None:
    """A fresh engine has nine tenths of the prompt from the store, and answers as the first one did."""
    again = server.chat(WORDS, max_tokens=8)
    assert again.token_ids == first.token_ids
    shareable = (first.prompt_tokens - 1) // PAGE * PAGE
    assert count(server, "saved_tokens_total", app="alone") >= 0.9 * shareable


def served_by_the_other(server: VllmServer, first: Answer, app: str) -> None:
    """Its own prefix cache emptied, the engine has its prefix from the connector that stands first."""
    forget_prefixes(server)
    again = server.chat(WORDS, max_tokens=8)
    assert again.token_ids == first.token_ids
    assert count(server, "hits_total", app=app, kind="kv_page") == 0
    assert server.metric(EXTERNAL) >= 0.9 * (first.prompt_tokens - PAGE)


def wait_for_pages(server: VllmServer, first: Answer, app: str) -> None:
    """Until the engine has saved the prompt: while it idles, from its own prefix cache, which a test empties.

    What another connector loads after that is not the engine's own, and not saved."""
    pages = (first.prompt_tokens - 1) // PAGE

    def stored() -> bool:
        return count(server, "saves_total", app=app, kind="kv_page", outcome="stored") >= 0.9 * pages

    wait_for_saves(server, stored, what="the prompt's pages")


@pytest.mark.support("Beside other connectors", "native KV offloading (`--kv-offloading-size`)")
def test_kv_connector_beside_native_offloading_reaches_a_fresh_engine(folder: Path) -> None:
    both = VllmServer(
        folder / "model", *flags(folder, "both"), *BLOCKS, "--kv-offloading-size", "0.25",
        log=folder / "both.log", env={"VLLM_SERVER_DEV_MODE": "1"}, bed=_BED,
    )  # fmt: skip
    fresh = alone(folder)
    with together(both, fresh):
        first = both.chat(WORDS, max_tokens=8)
        wait_for_pages(both, first, "both")
        served_by_the_other(both, first, "both")
        assert both.metric("vllm:kv_offload_load_bytes_total") > 0
        continues(fresh, first)


@pytest.mark.skipif(not SITE.is_dir(), reason="Run: script/site lmcache")
@pytest.mark.support("Beside other connectors", "LMCache's multi-process server")
def test_kv_connector_beside_lmcache_reaches_a_fresh_engine(folder: Path) -> None:
    with Lmcache(folder, size_gb=0.25) as lmcache:
        both = lmcache.vllm(
            folder / "model",
            *flags(folder, "both"),
            log=folder / "both.log",
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        fresh = alone(folder)
        with together(both, fresh):
            first = both.chat(WORDS, max_tokens=8)
            wait_for_pages(both, first, "both")
            served_by_the_other(both, first, "both")
            continues(fresh, first)


def of_pair(folder: Path, role: str) -> VllmServer:
    """One side of a prefill/decode pair over NIXL, with cornplug beside it."""
    nixl = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    return VllmServer(
        folder / "model", *flags(folder, role), *BLOCKS, "--kv-transfer-config", nixl,
        log=folder / f"{role}.log",
        env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        packages=(NIXL,), bed=_BED,
    )  # fmt: skip


def complete(server: VllmServer, tokens: int, transfer: dict[str, Any] | None = None) -> dict[str, Any]:
    """The whole answer to the words, as a router of a prefill/decode pair asks for it."""
    body = {
        **{
            "model": "model",
            "prompt": WORDS,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
        },
        **({} if transfer is None else {"kv_transfer_params": transfer}),
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.support("Beside other connectors", "NIXL: prefill's pages reach a third engine")
def test_prefill_decode_pair_pages_reach_a_third_engine(folder: Path) -> None:
    prefill, decode, third = of_pair(folder, "kv_producer"), of_pair(folder, "kv_consumer"), alone(folder)
    with together(prefill, decode):
        for _ in range(2):  # the second time from the prefill server's own prefix cache
            handed = complete(prefill, 1, PREFILL)["kv_transfer_params"]
            of_decode = complete(decode, 8, handed)
        prompt = of_decode["usage"]["prompt_tokens"]
        assert decode.metric(EXTERNAL) >= 0.9 * prompt
        assert count(decode, "saves_total", app="kv_consumer", outcome="stored") == 0
        shareable = (prompt - 1) // PAGE * PAGE

        def saved() -> bool:
            # A store that answered late has the pages, and says so with the next request.
            saves = partial(count, prefill, "saves_total", app="kv_producer")
            if (saves(outcome="stored") + saves(outcome="present")) * PAGE >= shareable:
                return True
            complete(prefill, 1, PREFILL)
            return False

        wait_until(saved, deadline_s=30, what="prefill's pages saved")
    with third:
        of_third = complete(third, 8)
        assert count(third, "saved_tokens_total", app="alone") >= 0.9 * shareable
    assert of_third["choices"][0]["token_ids"] == of_decode["choices"][0]["token_ids"]
