"""A LoRA adapter's KV goes from one engine to the other, and to no request without the adapter.

SGLang pins LoRA's host memory, which a machine without a GPU has none of: there
`dev/sglang-hicache-cpu` lets it do without.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from integration.stack import PREAMBLE, count, forget_prefixes, settle_saves
from safetensors.torch import save_file

from devkit.checkpoints import qwen2_text
from devkit.engines import Answer, EngineServer, StoreProcess, VllmServer
from devkit.processes import together
from devkit.sglang_engine import SglangServer
from devkit.vllm_beds import next_vllm

HIDDEN, LAYERS, RANK = 64, 2, 8
V_ARGS = ("--block-size", "32", "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK))
# Of SGLang's backends for LoRA the only one without a GPU's kernels.
S_ARGS = ("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "2")
PAGE_TOKENS = 64

WORDS: Mapping[str, str] = {
    "v": f"The reader is in the second house. {PREAMBLE} What is a cache?",
    "s": f"The reader is in the first house. {PREAMBLE} What is a page?",
}
"""By the engine that prefills it: they differ from their first page on."""


def adapter(folder: Path, *, layers: str = "base_model.model.model.layers", seed: int = 5) -> Path:
    """A PEFT LoRA of all attention weights, strong enough to be heard."""
    folder.mkdir()
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "model", "r": RANK,
        "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none", "target_modules": list(targets),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(LAYERS):
        for target in targets:
            name = f"{layers}.{number}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=noise) / 8
            tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=noise) / 5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@dataclass(frozen=True)
class Engines:
    folder: Path
    model: Path
    store: StoreProcess
    v: VllmServer
    s: SglangServer

    def named(self, name: str) -> EngineServer:
        return self.v if name == "v" else self.s


def ask(server: EngineServer, words: str, *, adapted: bool, salt: str | None = None) -> Answer:
    fields = {}
    if adapted:
        fields = {"lora_path": "x"} if isinstance(server, SglangServer) else {"model": "x"}
    return server.chat(words, max_tokens=8, cache_salt=salt, **fields)


def servers(folder: Path, model: Path, lora: Path, log: str, *flags: str) -> tuple[VllmServer, SglangServer]:
    """Not started. `flags` are cornplug's without --cornplug-app; none: as the engines' makers ship them."""
    env = {"CORNPLUG_STORE_AUTOSTART": "false"}

    def given(app: str) -> Sequence[str]:
        return ("--cornplug-app", app, *flags) if flags else ()

    sharing = ("--kv-connector", "cornplug") if flags else ()
    v = VllmServer(
        model,
        *(*V_ARGS, "--lora-modules", f"x={lora}", *sharing, *given("v")),
        log=folder / f"{log}-v.log",
        env={"VLLM_SERVER_DEV_MODE": "1", **env},
        vllm=next_vllm(),  # its requests without an adapter share, too
    )
    s = SglangServer(
        model, *S_ARGS, "--lora-paths", f"x={lora}", *given("s"), log=folder / f"{log}-s.log", env=env
    )
    return v, s


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A store and both engines, which know the adapter as x. No encoder service: no request has an image."""
    folder = tmp_path_factory.mktemp("adapted")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    model, lora = qwen2_text(folder / "model", hidden_size=HIDDEN, layers=LAYERS), adapter(folder / "x")
    flags = (
        *("--cornplug-store", str(sockets / "store.sock")),
        *("--cornplug-encoder", str(sockets / "none.sock")),
    )
    v, s = servers(folder, model, lora, "shared", *flags)
    try:
        with StoreProcess(sockets / "store.sock", log=folder / "store.log") as store, together(v, s):
            for server in (v, s):
                # The first request under an adapter is answered while a thread reads its files.
                ask(server, "flush", adapted=True)
                count(server, "saves_total")
            yield Engines(folder, model, store, v, s)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def saved(server: EngineServer, app: str) -> float:
    """Prompt tokens that the engine did not compute, thanks to the store."""
    return count(server, "saved_tokens_total", app=app)


def same(expected: Answer, answer: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.support("Both engines", "LoRA", engine="vllm sglang")
@pytest.mark.parametrize(("first", "then"), [("v", "s"), ("s", "v")])
def test_kv_under_adapter_is_shared_only_under_that_adapter(engines: Engines, first: str, then: str) -> None:
    writer, reader, words = engines.named(first), engines.named(then), WORDS[first]
    # Under another salt the engine computes everything itself.
    alone = ask(reader, words, adapted=True, salt=f"alone-{then}")
    plain = ask(reader, words, adapted=False, salt=f"alone-{then}")
    # The adapter is applied, or this test would say nothing.
    assert alone.logprobs != pytest.approx(plain.logprobs, abs=1e-2)

    ask(writer, words, adapted=True)
    settle_saves(writer, engines.store)
    forget_prefixes(reader)
    before = saved(reader, then)
    same(plain, ask(reader, words, adapted=False))
    assert saved(reader, then) == before, "KV under the adapter was taken for KV without it"
    answer = ask(reader, words, adapted=True)
    same(alone, answer)
    shareable = (answer.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert shareable >= 2 * PAGE_TOKENS
    assert saved(reader, then) - before >= 0.9 * shareable


def test_engines_with_adapter_answer_as_stock(engines: Engines) -> None:
    """From the store, each answers as the stock server does with the same adapter."""
    stock: dict[tuple[str, str], Answer] = {}
    servers_of_stock = servers(engines.folder, engines.model, engines.folder / "x", "stock")
    with together(*servers_of_stock):
        for name, server in zip("vs", servers_of_stock, strict=True):
            for author, words in WORDS.items():
                stock[name, author] = ask(server, words, adapted=True)
    for author, words in WORDS.items():
        ask(engines.named(author), words, adapted=True)
        settle_saves(engines.named(author), engines.store)
        name = "s" if author == "v" else "v"
        reader = engines.named(name)
        forget_prefixes(reader)
        before = saved(reader, name)
        same(stock[name, author], ask(reader, words, adapted=True))
        assert saved(reader, name) > before
