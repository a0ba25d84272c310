"""One set of real processes for all integration tests: stock answers, then engines that share."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from cornplug.host import free_port
from cornplug.store.store_stats import StoreStat
from devkit.engines import (
    Answer,
    EncoderProcess,
    EngineServer,
    RequestFailed,
    StoreProcess,
    VllmServer,
    photos,
    wait_until,
)
from devkit.processes import at_once, together
from devkit.sglang_engine import SglangServer
from devkit.vllm_beds import bed_of_this_run

STORE_DEADLINE_S, ENCODER_DEADLINE_S = 0.2, 3.0
"""Of a hurried engine; others wait for a busy machine's services (`conftest.py`)."""
_CALM_ENCODER_DEADLINE_S = 6.0
_ENVIRONMENT = {"CORNPLUG_STORE_AUTOSTART": "false"}
_SLOW_BED = not bed_of_this_run().startswith("v1")  # V2's kernels are interpreted
MACHINE_NOISE_S = 15.0 if _SLOW_BED else 4.0
"""Time that two busy cores may add to any request, with or without cornplug."""
COUNTED_S = 90.0
"""Time in which a steady stream makes an engine count an event. A hit from a store that was restarted empty
takes the stream a dozen requests: save, forget the engine's own prefixes, ask again."""
_PAUSE_S = 3.0
"""Longer than an idle engine takes to begin a save."""

