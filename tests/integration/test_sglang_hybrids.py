"""SGLang's hybrid models: a fresh server answers as stock, from pages of full attention and the windows at
their end.

Each kind is three servers: stock without anything, one that fills the store, one that finds it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from integration.stack import settle_saves, wait_for_saves

from devkit import checkpoints
from devkit.processes import StoreProcess, at_once
from devkit.sglang_engine import Generation, SglangServer, sglang_python

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
]

PAGE: Final = 64
WINDOW: Final = 128
PROMPTS: Final[Sequence[Sequence[int]]] = (
    tuple((11 * i + 90) % 600 for i in range(700)),
    tuple((3 * i + 5) % 600 for i in range(330)),
)
PREAMBLE: Final = tuple((7 * i + 300) % 600 for i in range(448))
# SGLang keeps a window where the second leaves the first.
WITH_PREAMBLE: Final = (
    (*PREAMBLE, *((13 * i + 6) % 600 for i in range(150))),
    (*PREAMBLE, *((17 * i + 40) % 600 for i in range(100))),
)
THIRD: Final = (*PREAMBLE, *((19 * i + 7) % 600 for i in range(90)))
"""Begins as two prompts of the server that fills the store, which does not have it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of hybrid model: its checkpoint, and the flags of every server that shares it."""

    model: Callable[[Path], Path]
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


KINDS: Final[Mapping[str, Kind]] = {
    "windows": Kind(lambda path: checkpoints.mellum(path, window=WINDOW)),
    "windows in small pages": Kind(
        lambda path: checkpoints.mellum(path, window=WINDOW),
        ("--page-size", "16", "--cornplug-save", "always"),
    ),
    "windows beside chunked prefill": Kind(
        lambda path: checkpoints.mellum(path, window=WINDOW), ("--chunked-prefill-size", "256")
    ),
    "windows on two ranks": Kind(
        lambda path: checkpoints.mellum(path, window=WINDOW),
        ("--tp-size", "2"),
        # Each rank its own core, and not the same one twice.
        {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}


@dataclass
class Servers:
    """Servers of one kind, and stock's answers. The first has answered all but `THIRD`, the second none."""

    first: SglangServer
    second: SglangServer
    stock: Mapping[Sequence[int], Generation]


@pytest.fixture(
    scope="module",
    params=list(KINDS),
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def servers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, which = tmp_path_factory.mktemp("hybrid"), KINDS[kind]
    model = which.model(folder / "model")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))

    def shares(app: str) -> SglangServer:
        return SglangServer(
            model, "--cornplug-app", app, "--cornplug-store", str(sockets / "s"), *which.flags,
            log=folder / f"{app}.log", env={"CORNPLUG_STORE_AUTOSTART": "false", **which.env},
        )  # fmt: skip

    first, second = shares("first"), shares("second")
    stock = SglangServer(model, log=folder / "stock.log")
    try:
        with StoreProcess(sockets / "s", log=folder / "store.log") as store:
            at_once(stock.start, first.start)
            every = (*PROMPTS, *WITH_PREAMBLE, THIRD)
            expected = {prompt: stock.generate(prompt, max_tokens=8) for prompt in every}
            stock.stop()
            for prompt in (*PROMPTS, *WITH_PREAMBLE):
                entries = store.stat().entries
                same(first.generate(prompt, max_tokens=8), expected[prompt])
                # A server that idles copies the prompt, with the window at its end.
                wait_for_saves(first, lambda n=entries: store.stat().entries > n, what="a saved prompt")  # type: ignore[misc]
                settle_saves(first, store)
            second.start()
            yield Servers(first, second, expected)
    finally:
        at_once(first.stop, second.stop, stock.stop)
        shutil.rmtree(sockets, ignore_errors=True)


def same(answer: Generation, expected: Generation) -> None:
    assert answer.output_ids == expected.output_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.support("Kinds of KV", "{kind}", engine="sglang")
def test_sglang_hybrid_fresh_server_answers_as_stock_from_the_store(servers: Servers, kind: str) -> None:
    shareable = storage = 0
    for prompt in PROMPTS:
        answer = servers.second.generate(prompt, max_tokens=8)
        same(answer, servers.stock[prompt])
        shareable += (len(prompt) - 1) // PAGE * PAGE
        storage += answer.cached["storage"]
    assert storage >= 0.9 * shareable


def test_sglang_hybrid_new_prompt_continues_a_preamble_from_the_store(servers: Servers, kind: str) -> None:
    answer = servers.second.generate(THIRD, max_tokens=8)
    same(answer, servers.stock[THIRD])
    assert answer.cached["storage"] >= 0.9 * len(PREAMBLE)


def test_sglang_hybrid_log_says_that_kv_is_shared(servers: Servers, kind: str) -> None:
    log: Any = servers.second.log
    assert "KV is shared" in log.read_text()
    assert "not shared" not in log.read_text()
