"""SGLang's language-only servers on `cornplug encoder`, by both of its ZMQ backends.

Three engines: stock SGLang for the expected answers, and a language-only server for each backend, with the
plugin. Each reuses the other's entries, so both name images alike.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from integration.stack import MACHINE_NOISE_S, PREAMBLE, Ask, wait_for_saves

from cornplug.host import free_port
from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, RequestFailed, StoreProcess, photos, wait_until
from devkit.processes import at_once
from devkit.sglang_engine import SglangServer, sglang_python

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed"),
]

BACKENDS = ("zmq_to_scheduler", "zmq_to_tokenizer")
DEADLINE_S = 8.0
"""More than a slow machine takes for an answer: a shorter one was not waited for."""
ASKS: Mapping[str, Ask] = {
    "text": Ask(f"{PREAMBLE} Words only, please."),
    "one": Ask(f"{PREAMBLE} What is shown?", (0,)),
    "two": Ask(f"Compare the two. {PREAMBLE}", (1, 2)),
    # Put while the encoder is alive, dead, back, and silent; each with an image of its own.
    **{f"fault {i}": Ask(f"{i}: what is shown?", (i,)) for i in range(3, 10)},
}
SHARED = ("text", "one", "two")


@dataclass
class Scene:
    """Processes, and stock SGLang's answer to every ask."""

    folder: Path
    model: Path
    store: StoreProcess
    encoder: EncoderProcess
    stock: Mapping[str, Answer]
    filled: bool = False
    """Whether a server has saved what is shared: the other may run alone (`-m stress`)."""

    def server(self, backend: str) -> SglangServer:
        """A language-only server, not started."""
        return SglangServer(
            self.model,
            *("--language-only", "--encoder-urls", self.encoder.url),
            *("--encoder-transfer-backend", backend, "--encoder-bootstrap-port", str(free_port())),
            *("--cornplug-app", backend, "--cornplug-store", str(self.store.socket)),
            *("--cornplug-encoder", str(self.encoder.socket)),
            *("--cornplug-encoder-deadline", str(DEADLINE_S)),
            log=self.folder / f"{backend}.log",
            env={"CORNPLUG_STORE_AUTOSTART": "false"},
        )

    def ask(self, server: SglangServer, name: str, *, salt: str | None = None) -> Answer:
        """Put one ask; the answer is stock's."""
        answer = ASKS[name].put(server, salt=salt)
        assert answer.token_ids == self.stock[name].token_ids, name
        assert answer.logprobs == pytest.approx(self.stock[name].logprobs, abs=1e-4), name
        return answer

    def tower_passes(self) -> int:
        return self.encoder.tower_passes()


def stock_answers(folder: Path, model: Path) -> Mapping[str, Answer]:
    with SglangServer(model, log=folder / "stock.log") as server:
        return {name: ask.put(server) for name, ask in ASKS.items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("epd")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    model = checkpoints.qwen2_vl(folder / "q")
    store = StoreProcess(sockets / "store.sock", log=folder / "store.log")
    encoder = EncoderProcess(
        [model],
        *("--sglang", "--store-socket", str(store.socket)),
        socket=sockets / "encoder.sock",
        log=folder / "encoder.log",
        env={"CORNPLUG_STORE_AUTOSTART": "false"},
    )
    try:
        with store, ExitStack() as ends:
            ends.callback(encoder.stop)
            stock, _ = at_once(lambda: stock_answers(folder, model), encoder.start)
            yield Scene(folder, model, store, encoder, stock)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


# One after the other: a server that idles while the encoder is killed and started again has missed an
# embedding at its first requests, and the first server's tests do both.
# One of them in script/test: they differ in who waits for the rows.
@pytest.fixture(scope="module", params=[BACKENDS[0], BACKENDS[1]])
def server(scene: Scene, request: pytest.FixtureRequest) -> Iterator[SglangServer]:
    with scene.server(request.param) as running:
        yield running


def embeddings(server: SglangServer) -> float:
    return server.metric("cornplug_hits_total", kind="embedding", source="service_epd")


def misses(server: SglangServer) -> float:
    return server.metric("cornplug_misses_total", kind="embedding")


def saved(server: SglangServer) -> float:
    return server.metric("cornplug_saves_total", kind="kv_page", outcome="stored")


def test_sglang_epd_answers_equal_stock_and_nothing_runs_twice(scene: Scene, server: SglangServer) -> None:
    came, passes = embeddings(server), scene.tower_passes()
    for name in SHARED:
        scene.ask(server, name)
    wait_until(lambda: embeddings(server) - came == 3, deadline_s=30, what="three embeddings")
    assert misses(server) == 0
    pages = sum((scene.stock[name].prompt_tokens - 1) // 64 for name in SHARED)
    if not scene.filled:
        assert scene.tower_passes() - passes == 3
        wait_for_saves(server, lambda: saved(server) >= pages, what="pages saved")
        scene.filled = True
    else:
        assert scene.tower_passes() == passes, "the store has these embeddings"
        wait_until(
            lambda: server.metric("cornplug_saved_tokens_total") >= 0.9 * 64 * pages,
            deadline_s=30,
            what="the first server's pages used",
        )
    # Another tenant finds neither pages nor embeddings of these, and is right too.
    passes, before = scene.tower_passes(), server.metric("cornplug_saved_tokens_total")
    scene.ask(server, "one", salt=f"tenant of {server.log.stem}")
    assert scene.tower_passes() == passes + 1
    assert server.metric("cornplug_saved_tokens_total") == before


def test_sglang_epd_encoder_killed_costs_no_request(scene: Scene, server: SglangServer) -> None:
    scene.ask(server, "fault 3")
    before = misses(server)
    scene.encoder.kill()
    try:
        for name in ("fault 4", "fault 5", "text"):
            assert scene.ask(server, name).total_s < DEADLINE_S
    finally:
        scene.encoder.start()
    assert misses(server) >= before + 2
    came, salts = embeddings(server), (f"fault 6, try {i}" for i in count())

    def comes_again() -> bool:
        scene.ask(server, "fault 6", salt=next(salts))
        return embeddings(server) > came

    # The back-off after one outage is half a second, a second one's a second.
    wait_until(comes_again, deadline_s=60, what="an embedding again")


def test_sglang_epd_encoder_silent_costs_its_deadline(scene: Scene, server: SglangServer) -> None:
    scene.encoder.freeze()
    try:
        for name in ("fault 7", "fault 8"):
            assert scene.ask(server, name).total_s < DEADLINE_S + MACHINE_NOISE_S
    finally:
        scene.encoder.resume()
    scene.ask(server, "fault 9")


def test_sglang_epd_unreadable_image_fails_alone(scene: Scene, server: SglangServer) -> None:
    for images in ([photos()[0].data[:300]], [photos()[0].data, b"no image"]):
        with pytest.raises(RequestFailed):
            server.chat("What is shown?", images=images, max_tokens=4)
    scene.ask(server, "one")
