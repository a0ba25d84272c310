"""An engine that loads no vision tower: the encoder service takes its images, dies and comes back."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from integration.stack import ASKS, Ask, Stack
from promises.conftest import CALM, CHUNKED

from devkit.engines import EngineServer, RequestFailed, data_url, photos, wait_until

UNSEEN = 10


@pytest.fixture(scope="module")
def engine(stack: Stack) -> Iterator[EngineServer]:
    flags = ("--cornplug-tower", "service", "--cornplug-encoder", stack.encoder.url)
    server = stack.vllm("towerless", "q", *CHUNKED, *CALM, *flags)
    for other in stack.servers.values():
        other.stop()
    if not stack.encoder.is_alive():
        stack.encoder.start()
    stack.start(towerless=server)
    yield server
    server.stop()


def post(engine: EngineServer, photo: int) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": data_url(photos()[photo].data)}}]
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=300, trust_env=False)


@pytest.mark.support("Sharing", "an engine without a vision tower (`--cornplug-tower service`)")
def test_engine_without_tower_answers_as_stock(stack: Stack, engine: EngineServer) -> None:
    assert "did not load" in engine.log.read_text()
    for i, ask in enumerate(ASKS):
        stack.same_as_stock("q", i, ask.put(engine))
    with pytest.raises(RequestFailed) as broken:
        engine.chat("what is this", images=[b"\x89PNG no image"], max_tokens=4)
    assert broken.value.status == 400


def test_request_without_service_is_refused_until_it_returns(stack: Stack, engine: EngineServer) -> None:
    stack.encoder.kill()
    refused = post(engine, UNSEEN)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert stack.encoder.url in refused.text
    stack.same_as_stock("q", 0, ASKS[0].put(engine))
    stack.encoder.start()
    wait_until(lambda: post(engine, UNSEEN).status_code == 200, deadline_s=120, what="the service's return")
    Ask("What is shown?", (UNSEEN,)).put(engine)
