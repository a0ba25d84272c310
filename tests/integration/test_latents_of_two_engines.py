"""vLLM and SGLang of one MLA model continue each other's prefixes: both cache the same latents."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from integration.stack import PREAMBLE, count, forget_prefixes, settle_saves

from devkit import checkpoints
from devkit.engines import Answer, EngineServer, VllmServer
from devkit.processes import StoreProcess, at_once
from devkit.sglang_engine import SglangServer, sglang_python

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
]

PAGE: Final = 64
FROM: Final[Mapping[str, Sequence[str]]] = {
    "vllm": (f"{PREAMBLE} What is a cache?", f"{PREAMBLE} {PREAMBLE} Say it again."),
    "sglang": (f"Begin with the end. {PREAMBLE}", f"Who is it? {PREAMBLE} {PREAMBLE}"),
}
"""Prompts by the engine that computes them first."""

# The width that vLLM's CPU kernel is compiled for: 512 + 64.
_LATENTS: Final = partial(checkpoints.deepseek_v2, kv_lora_rank=512, rope_dim=64)
MODELS: Final = {"DeepSeek-V2": _LATENTS, "DeepSeek-V3": partial(_LATENTS, version=3)}


class Engines:
    """An engine of each kind on one store, after stock ones have answered every prompt."""

    def __init__(self, model: Path, folder: Path, sockets: Path) -> None:
        self.store = StoreProcess(sockets / "s", size="256MiB", log=folder / "store.log")
        shares = {"CORNPLUG_STORE_AUTOSTART": "false", "VLLM_SERVER_DEV_MODE": "1"}
        # vLLM caches no prefixes of MLA on a CPU, so an idle engine has no pages to copy.
        to_store = ("--cornplug-store", str(sockets / "s"), "--cornplug-save", "always", "--cornplug-app")
        self.stock: dict[str, dict[str, Answer]] = {}
        self._plain: Mapping[str, EngineServer] = {
            "vllm": VllmServer(model, log=folder / "stock-vllm.log"),
            "sglang": SglangServer(model, log=folder / "stock-sglang.log"),
        }
        self.of: Mapping[str, EngineServer] = {
            "vllm": VllmServer(
                model, "--kv-connector", "cornplug", *to_store, "vllm", log=folder / "vllm.log", env=shares
            ),
            "sglang": SglangServer(model, *to_store, "sglang", log=folder / "sglang.log", env=shares),
        }

    def start(self) -> None:
        """Ask stock engines, end them, and start those that share."""

        def answers(name: str) -> None:
            with self._plain[name] as server:
                self.stock[name] = {words: ask(server, words) for words in (*FROM["vllm"], *FROM["sglang"])}

        at_once(partial(answers, "vllm"), partial(answers, "sglang"))
        self.store.start()
        at_once(*(server.start for server in self.of.values()))

    def stop(self) -> None:
        for server in self.of.values():
            server.stop()
        self.store.stop()


def ask(server: EngineServer, words: str) -> Answer:
    return server.chat(words, max_tokens=8)


def same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.fixture(scope="module", params=MODELS)
def engines(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder, sockets = tmp_path_factory.mktemp("latents"), Path(tempfile.mkdtemp(prefix="cp-"))
    found = Engines(MODELS[request.param](folder / "model"), folder, sockets)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.mark.support("Both engines", "MLA", engine="vllm sglang")
@pytest.mark.parametrize(("first", "then"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_latents_of_the_other_engine_are_continued(engines: Engines, first: str, then: str) -> None:
    writer, reader = engines.of[first], engines.of[then]
    for words in FROM[first]:
        same(ask(writer, words), engines.stock[first][words])
    settle_saves(writer, engines.store)
    for words in FROM[first]:
        # No question about what this engine itself has just computed.
        forget_prefixes(reader)
        saved = count(reader, "saved_tokens_total", app=then)
        answer = ask(reader, words)
        same(answer, engines.stock[then][words])
        shareable = (answer.prompt_tokens - 1) // PAGE * PAGE
        assert count(reader, "saved_tokens_total", app=then) - saved >= 0.9 * shareable