PREAMBLE = "You are a careful assistant. " + " ".join(
    f"Rule {i}: answer with facts, name the source, and keep to the question." for i in range(12)
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, the same for every engine."""

    words: str
    images: tuple[int, ...] = ()

    def put(self, server: EngineServer, *, salt: str | None = None, timeout_s: float = 60) -> Answer:
        images = [photos()[i].data for i in self.images]
        return server.chat(self.words, images=images, max_tokens=8, cache_salt=salt, timeout_s=timeout_s)


ASKS: Sequence[Ask] = (
    Ask(f"{PREAMBLE} What is a cache?"),
    Ask(f"{PREAMBLE} What is shown?", (0,)),
    Ask(f"{PREAMBLE} And what else?", (0,)),
    Ask(f"{PREAMBLE} Which colours are there?", (1,)),
    Ask(f"Compare the two. {PREAMBLE}", (2, 3)),
    Ask(f"Compare the two. {PREAMBLE}", (3, 2)),
    Ask("What is shown?", (4,)),
    Ask(f"{PREAMBLE} {PREAMBLE} Say it again.", (5,)),
)


@dataclass
class Stack:
    """The processes, their sockets, and stock engines' answers."""

    folder: Path
    models: Mapping[str, Path]
    stock: dict[tuple[str, int], Answer]
    """By (model, number of the ask); "sglang:q" is model q as SGLang serves it."""
    store_socket: Path
    encoder: EncoderProcess
    servers: dict[str, EngineServer] = field(default_factory=dict)
    store: StoreProcess | None = None

    def vllm(
        self,
        name: str,
        model: str | Path,
        *args: str,
        flags: bool = True,
        hurried: bool = False,
        env: Mapping[str, str] | None = None,
        bed: str | None = None,
        command: Path | None = None,
    ) -> VllmServer:
        """A vLLM that shares, not started, for a model of the stack or a folder.

        `hurried`: with the short deadlines by which `faults.check` bounds a request. `flags` False leaves the
        connector to `args`; `bed` and `command` are `VllmServer`'s `bed` and `vllm`.
        """
        return VllmServer(
            self._folder_of(model),
            *(("--kv-connector", "cornplug", *self._flags(name, hurried=hurried)) if flags else ()),
            *args,
            log=self.folder / f"{name}.log",
            env={"VLLM_SERVER_DEV_MODE": "1", **_ENVIRONMENT, **(env or {})},
            bed=bed,
            vllm=command,
        )

    def sglang(
        self,
        name: str,
        model: str | Path,
        *args: str,
        hurried: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> SglangServer:
        """An SGLang that shares, not started, for a model of the stack or a folder; `hurried` as `vllm`'s."""
        return SglangServer(
            self._folder_of(model),
            *self._flags(name, hurried=hurried),
            *args,
            log=self.folder / f"{name}.log",
            env={**_ENVIRONMENT, **(env or {})},
        )

    def start(self, **servers: EngineServer) -> None:
        """Start engines side by side and keep them by their names, those that started if one fails."""
        self.servers |= servers
        at_once(*(server.start for server in servers.values()))

    def _folder_of(self, model: str | Path) -> Path:
        return model if isinstance(model, Path) else self.models[model]

    def stock_of_sglang(self, model: str) -> None:
        """Put every ask to stock SGLang and keep its answers."""
        with SglangServer(self.models[model], log=self.folder / f"stock-sglang-{model}.log") as server:
            self.stock.update({(f"sglang:{model}", i): ask.put(server) for i, ask in enumerate(ASKS)})

    def _flags(self, app: str, *, hurried: bool) -> tuple[str, ...]:
        """The flags that both engines have in common."""
        deadline_s = ENCODER_DEADLINE_S if hurried else _CALM_ENCODER_DEADLINE_S
        return (
            *("--cornplug-app", app),
            *("--cornplug-store", str(self.store_socket), "--cornplug-encoder", str(self.encoder.socket)),
            *(("--cornplug-store-deadline", str(STORE_DEADLINE_S)) if hurried else ()),
            *(
                "--cornplug-encoder-deadline",
                str(deadline_s),
            ),
        )

    def start_store(self, size: str = "512MiB") -> StoreProcess:
        """Start the store, in the place of one that has ended."""
        self.store = StoreProcess(self.store_socket, size=size, log=self.folder / "store.log").start()
        return self.store

    def same_as_stock(self, model: str, index: int, answer: Answer) -> None:
        expected = self.stock[model, index]
        assert answer.token_ids == expected.token_ids, f"ask {index} differs from stock"
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    def stat(self) -> StoreStat:
        assert self.store is not None
        return self.store.stat()

    def tower_passes(self) -> int:
        return self.encoder.tower_passes()


@contextmanager
def always_sharing() -> Iterator[pytest.MonkeyPatch]:
    """Engines started inside load whatever is stored, with long deadlines.

    By their own measurements they would share little, as these models are computed as quickly as loaded.
    Tests of lateness give their engines shorter times.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORNPLUG_STORE_LOAD_WHEN", "always")
        patch.setenv("CORNPLUG_STORE_DEADLINE_S", "5")
        yield patch


@contextmanager
def services(
    folder: Path, models: Mapping[str, Path], stock: dict[tuple[str, int], Answer], dtype: str = "float32"
) -> Iterator[Stack]:
    """A store and an encoder service for these models; both end with the engines of the stack."""
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    store_socket, encoder_socket = sockets / "store.sock", sockets / "encoder.sock"
    encoder = EncoderProcess(
        list(models.values()),
        *("--store-socket", str(store_socket)),
        socket=encoder_socket,
        port=free_port(),
        dtype=dtype,
        log=folder / "encoder.log",
        env={"CORNPLUG_STORE_AUTOSTART": "false"},
    )
    stack = Stack(folder, models, stock, store_socket, encoder)
    try:
        stack.start_store()
        yield stack
    finally:
        for server in stack.servers.values():
            server.stop()
        encoder.stop()
        if stack.store is not None:
            stack.store.stop()
        shutil.rmtree(sockets, ignore_errors=True)


class Pairs:
    """Engines of tests that need one each, started two by two: a start keeps one core busy, mostly.

    Args:
        make: Name -> the engine, not started.
        names: In the order of the tests.
    """

    def __init__(self, make: Callable[[str], EngineServer], names: Sequence[str]) -> None:
        self._make = make
        self._names = list(dict.fromkeys(names))
        self._running: Mapping[str, EngineServer] = {}
        self._ends = ExitStack()

    def get(self, name: str) -> EngineServer:
        """The engine, running. Ends the pair before it. Raises ProcessFailed as `ManagedProcess.start`."""
        if name not in self._running:
            self.close()
            at = self._names.index(name)
            pair = {each: self._make(each) for each in self._names[at : at + 2]}
            self._ends.enter_context(together(*pair.values()))
            self._running = pair
        return self._running[name]

    def close(self) -> None:
        """End the engines that run."""
        self._running = {}
        self._ends.close()


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Values of a parameter in those tests of this module that will run, in their order."""
    items = (item for item in request.session.items if item.path == request.path)
    calls = (
        item.callspec.params
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    )
    return [params[parameter] for params in calls if parameter in params]


def same_answers(some: Sequence[Answer], others: Sequence[Answer]) -> None:
    """Fails unless tokens are equal, and log-probabilities within 1e-4, those of other tokens too."""
    for one, other in zip(some, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for row, column in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert row == pytest.approx(column, abs=1e-4)


def flush(server: EngineServer) -> None:
    """Counters reach /metrics with the next step of the engine: make two."""
    for _ in range(2):
        server.chat("flush", max_tokens=1)


def count(server: EngineServer, name: str, **labels: str) -> float:
    flush(server)
    return server.metric(f"cornplug_{name}", **labels)


def forget_prefixes(server: EngineServer) -> None:
    """Empty the engine's own prefix cache, so that only the store can help."""
    wait_until(lambda: has_forgotten(server), deadline_s=60, what="an idle moment of the engine")


def has_forgotten(server: EngineServer) -> bool:
    """Whether the engine emptied its own prefix cache, which it does only while nothing runs."""
    if not isinstance(server, SglangServer):
        answer = httpx.post(f"{server.url}/reset_prefix_cache", trust_env=False, timeout=30)
        return bool(answer.raise_for_status().json()["success"])
    try:
        server.flush_cache()
    except RequestFailed:
        return False
    return True


def wait_for_saves(server: EngineServer, there: Callable[[], bool], *, what: str) -> None:
    """Wait until `there()`: until the engine has saved, while it idles, what it had once.

    A pause in which the machine kept the engine or its store from running brings nothing: it gets another.
    """

    def came() -> bool:
        end_s = time.monotonic() + _PAUSE_S
        while not there():
            if time.monotonic() > end_s:
                step(server)
                return False
            time.sleep(0.05)
        return True

    wait_until(came, deadline_s=90, what=what)


def settle_saves(server: EngineServer, store: StoreProcess) -> None:
    """Wait until all that the engine saves while it idles is in the store: a pause brings no more."""
    entries = -1
    while entries != (entries := _entries_after_pause(server, store)):
        pass


def _entries_after_pause(server: EngineServer, store: StoreProcess) -> int:
    began = time.monotonic()
    step(server)
    # On a busy machine, an engine that still saves pauses for longer than usual.
    store.settle(quiet_s=max(1.5, 4 * (time.monotonic() - began)), deadline_s=120)
    return store.stat().entries


def step(server: EngineServer) -> None:
    """Have the engine compute a token, of a prompt shorter than a page."""
    if isinstance(server, SglangServer):
        server.generate([1, 2, 3], max_tokens=1)
    else:
        server.chat("flush", max_tokens=1)


def wait_for_more(
    server: EngineServer, name: str, *, above: float, deadline_s: float = COUNTED_S, **labels: str
) -> float:
    """Wait until a counter has passed `above`; its value then."""
    metric = f"cornplug_{name}"
    wait_until(
        lambda: server.metric(metric, **labels) > above,
        deadline_s=deadline_s,
        what=f"{metric}{labels} above {above}",
    )
    return server.metric(metric, **labels)
