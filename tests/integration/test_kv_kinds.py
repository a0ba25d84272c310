"""Kinds of KV beyond plain full attention: a fresh engine of each answers as stock, from the store.

Each kind is three engines: stock without anything, one that fills the store, one that finds it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from integration.stack import PREAMBLE, count, settle_saves

from devkit import checkpoints
from devkit.engines import Answer, EngineServer, StoreProcess, VllmServer
from devkit.processes import at_once
from devkit.quantised import with_kv_scales

ASKED: Final = (f"{PREAMBLE} What is a cache?", f"{PREAMBLE} {PREAMBLE} Say it again.")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of KV: its checkpoint, and the flags of every engine of it."""

    model: Callable[[Path], Path]
    flags: Callable[[Path], Sequence[str]] = lambda model: ()
    stock: Sequence[str] | None = None
    """Stock's flags where they are not those: of a draft model the answers do not depend."""
    env: Mapping[str, str] = field(default_factory=dict)
    page: int = 64
    """Tokens of a page: of vLLM's block, beside states."""
    asked: Sequence[str] = ASKED
    drafts: bool = False
    """Of its proposals most are right with all KV in place, and few without."""


def _windowed(path: Path, windows: int = 1) -> Path:
    """A Gemma 3 whose first layers see a window and whose last sees all."""
    model = checkpoints.gemma3(path, layers=windows + 1)
    config = json.loads((model / "config.json").read_text())
    kinds = ["sliding_attention"] * windows + ["full_attention"]
    config["text_config"] |= {"layer_types": kinds, "sliding_window": 256}
    (model / "config.json").write_text(json.dumps(config))
    return model


def _scaled(path: Path) -> Path:
    """A checkpoint that brings scales of its KV cache, and with them its format."""
    plain = checkpoints.qwen2_text(path.with_name("plain"))
    return with_kv_scales(plain, path, k_scale=0.05, v_scale=0.01)


