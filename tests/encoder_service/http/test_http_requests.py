"""Requests as a whole: refusals, disconnects, bodies that are slow or too many, and a service that stops."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from time_limits import TimeLimits

from cornplug.config import Config
from cornplug.encoder_service.http import requests
from cornplug.encoder_service.preprocess.preparer import UndecodedMedia
from cornplug.encoder_service.towers.tiles import TileTower

from ..conftest import MakeEncoder, eventually, png, sample_image
from ..http_service import Service


def image64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config) -> Service:
    return Service(make_encoder(), config)


@pytest.fixture
def llava(llava_pair: tuple[Path, Path]) -> str:
    return str(llava_pair[0])


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"model": "nobody", "image": "x"}, 404, "unknown_model"),
        ({"model": "M", "image": ""}, 422, "empty"),
        ({"model": "M"}, 422, "bad_input"),
        ({"model": "M", "image": "x", "audio": "y"}, 422, "bad_input"),
        ({"model": "M", "items": [{"image": "x"}]}, 422, "bad_input"),
    ],
)
def test_http_refusal_has_its_status(
    service: Service, llava: str, body: dict[str, Any], status: int, reason: str
) -> None:
    body = {**body, "model": llava if body["model"] == "M" else body["model"]}
    answer = service.post(json=body)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)


def test_http_full_service_refuses_with_503(make_encoder: MakeEncoder, config: Config, llava: str) -> None:
    service = Service(make_encoder(max_waiting=0), config)
    answer = service.post(json={"model": llava, "image": image64(png(sample_image(1)))})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("count", [2, 20])
def test_http_form_with_several_files_is_refused(service: Service, llava: str, count: int) -> None:
    answer = service.post(data={"model": llava}, files=[("image", b"x")] * count)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "bad_input")


class Held:
    """Holds the tower until it is let go; says what entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.passes = 0
        real = TileTower.encode

        def encode(tower: TileTower, items: Any) -> Any:
            self.passes += len(items)
            assert self.release.wait(20)
            return real(tower, items)

        monkeypatch.setattr(TileTower, "encode", encode)


def test_http_disconnect_cancels_unshared_work(
    make_encoder: MakeEncoder, config: Config, llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn tells an application of a lost client by `http.disconnect` only."""
    service = Service(make_encoder(max_batch_items=1), config)
    held = Held(monkeypatch)

    def body(seed: int) -> dict[str, Any]:
        return {"model": llava, "image": image64(png(sample_image(seed)))}

    async def scenario() -> list[httpx.Response]:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
            # The first image is in the tower, the second waits for this caller too.
            stay = [asyncio.create_task(client.post("/v1/encode", json=body(0)))]
            await asyncio.to_thread(eventually, lambda: held.passes == 1)
            stay.append(asyncio.create_task(client.post("/v1/encode", json=body(1))))
            await asyncio.to_thread(eventually, lambda: service.encoder.count_waiting() == 2)
            go = [asyncio.create_task(_post_and_leave(service, body(seed), leave)) for seed in (1, 2)]
            await asyncio.to_thread(eventually, lambda: service.encoder.count_waiting() == 4)
            leave.set()
            await asyncio.gather(*go)
            await asyncio.to_thread(eventually, lambda: service.encoder.count_waiting() == 2)
            held.release.set()
            return await asyncio.gather(*stay)

    leave = asyncio.Event()
    for answer in anyio.run(scenario):
        assert answer.json()["shape"] == [16, 64]
    assert held.passes == 2


async def _post_and_leave(service: Service, body: dict[str, Any], leave: asyncio.Event) -> None:
    """An ASGI server whose client hangs up."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/encode",
        "raw_path": b"/v1/encode",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("e", 80),
    }
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await service.app(scope, receive, send)


def test_http_draining_service_refuses_and_is_not_ready(
    make_encoder: MakeEncoder, config: Config, llava: str
) -> None:
    encoder = config.encoder.model_copy(update={"sglang": True})
    service = Service(make_encoder(), config.model_copy(update={"encoder": encoder}))
    assert service.call("GET", "/ready").status_code == 200
    service.gate.close()
    for answer in (
        service.call("GET", "/ready"),
        service.post(data={"model": llava}, files={"image": png(sample_image(1))}),
    ):
        assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "draining")
        assert answer.headers["retry-after"] == "1"
    assert service.call("GET", "/health").status_code == 200
    # SGLang's encodes under way need it, so it is asked what it is: no such request here.
    assert service.call("POST", "/scheduler_receive_url", json={}).status_code == 422


def test_http_ready_without_towers_is_503(make_encoder: MakeEncoder, config: Config) -> None:
    service = Service(make_encoder(), config)
    service.encoder.close()
    answer = service.call("GET", "/ready")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "down")


def test_body_guard_all_bodies_share_a_budget(
    make_encoder: MakeEncoder, config: Config, llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_MAX_BODIES_BYTES", 1)
    small = config.encoder.model_copy(update={"max_body_bytes": 100_000})
    service = Service(make_encoder(), config.model_copy(update={"encoder": small}))
    image = png(sample_image(1))

    async def scenario() -> list[int]:
        go = asyncio.Event()

        async def slow(holds: int) -> Any:
            yield b"x" * holds
            await go.wait()

        transport = httpx.ASGITransport(service.app)
        json_kind = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
            waiting = [
                asyncio.create_task(client.post("/v1/encode", content=slow(160_000), headers=json_kind))
                for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            big = await client.post("/v1/encode", content=b"x" * 90_000, headers=json_kind)
            go.set()
            ends = [(await task).status_code for task in waiting]
            after = await client.post("/v1/encode", data={"model": llava}, files={"image": image})
            return [big.status_code, *ends, after.status_code]

    assert anyio.run(scenario) == [503, 422, 422, 422, 200]


def test_body_guard_trickling_body_is_refused(
    make_encoder: MakeEncoder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "BODY_DEADLINE_S", 0.2)
    service = Service(make_encoder(), config)

    async def trickle() -> Any:
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.02)

    answer = service.post(content=trickle(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (408, "slow_body")


@pytest.mark.more
def test_http_endless_preprocessing_is_too_late(
    service: Service, llava: str, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    real = UndecodedMedia.prepare
    let_go = threading.Event()

    def prepare(medium: UndecodedMedia, *arguments: Any, **options: Any) -> Any:
        if list(medium._source.contents) == [b"slow"]:
            let_go.wait(20)
        return real(medium, *arguments, **options)

    monkeypatch.setattr(UndecodedMedia, "prepare", prepare)
    # The image beside the slow one must not wait for a decoding process, nor long for its turn.
    service.encoder.start_decoding()
    eventually(service.encoder.is_decoding_ready)

    def ask(data: bytes) -> httpx.Response:
        return service.post(json={"model": llava, "image": image64(data), "deadline_s": 6.0})

    assert ask(png(sample_image(2))).status_code == 200
    with within(10), ThreadPoolExecutor(2) as threads:
        slow, other = threads.map(ask, (b"slow", png(sample_image(1))))
    let_go.set()
    assert slow.json()["error"]["reason"] == "too_late"
    assert other.json()["shape"] == [16, 64]
