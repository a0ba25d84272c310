"""An engine with the default settings: pages that load faster are loaded, the rest computed, with equal
answers."""

from __future__ import annotations

from pathlib import Path

import httpx

from devkit import checkpoints
from devkit.engines import VllmServer

WORDS = "the cat sat on a mat and then it went to the door of the house where the dog was "


def test_engine_default_settings_measure_loads_and_answer_alike(tmp_path: Path, short_path: Path) -> None:
    model = checkpoints.llava(tmp_path / "llava")
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "CORNPLUG_STORE_LOAD_WHEN": "pays",
        "CORNPLUG_STORE_SOCKET": str(short_path / "s.sock"),
        "CORNPLUG_STORE_SIZE_BYTES": str(256 << 20),
    }
    with VllmServer(model, "--kv-connector", "cornplug", log=tmp_path / "log", env=env) as server:
        prompts = [f"{i} " + WORDS * n for i, n in enumerate((1, 2, 4, 8, 16, 3, 12, 6))]
        answers = [server.chat(prompt, max_tokens=4) for prompt in prompts]
        for _ in range(3):
            httpx.post(f"{server.url}/reset_prefix_cache", timeout=10, trust_env=False).raise_for_status()
            for prompt, answer in zip(prompts, answers, strict=True):
                assert server.chat(prompt, max_tokens=4).token_ids == answer.token_ids
        hits = server.metric("cornplug_hits_total", kind="kv_page")
        cheaper = server.metric("cornplug_misses_total", kind="kv_page", reason="cheaper")
        assert hits + cheaper > 0
    log = (tmp_path / "log").read_text()
    lines = [line for line in log.splitlines() if "measured: KV loads at" in line]
    print(f"{hits=} {cheaper=}", *lines, sep="\n")
    assert lines
