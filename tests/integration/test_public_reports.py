"""Public bug reports about vLLM and its peers, on real engines: answers as stock's, and what is shared.

A comment beside each test names the report, as repository#number.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from integration.stack import count, forget_prefixes, settle_saves
from integration.test_adapted_engines import adapter
from PIL import Image

from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, StoreProcess, VllmServer
from devkit.processes import together
from devkit.vllm_beds import next_vllm

pytestmark = pytest.mark.timeout(1800)

PAGE: Final = 64
WORDS: Final = "What is a cache? " + " ".join(f"Rule {i}: answer with facts." for i in range(20))
LORA: Final = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
RUNTIME_LORA: Final = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"}


def ids(first: int, number: int) -> tuple[int, ...]:
    """Token ids of a prompt that shares no page with that of another `first`."""
    return tuple((first + 7 * i) % 200 + 3 for i in range(number))


@dataclass(frozen=True)
class Completion:
    """An answer of /v1/completions."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    of_prompt: Any
    """`prompt_logprobs`; None where the request did not ask for them."""
    margins: tuple[float, ...]
    """Differences between the two highest log-probabilities, infinite where the request asked for one."""


def complete(
    server: VllmServer, prompt: Sequence[int], *, timeout_s: float = 120, **fields: Any
) -> Completion:
    body = {"model": "model", "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout_s, trust_env=False)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    of_tokens = choice["logprobs"]
    ranked = [sorted(row.values(), reverse=True) for row in of_tokens["top_logprobs"]]
    margins = tuple(row[0] - row[1] if len(row) > 1 else math.inf for row in ranked)
    logprobs = tuple(of_tokens["token_logprobs"])
    return Completion(tuple(choice["token_ids"]), logprobs, choice.get("prompt_logprobs"), margins)


def same(answer: Answer | Completion, stock: Answer | Completion) -> None:
    assert answer.token_ids == stock.token_ids
    assert answer.logprobs == pytest.approx(stock.logprobs, abs=1e-4)


# -- text ----------------------------------------------------------------------------------------


@dataclass
class Texts:
    """Three vLLM of one model: stock, one that fills the store, one that finds it."""

    folder: Path
    store: StoreProcess
    stock: VllmServer
    first: VllmServer
    fresh: VllmServer

    def saved(self, prompt: Sequence[int]) -> None:
        """The first engine answers as stock; the store has the prompt's pages."""
        same(complete(self.first, prompt), complete(self.stock, prompt))
        settle_saves(self.first, self.store)

    def loaded(self) -> float:
        """Tokens that the fresh engine had from the store so far."""
        return count(self.fresh, "saved_tokens_total")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> Iterator[Texts]:
    folder = tmp_path_factory.mktemp("texts")
    model, socket = checkpoints.qwen2_text(folder / "model"), sockets / "texts"
    flags = ("--block-size", "32", *LORA)
    ours = ("--kv-connector", "cornplug", "--cornplug-store", str(socket), "--cornplug-save", "always")

    env = {**RUNTIME_LORA, "VLLM_SERVER_DEV_MODE": "1", "CORNPLUG_STORE_AUTOSTART": "false"}

    def server(name: str, *more: str) -> VllmServer:
        # With adapters, its requests without one share, too.
        return VllmServer(model, *flags, *more, log=folder / f"{name}.log", env=env, vllm=next_vllm())

    stock = server("stock")
    first = server("first", *ours)
    fresh = server("fresh", *ours)
    with StoreProcess(socket, log=folder / "store.log") as store, together(stock, first, fresh):
        yield Texts(folder, store, stock, first, fresh)


def test_prefix_that_ends_inside_a_page_is_continued(texts: Texts) -> None:  # LMCache#2206
    prompt = ids(2, 300)
    own = (*prompt[:96], *ids(5, 40))
    same(complete(texts.fresh, own), complete(texts.stock, own))
    texts.saved(prompt)
    before = texts.loaded()
    same(complete(texts.fresh, prompt), complete(texts.stock, prompt))
    assert texts.loaded() - before >= 2 * PAGE


def test_log_probabilities_of_a_stored_prompt_are_computed(texts: Texts) -> None:  # vllm#57596
    prompt = ids(3, 300)
    texts.saved(prompt)
    before = texts.loaded()
    answer, stock = (complete(server, prompt, prompt_logprobs=1) for server in (texts.fresh, texts.stock))
    same(answer, stock)
    assert known(answer) == pytest.approx(known(stock), abs=1e-4)
    assert texts.loaded() == before
    assert texts.store.stat().leases == 0


def known(answer: Completion) -> list[float]:
    """Log-probabilities of the prompt's tokens and of the best ones in their places."""
    rows = answer.of_prompt[1:]
    return [each["logprob"] for row in rows for _, each in sorted(row.items())]


def test_adapter_rewritten_in_place_answers_as_stock_and_shares_nothing(texts: Texts) -> None:  # vllm#42125
    """vLLM reads the files of such an adapter in every step."""
    folder = adapter(texts.folder / "x")
    load(texts.first, folder)
    old = texts.first.chat(WORDS, max_tokens=8, model="x")
    settle_saves(texts.first, texts.store)

    shutil.rmtree(folder)
    adapter(folder, seed=6)
    load(texts.first, folder, load_inplace=True)
    load(texts.stock, folder)
    stock = texts.stock.chat(WORDS, max_tokens=8, model="x")
    assert stock.token_ids != old.token_ids
    entries = texts.store.stat().entries
    for _ in range(2):
        forget_prefixes(texts.first)  # stock too serves the old adapter's own blocks until then
        same(texts.first.chat(WORDS, max_tokens=8, model="x"), stock)
    settle_saves(texts.first, texts.store)
    assert texts.store.stat().entries == entries
    assert count(texts.first, "misses_total", reason="lora_reread") >= 2

    load(texts.fresh, folder)
    before = texts.loaded()
    same(texts.fresh.chat(WORDS, max_tokens=8, model="x"), stock)
    assert texts.loaded() == before


def load(server: VllmServer, folder: Path, **fields: Any) -> None:
    body = {"lora_name": "x", "lora_path": str(folder), **fields}
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text


# -- images --------------------------------------------------------------------------------------


def picture(*, transparent: bool = False) -> bytes:
    """PNG of a red and a blue half; `transparent`: it names red as transparent, though its mode is RGB."""
    image = Image.new("RGB", (112, 112), (255, 0, 0))
    image.paste((0, 0, 255), (56, 0, 112, 112))
    out = io.BytesIO()
    image.save(out, "PNG", **({"transparency": (255, 0, 0)} if transparent else {}))
    return out.getvalue()


def test_images_in_shared_memory_are_shared(tmp_path: Path, sockets: Path) -> None:  # vllm#38668
    model, socket = checkpoints.qwen2_vl(tmp_path / "model"), sockets / "shm"
    shm = ("--mm-processor-cache-type", "shm", "--kv-connector", "cornplug", "--cornplug-store", str(socket))
    stock = VllmServer(model, log=tmp_path / "stock.log")
    first, fresh = (
        VllmServer(model, *shm, "--cornplug-save", "always", log=tmp_path / f"{name}.log")
        for name in ("first", "fresh")
    )
    with StoreProcess(socket, log=tmp_path / "store.log") as store, together(stock, first):
        expected = [stock.chat(WORDS, images=[picture()] * n, max_tokens=8) for n in (1, 0)]
        for n, answer in zip((1, 0), expected, strict=True):
            same(first.chat(WORDS, images=[picture()] * n, max_tokens=8), answer)
        settle_saves(first, store)
        with together(fresh):
            for n, answer in zip((1, 0), expected, strict=True):
                same(fresh.chat(WORDS, images=[picture()] * n, max_tokens=8), answer)
            assert count(fresh, "hits_total", kind="kv_page") >= 2


def test_engine_without_tower_lays_transparent_images_on_white_as_its_release_does(
    tmp_path: Path, sockets: Path
) -> None:  # transformers#49003
    model, socket = checkpoints.qwen2_vl(tmp_path / "model"), sockets / "trns"
    env = {
        "CORNPLUG_STORE_AUTOSTART": "false",
        "CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret"),
        "http_proxy": "http://127.0.0.1:9",  # slime#1714: not for a service on loopback
    }
    service = EncoderProcess(
        [model], "--store-socket", str(socket), socket=sockets / "e", log=tmp_path / "encoder.log", env=env
    )
    stock, ours = (
        VllmServer(model, *flags, log=tmp_path / f"{name}.log", env=env, vllm=next_vllm())
        for name, flags in (
            ("stock", ()),
            (
                "ours",
                (
                    *("--kv-connector", "cornplug", "--cornplug-store", str(socket)),
                    *("--cornplug-tower", "service", "--cornplug-encoder", service.url),
                    *("--limit-mm-per-prompt", '{"image": 2}'),
                ),
            ),
        )
    )
    with StoreProcess(socket, log=tmp_path / "store.log", env=env), together(stock, ours, service):
        answers = {}
        for transparent in (False, True):
            image = picture(transparent=transparent)
            answers[transparent] = stock.chat(WORDS, images=[image], max_tokens=8)
            same(ours.chat(WORDS, images=[image], max_tokens=8), answers[transparent])
        assert answers[False].logprobs != pytest.approx(answers[True].logprobs, abs=1e-4)