def _speculates(model: Path) -> Sequence[str]:
    """The model drafts for itself: with all KV in place every proposal is right."""
    return "--speculative-config", json.dumps(
        {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    )


def _drafts_by_eagle3(model: Path, make: Callable[..., Path] = checkpoints.eagle3_head) -> Sequence[str]:
    head = make(model.with_name("head"), model, seen=(1, 2, 4))
    return "--speculative-config", json.dumps(
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    )


# vLLM wants a NUMA node a worker unless it is told otherwise.
_SEVERAL_WORKERS: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_TWO_RANKS: Final = ("--tensor-parallel-size", "2")
# vLLM on a CPU has no prefix cache beside MLA: no block outlives its request, to be saved in an idle step.
_AT_ONCE: Final = ("--cornplug-save", "always")
# vLLM's CPU kernels of these states take this dtype only.
_STATES: Final = ("--dtype", "bfloat16", "--block-size", "64")
# The width that vLLM's CPU kernel is compiled for: 512 + 64.
_mla = partial(checkpoints.deepseek_v2, kv_lora_rank=512, rope_dim=64)

# The pages that a fresh engine computes itself, the last one or two, hold another token than the one that is
# most frequent: a head without the KV of the pages before proposes this one.
_MAJORITIES: Final = ("ab" * 900 + "cd" * 160, "ef" * 1400 + "gh" * 160)


def _eagle3_accepted(*, windows: int, full: int) -> Kind:
    """Model and head say the most frequent token of their KV."""
    return Kind(
        partial(checkpoints.majority, windows=windows, full=full),
        partial(_drafts_by_eagle3, make=checkpoints.majority_head),
        stock=(),
        asked=_MAJORITIES,
        drafts=True,
    )


KINDS: Final[Mapping[str, Kind]] = {
    "draft model": Kind(checkpoints.qwen2_text, _speculates, stock=(), drafts=True),
    "fp8": Kind(checkpoints.qwen2_text, lambda _: ("--kv-cache-dtype", "fp8")),
    "fp8 with the checkpoint's scales": Kind(_scaled),
    "blocks of 256": Kind(checkpoints.qwen2_text, lambda _: ("--block-size", "256")),
    "windows in one group": Kind(_windowed, lambda _: ("--disable-hybrid-kv-cache-manager",)),
    # A group of full attention and two of windows, which vLLM fills to equal sizes.
    "windows in groups": Kind(partial(_windowed, windows=2), stock=()),
    "windows in groups, small blocks": Kind(
        partial(_windowed, windows=2), lambda _: ("--block-size", "16", "--cornplug-save", "always"), stock=()
    ),
    "windows in groups, fp8": Kind(partial(_windowed, windows=2), lambda _: ("--kv-cache-dtype", "fp8")),
    "windows in groups, two ranks": Kind(
        partial(_windowed, windows=2), lambda _: _TWO_RANKS, stock=(), env=_SEVERAL_WORKERS
    ),
    # As of GPT-OSS, one group of windows and one of full attention, which the head's layer joins.
    "windows in groups with EAGLE-3": Kind(
        partial(checkpoints.llama_windowed, windows=3, full=2), _drafts_by_eagle3, stock=()
    ),
    "EAGLE-3, proposals accepted": _eagle3_accepted(windows=0, full=5),
    "windows in groups with EAGLE-3, proposals accepted": _eagle3_accepted(windows=3, full=2),
    "two stages": Kind(
        checkpoints.qwen2_text,
        # vLLM's CPU worker makes the second stage's buffers in its warm-up, which an eager engine leaves out.
        lambda _: ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
        stock=(),
        env={**_SEVERAL_WORKERS, "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"},
    ),
    "MLA": Kind(_mla, lambda _: _AT_ONCE, stock=()),
    "MLA of DeepSeek-V3": Kind(partial(_mla, version=3), lambda _: _AT_ONCE, stock=()),
    "MLA with a draft model": Kind(
        _mla, lambda model: (*_AT_ONCE, *_speculates(model)), stock=(), drafts=True
    ),
    "MLA on two ranks": Kind(_mla, lambda _: (*_AT_ONCE, *_TWO_RANKS), stock=(), env=_SEVERAL_WORKERS),
    # vLLM makes blocks as large as a state.
    "states (gated delta nets)": Kind(checkpoints.qwen3_5_text, lambda _: _STATES, page=128),
    "states (gated delta nets), two ranks": Kind(
        checkpoints.qwen3_5_text,
        lambda _: (*_STATES, *_TWO_RANKS),
        env=_SEVERAL_WORKERS,
        page=128,
    ),
    "states (short convolutions of LFM2)": Kind(checkpoints.lfm2, lambda _: ("--block-size", "64")),
    "layers that read another's cache (Gemma 3n)": Kind(checkpoints.gemma3n_text),
    "two API servers": Kind(checkpoints.qwen2_text, lambda _: ("--api-server-count", "2"), stock=()),
}


@dataclass
class Engines:
    """Engines of one kind, and stock's answers. The first has answered everything, the second nothing."""

    first: EngineServer
    second: EngineServer
    stock: Sequence[Answer]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engines(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder, which = tmp_path_factory.mktemp("kind"), KINDS[kind]
    model = which.model(folder / "model")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    flags = which.flags(model)

    def shares(app: str) -> VllmServer:
        ours = ("--kv-connector", "cornplug", "--cornplug-app", app, "--cornplug-store", str(sockets / "s"))
        return VllmServer(model, *ours, *flags, log=folder / f"{app}.log", env=which.env)

    plain, stock_env = (flags, which.env) if which.stock is None else (which.stock, {})
    first, second = shares("first"), shares("second")
    try:
        with StoreProcess(sockets / "s", size="256MiB", log=folder / "store.log") as store:
            with VllmServer(model, *plain, log=folder / "stock.log", env=stock_env) as stock:
                answers = [stock.chat(words, max_tokens=16) for words in which.asked]
            at_once(first.start, second.start)
            for words, expected in zip(which.asked, answers, strict=True):
                _same(first.chat(words, max_tokens=16), expected)
            settle_saves(first, store)
            yield Engines(first, second, answers)
    finally:
        first.stop()
        second.stop()
        shutil.rmtree(sockets, ignore_errors=True)


def _same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def _accepted(server: EngineServer) -> tuple[float, float]:
    """(accepted, proposed) tokens of a draft model so far."""
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    return accepted, server.metric("vllm:spec_decode_num_draft_tokens_total")


@pytest.mark.support("Kinds of KV", "{kind}")
def test_kv_kind_fresh_engine_answers_as_stock_from_the_store(engines: Engines, kind: str) -> None:
    which, shareable = KINDS[kind], 0
    for words, expected in zip(which.asked, engines.stock, strict=True):
        answer = engines.second.chat(words, max_tokens=16)
        _same(answer, expected)
        shareable += (answer.prompt_tokens - 1) // which.page * which.page
    if which.drafts:
        # As many as with a draft that has computed all KV itself: each, but for the end of an answer.
        rates = [
            accepted / proposed for accepted, proposed in map(_accepted, (engines.first, engines.second))
        ]
        assert rates[1] >= 0.95 * rates[0] > 0.5
    own = engines.second.metric("vllm:prefix_cache_hits_total")
    assert count(engines.second, "saved_tokens_total", app="second") + own >= 0.9 * shareable
