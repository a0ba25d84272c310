"""Pause, sleep, resets of caches and weight updates on the V2 runner: as stock, and what is shared then.

One engine with cornplug and a stock one get the same calls, one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
from integration.stack import PREAMBLE, count, settle_saves

from devkit import checkpoints
from devkit.engines import Answer, RequestFailed, VllmServer
from devkit.processes import StoreProcess, together

PAGE: Final = 64


@dataclass
class Sides:
    """Both engines."""

    stock: VllmServer
    ours: VllmServer
    store: StoreProcess

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> None:
        """The same call to both: the same answer."""
        answers = []
        for server in (self.stock, self.ours):
            answer = httpx.post(f"{server.url}/{path}", params=query, json=body, timeout=120, trust_env=False)
            answers.append((answer.status_code, answer.json()))
        assert answers[0] == answers[1], path
        assert answers[0][0] == 200, answers[0]

    def chat(self, words: str, max_tokens: int = 8) -> Answer:
        """The same question to both, the same tokens; the answer of the engine with cornplug."""
        stock, ours = (
            server.chat(words, max_tokens=max_tokens, ignore_eos=True) for server in (self.stock, self.ours)
        )
        assert ours.token_ids == stock.token_ids
        return ours

    def saved(self, words: str) -> Answer:
        """As `chat`; then the idle engine has saved the prompt."""
        answer = self.chat(words)
        settle_saves(self.ours, self.store)
        return answer

    def loaded(self) -> float:
        """Pages that came from the store so far."""
        return count(self.ours, "hits_total", kind="kv_page")


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("pauses")
    model, socket = checkpoints.qwen2_text(folder / "model"), folder / "s"
    ours = ("--kv-connector", "cornplug", "--cornplug-store", str(socket))
    with StoreProcess(socket, log=folder / "store.log") as store:
        stock, shared = (
            VllmServer(
                model, "--block-size", "32", *flags, log=folder / f"{name}.log",
                env={"VLLM_SERVER_DEV_MODE": "1"}, bed="v2",
            )
            for name, flags in (("stock", ()), ("ours", ours))
        )  # fmt: skip
        with together(stock, shared):
            yield Sides(stock, shared, store)


def prompt(name: str) -> str:
    return f"{name}: {PREAMBLE}"


def pages(answer: Answer) -> int:
    return (answer.prompt_tokens - 1) // PAGE


LINES: Final = [
    ("sleep", {"level": 0}, "wake_up"),
    ("sleep", {"level": 1}, "wake_up"),
    ("sleep", {"level": 1, "mode": "wait"}, "wake_up"),
    ("sleep", {"level": 1, "mode": "keep"}, "wake_up"),
    ("pause", {"mode": "abort"}, "resume"),
    ("pause", {"mode": "wait"}, "resume"),
    ("pause", {"mode": "keep"}, "resume"),
]


@pytest.mark.support("Pauses", "{line}")
@pytest.mark.parametrize(
    "line", [f"{path} {' '.join(f'{k}={v}' for k, v in query.items())}" for path, query, _ in LINES]
)
def test_vllm_that_was_paused_answers_as_stock_and_keeps_the_store(sides: Sides, line: str) -> None:
    path, query, end = next(
        one for one in LINES if line == f"{one[0]} {' '.join(f'{k}={v}' for k, v in one[1].items())}"
    )
    first = sides.saved(prompt(line))
    before = sides.loaded()
    sides.post(path, **query)
    late: list[Answer] = []
    refused: list[str] = []

    def ask() -> None:
        try:
            late.append(sides.ours.chat(prompt(line), max_tokens=8, ignore_eos=True))
        except RequestFailed as e:
            refused.append(str(e))

    waiting = threading.Thread(target=ask)
    waiting.start()
    waiting.join(timeout=2)
    is_waiting = waiting.is_alive()
    sides.post(end)
    waiting.join(timeout=60)
    if refused:  # Since 0.33, a paused vLLM refuses new requests.
        assert "Generation is paused" in refused[0]
        ask()
    else:
        assert is_waiting, "a paused engine answers nothing"
    assert late[0].token_ids == first.token_ids
    cleared = query != {"level": 0} and query.get("mode") != "keep"
    if cleared:  # its own prefix cache is empty: the store's pages are not
        assert sides.loaded() - before >= 0.9 * pages(first)


@pytest.mark.support("Pauses", "pause mode=keep while an answer is generated")
def test_vllm_paused_amid_an_answer_goes_on_as_stock(sides: Sides) -> None:
    whole = sides.chat(prompt("long"), max_tokens=120)
    httpx.post(f"{sides.ours.url}/reset_prefix_cache", timeout=60, trust_env=False)
    found: list[Answer] = []
    asked = threading.Thread(
        target=lambda: found.append(sides.ours.chat(prompt("long"), max_tokens=120, ignore_eos=True))
    )
    asked.start()
    asked.join(timeout=1.5)
    for path in ("pause?mode=keep", "resume"):
        httpx.post(f"{sides.ours.url}/{path}", timeout=60, trust_env=False).raise_for_status()
    asked.join(timeout=120)
    assert found[0].token_ids == whole.token_ids


@pytest.mark.support("Pauses", "reset_prefix_cache")
def test_vllm_reset_of_its_own_cache_leaves_the_store(sides: Sides) -> None:
    first = sides.saved(prompt("reset"))
    before = sides.loaded()
    sides.post("reset_prefix_cache")
    sides.chat(prompt("reset"))
    assert sides.loaded() - before >= 0.9 * pages(first)


@pytest.mark.support("Pauses", "reset_prefix_cache reset_external=true: the engine computes again")
def test_vllm_reset_of_connectors_hides_stored_pages_from_this_engine(sides: Sides) -> None:
    sides.saved(prompt("external"))
    before = sides.loaded()
    sides.post("reset_prefix_cache", reset_external=True)
    sides.chat(prompt("external"))
    assert sides.loaded() == before
    # What is stored later is shared as ever.
    later = sides.saved(prompt("later"))
    sides.post("reset_prefix_cache")
    sides.chat(prompt("later"))
    assert sides.loaded() - before >= 0.9 * pages(later)


@pytest.mark.support("Pauses", "a reload of the weights: shares again")
def test_vllm_whose_weights_were_reloaded_finds_its_pages_again(sides: Sides) -> None:
    first = sides.saved(prompt("reload"))
    before = sides.loaded()
    sides.post("pause", mode="abort")
    sides.post("collective_rpc", {"method": "reload_weights"})
    sides.post("resume")
    # The first request of an epoch may find its checkpoint unread.
    for _ in range(2):
        sides.chat(prompt("reload"))
        sides.post("reset_prefix_cache")
    sides.chat(prompt("reload"))
    assert sides.loaded() - before >= 0.9 * pages(first)


@pytest.mark.support("Pauses", "a weight update ends sharing")
def test_vllm_whose_weights_were_replaced_shares_no_more(sides: Sides) -> None:
    """The last of the module: its engine shares nothing from here on."""
    sides.saved(prompt("update"))
    before = sides.loaded()
    sides.post("pause", mode="abort")
    # Any method may be a trainer's.
    sides.post("collective_rpc", {"method": "update_config", "kwargs": {"overrides": {}}})
    sides.post("resume")
    sides.chat(prompt("update"))
    assert sides.loaded() == before
    assert count(sides.ours, "misses_total", reason="weights_updated") > 0
