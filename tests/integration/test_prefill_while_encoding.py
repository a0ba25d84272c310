"""vLLM prefills a request while its images are encoded: equal answers, and no one waits for a late image."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from integration.stack import PREAMBLE, count

from devkit import checkpoints
from devkit.checkpoints.tiles import gemma3
from devkit.engines import Answer, EngineServer, StoreProcess, VllmServer, data_url, photos
from devkit.processes import EncoderProcess, together

DEADLINE_S = 6.0


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(checkpoints.qwen2_vl, id="qwen2_vl"),
        # The tokens of an image attend both ways: no chunk may end inside one.
        pytest.param(gemma3, id="gemma3"),
    ],
)
def test_engine_prefills_before_images_in_flight_and_answers_as_stock(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = make(tmp_path / "model")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    env = {
        "CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret"),
        "CORNPLUG_STORE_AUTOSTART": "false",
        "CORNPLUG_STORE_LOAD_WHEN": "always",
    }
    store = StoreProcess(sockets / "s.sock", log=tmp_path / "store.log", env=env)
    service = EncoderProcess(
        [model], "--store-socket", str(store.socket),
        socket=sockets / "e.sock", log=tmp_path / "encoder.log", env=env,
    )  # fmt: skip
    engine = VllmServer(
        model, "--kv-connector", "cornplug", "--cornplug-store", str(store.socket),
        "--cornplug-encoder", str(service.socket), "--cornplug-encoder-deadline", str(DEADLINE_S),
        log=tmp_path / "engine.log", env=env,
    )  # fmt: skip
    stock = VllmServer(model, log=tmp_path / "stock.log")
    try:
        store.start()
        with together(service, stock, engine):
            several = _ask(engine, range(4))
            assert several.token_ids == _ask(stock, range(4)).token_ids
            assert count(engine, "early_prefills_total") >= 1
            assert count(engine, "hits_total", kind="embedding") == 4
            assert count(engine, "misses_total", kind="embedding") == 0
            with _stopped(service), ThreadPoolExecutor(1) as pool:
                late = pool.submit(_ask, engine, (4, 5))
                time.sleep(0.5)
                engine.chat("what is a cache", max_tokens=8)
                assert not late.done(), "the text request was held back"
                assert late.result().token_ids == _ask(stock, (4, 5)).token_ids
                assert count(engine, "misses_total", reason="encoder_timeout") >= 1
            _leave(engine, (6,))
            assert _ask(engine, range(4)).token_ids == several.token_ids
    finally:
        store.kill()
        shutil.rmtree(sockets, ignore_errors=True)


def _body(images: range | tuple[int, ...]) -> list[dict[str, object]]:
    found = [photos()[i].data for i in images]
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in found]
    words = {"type": "text", "text": PREAMBLE}
    return [{"role": "user", "content": [words, *parts, {"type": "text", "text": "Compare them."}]}]


def _ask(server: EngineServer, images: range | tuple[int, ...]) -> Answer:
    return server.chat(_body(images), max_tokens=8)


def _leave(server: EngineServer, images: tuple[int, ...]) -> None:
    """Send a request, and go before its answer."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"model": "model", "messages": _body(images), "max_tokens": 600, "ignore_eos": True},
            timeout=httpx.Timeout(10, read=0.2),
            trust_env=False,
        )


@contextmanager
def _stopped(service: EncoderProcess) -> Iterator[None]:
    """A service that accepts requests and answers none."""
    pids = service.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
