"""Kinds of SGLang servers beyond the plain one: a fresh server of each answers as stock, from the store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from integration.stack import PREAMBLE, Ask, count, forget_prefixes, settle_saves

from devkit import checkpoints
from devkit.engines import StoreProcess
from devkit.processes import together
from devkit.sglang_engine import Generation, SglangServer, sglang_python

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
]

PAGE: Final = 64
PROMPTS: Final = (f"{PREAMBLE} What is a cache?", f"Again. {PREAMBLE} {PREAMBLE} And a page?")


@dataclass(frozen=True, slots=True)
class SglangKind:
    """A kind of server."""

    flags: Sequence[str] = ()
    then: Sequence[str] = ()
    """The flags of the server that takes its pages, and leaves others for it."""
    stock: Sequence[str] = ()
    model: Callable[[Path], Path] = checkpoints.qwen2_text
    draft: Callable[[Path], Path] | None = None
    """A draft model for each of its servers."""
    new: int = 24
    """Tokens of an answer: a draft that knows nothing is right now and then only."""


def _windowed(path: Path) -> Path:
    """A model of text one of whose layers sees 128 tokens: KV of those that see images is not shared."""
    return checkpoints.mellum(path, window=128)


_ONE_POOL: Final = ("--disable-hybrid-swa-memory",)
_NGRAMS: Final = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", "6"),
)
_FP8: Final = ("--kv-cache-dtype", "fp8_e4m3")
_STANDALONE: Final = (
    *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
_EAGLE: Final = tuple("EAGLE" if flag == "STANDALONE" else flag for flag in _STANDALONE)
KINDS: Final[Mapping[str, SglangKind]] = {
    # Of drafts from n-grams the answers do not depend, and there is no KV of theirs: a plain server's pages.
    "n-grams": SglangKind(_NGRAMS),
    "draft model": SglangKind(
        _STANDALONE,
        (*_STANDALONE, "--page-size", "16"),
        stock=_STANDALONE,
        # The model itself: as it sees all tokens but the first, most of its proposals are right.
        draft=checkpoints.qwen2_text,
    ),
    "EAGLE": SglangKind(_EAGLE, _EAGLE, stock=_EAGLE, draft=checkpoints.qwen2_eagle, new=200),
    "fp8": SglangKind(_FP8, (*_FP8, "--page-size", "16"), stock=_FP8),
    # SGLang's own choice for Gemma 3.
    "windows in one pool": SglangKind(_ONE_POOL, _ONE_POOL, stock=_ONE_POOL, model=_windowed),
    "two tokenizers": SglangKind(("--tokenizer-worker-num", "2"), ("--tokenizer-worker-num", "2")),
}


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    with StoreProcess(sockets / "s", size="256MiB") as store:
        yield store
    shutil.rmtree(sockets, ignore_errors=True)


def sharing(model: Path, store: StoreProcess, folder: Path, app: str, flags: Sequence[str]) -> SglangServer:
    ours = ("--cornplug-app", app, "--cornplug-store", str(store.socket))
    env = {"CORNPLUG_STORE_AUTOSTART": "false"}
    return SglangServer(model, *ours, *flags, log=folder / f"{app}.log", env=env)


def same(answer: Generation, expected: Generation) -> None:
    assert answer.output_ids == expected.output_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def shareable(answer: Generation) -> int:
    return (answer.prompt_tokens - 1) // PAGE * PAGE


def accepted(answer: Generation) -> float:
    """Tokens of a step, on average: above 1 where drafts were accepted."""
    return float(answer.meta_info.get("spec_accept_length", 1.0))


@pytest.mark.support("Kinds of KV", "{kind}", engine="sglang")
@pytest.mark.parametrize("kind", KINDS)
def test_sglang_kind_fresh_server_answers_as_stock_from_the_store(
    kind: str, store: StoreProcess, tmp_path: Path
) -> None:
    which = KINDS[kind]
    model = which.model(tmp_path / "model")
    draft = ("--speculative-draft-model-path", str(which.draft(tmp_path / "draft"))) if which.draft else ()
    with SglangServer(model, *which.stock, *draft, log=tmp_path / "stock.log") as stock:
        expected = [stock.generate(prompt, max_tokens=which.new) for prompt in PROMPTS]
    first = sharing(model, store, tmp_path, "first", (*which.flags, *draft))
    second = sharing(model, store, tmp_path, "second", (*which.then, *draft))
    with together(first, second):
        same(first.generate(PROMPTS[0], max_tokens=which.new), expected[0])
        same(second.generate(PROMPTS[1], max_tokens=which.new), expected[1])
        for server in (first, second):
            settle_saves(server, store)
        for server, i in ((first, 1), (second, 0)):
            answer = server.generate(PROMPTS[i], max_tokens=which.new)
            assert answer.cached["storage"] == shareable(answer) > 3 * PAGE
            same(answer, expected[i])
            if draft:
                # The draft's KV came with the model's: with none it would propose worse.
                assert accepted(answer) == accepted(expected[i]) > 1
        if kind == "n-grams":
            # It has answered so before: the drafts are right, and what they leave in the cache is, too.
            drafted = first.generate(PROMPTS[0], max_tokens=which.new)
            same(drafted, expected[0])
            assert accepted(drafted) > 1.5
            longer = f"{PROMPTS[0]}{drafted.text} {PROMPTS[1]}"
            same(first.generate(longer, max_tokens=8), second.generate(longer, max_tokens=8))
        assert (
            f"cornplug: KV is shared: pages of {16 if '16' in which.then else 64}" in second.log.read_text()
        )


@pytest.mark.support("Kinds of KV", "images of two tokenizers", engine="sglang")
def test_sglang_two_tokenizers_images_are_shared(store: StoreProcess, tmp_path: Path) -> None:
    model = checkpoints.qwen2_vl(tmp_path / "model")
    flags = ("--tokenizer-worker-num", "2")
    asks = [Ask(f"{PREAMBLE} What is on image {i}?", (i,)) for i in range(6)]
    with SglangServer(model, log=tmp_path / "stock.log") as stock:
        expected = [ask.put(stock) for ask in asks]
    first = sharing(model, store, tmp_path, "first", flags)
    second = sharing(model, store, tmp_path, "second", flags)
    with together(first, second):
        for server in (first, second):
            with ThreadPoolExecutor(len(asks)) as pool:  # connections of both tokenizers
                answers = list(pool.map(lambda ask, server=server: ask.put(server), asks))
            for answer, known in zip(answers, expected, strict=True):
                assert answer.token_ids == known.token_ids
                assert answer.logprobs == pytest.approx(known.logprobs, abs=1e-4)
            settle_saves(server, store)
        # Each image was computed by the first, and taken by the second: as KV behind it, or as its embedding.
        assert count(second, "saved_tokens_total", app="second") >= 0.9 * sum(
            (answer.prompt_tokens - 1) // PAGE * PAGE for answer in expected
        )
        # Other words before the same images: now the embeddings are needed, from whichever tokenizer.
        forget_prefixes(second)
        before = count(second, "hits_total", kind="embedding")
        with ThreadPoolExecutor(len(asks)) as pool:
            list(pool.map(lambda i: Ask(f"Look at {i}.", (i,)).put(second), range(len(asks))))
        assert count(second, "hits_total", kind="embedding") == before + len(asks)
        log = second.log.read_text()
        assert log.count("Start multi-tokenizer worker process") == 2
        assert "images are not shared" not in log
