"""HTTP over ASGI: every answer, every refusal, every limit; and the HTTP clients."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import torch

from cornplug import identity
from cornplug.config import Config, QosConfig
from cornplug.encoder_service import media
from cornplug.encoder_service.client import AsyncEncoderClient, EncoderClient
from cornplug.encoder_service.towers.clip import ClipTower
from cornplug.errors import EncoderRefused, EncoderUnavailable, MediaError, StoreError
from cornplug.qos import Classes
from cornplug.store import entry
from cornplug.store.memory import MemoryStore

from .conftest import SECRET, MakeEncoder, inputs_of, picture, png
from .http_service import Service
from .test_media import bomb

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config) -> Service:
    small = config.encoder.model_copy(update={"max_body_bytes": 200_000, "max_pixels": 100_000})
    return Service(make_encoder(), config.model_copy(update={"encoder": small}))


@pytest.fixture
def llava(llava_pair: tuple[Path, Path]) -> str:
    return str(llava_pair[0])


def test_multipart_json_and_raw_agree(service: Service, llava: str) -> None:
    data = png(picture(1))
    form = service.post(data={"model": llava}, files={"image": data})
    assert form.status_code == 200, form.text
    answer = form.json()
    assert answer["shape"] == [16, 64]
    assert answer["dtype"] == "float32"
    assert answer["tower"] == "ran"
    loaded = service.encoder.registry.by_name(llava)
    assert loaded is not None
    key = identity.embedding_key(SECRET, loaded.served.identity, media.digest_image(picture(1)), None)
    assert answer["key"] == key.hex()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for image in (url, url.partition(",")[2]):
        again = service.post(json={"model": llava, "image": image}).json()
        assert again["data"] == answer["data"]
        assert again["tower"] == "reused"
    raw = service.post(
        data={"model": llava}, files={"image": data}, headers={"accept": "application/octet-stream"}
    )
    assert raw.content == base64.b64decode(answer["data"])
    assert raw.headers["x-cornplug-shape"] == "16,64"
    assert raw.headers["x-cornplug-key"] == answer["key"]


def test_equals_the_engines_path(service: Service, qwen: Path) -> None:
    """What HTTP gives is what the tower gives for the processor's own outputs."""
    loaded = service.encoder.registry.by_name(str(qwen))
    assert loaded is not None
    item = loaded.tower.prepare(inputs_of(qwen, picture(1)))
    want = loaded.projector.project(loaded.tower.encode([item]), [item])[0]
    answer = service.post(data={"model": str(qwen)}, files={"image": png(picture(1))}).json()
    got = np.frombuffer(base64.b64decode(answer["data"]), np.float32).reshape(answer["shape"])
    np.testing.assert_array_equal(got, want.numpy())


def test_a_salt_changes_the_key(service: Service, llava: str) -> None:
    keys = {
        service.post(data={"model": llava, **salt}, files={"image": png(picture(1))}).json()["key"]
        for salt in ({}, {"salt": "a"}, {"salt": "b"})
    }
    assert len(keys) == 3


def image64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"image": image64(png(picture(1)))}, 422, "bad_input"),
        ({"model": "M"}, 422, "bad_input"),
        ({"model": "M", "image": "x", "key": "00"}, 422, "bad_input"),
        ({"model": "M", "image": "!!"}, 422, "bad_input"),
        ({"model": "M", "image": "data:image/png,abc"}, 422, "bad_input"),
        ({"model": "M", "image": "https://example.org/cat.png"}, 422, "remote_url"),
        ({"model": "M", "image": "file:///etc/passwd"}, 422, "remote_url"),
        ({"model": "M", "image": ""}, 422, "empty"),
        ({"model": "M", "image": image64(b"no picture")}, 422, "unknown_format"),
        ({"model": "M", "image": image64(png(picture(1))[:80])}, 422, "damaged"),
        ({"model": "M", "image": image64(bomb(60_000, 60_000))}, 413, "too_many_pixels"),
        ({"model": "M", "image": image64(png(picture(1))), "deadline_s": -1}, 422, "bad_input"),
        ({"model": "nobody", "image": image64(png(picture(1)))}, 404, "unknown_model"),
    ],
)
def test_refusals(service: Service, llava: str, body: dict[str, Any], status: int, reason: str) -> None:
    if body.get("model") == "M":
        body = {**body, "model": llava}
    answer = service.post(json=body)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
    assert answer.json()["error"]["message"]
    assert service.post(data={"model": llava}, files={"image": png(picture(1))}).status_code == 200
    assert (
        f'cornplug_encoder_refusals_total{{qos="default",reason="{reason}"}} 1.0'
        in service.call("GET", "/metrics").text
    )


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 422),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415),
        ({"data": {"model": "m", "image": "x"}}, 415),
        ({"content": b"x"}, 415),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 422),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 422),
        ({"data": {"model": "m", "image": "text"}, "files": {"other": b"x"}}, 422),
        ({"data": {"model": "m"}, "files": {"image": b"x" * 300_000}}, 413),
    ],
)
def test_broken_bodies(service: Service, options: dict[str, Any], status: int) -> None:
    answer = service.post(**options)
    assert answer.status_code == status, answer.text
    assert "reason" in answer.json()["error"]


def test_a_body_without_a_length_is_counted(service: Service) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    answer = service.post(content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "too_large")


def test_a_key_brings_its_class_and_its_deadline(
    make_encoder: MakeEncoder, config: Config, llava: str
) -> None:
    gold = {"share": 0.5, "deadline_s": 1e-9, "api_keys": ["k"], "apps": ["shop"]}
    classes = Classes(QosConfig.model_validate({"classes": {"gold": gold}}))
    service = Service(make_encoder(classes=classes), config)
    form = {"data": {"model": llava}, "files": {"image": png(picture(1))}}
    late = service.post(headers={"authorization": "Bearer k", "x-cornplug-app": "shop"}, **form)
    assert late.json()["error"]["reason"] == "too_late"
    assert service.post(headers={"authorization": "Bearer wrong"}, **form).status_code == 200
    metrics = service.call("GET", "/metrics").text
    assert 'cornplug_encoder_refusals_total{qos="gold",reason="too_late"} 1.0' in metrics
    assert 'cornplug_encoder_answers_total{app="http",qos="default",tower="ran"} 1.0' in metrics


def test_overloaded_tells_when_to_come_back(make_encoder: MakeEncoder, config: Config, llava: str) -> None:
    encoder = make_encoder(max_waiting=0)
    answer = Service(encoder, config).post(data={"model": llava}, files={"image": png(picture(1))})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["retry_after_s"] > 0


def test_too_late_is_504(
    make_encoder: MakeEncoder, config: Config, llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = ClipTower.prepare
    monkeypatch.setattr(ClipTower, "prepare", lambda *a: (release.wait(0.2), real(*a))[1])
    answer = Service(make_encoder(), config).post(
        data={"model": llava, "deadline_s": "0.01"}, files={"image": png(picture(1))}
    )
    assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "too_late")


def test_models_health_metrics_openapi(service: Service, llava: str) -> None:
    rows = service.call("GET", "/v1/models").json()["models"]
    assert rows[0]["name"] == llava
    assert rows[0]["tower_fp"] == rows[1]["tower_fp"] != rows[2]["tower_fp"]
    assert service.call("GET", "/health").json() == {"status": "ok"}
    service.post(data={"model": llava}, files={"image": png(picture(1))})
    metrics = service.call("GET", "/metrics").text
    assert "cornplug_encoder_tower_passes_total 1.0" in metrics
    assert 'cornplug_encoder_answers_total{app="http",qos="default",tower="ran"} 1.0' in metrics
    spec = service.call("GET", "/openapi.json").json()
    content = spec["paths"]["/v1/encode"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data"}
    assert "key" in json.dumps(spec["components"]["schemas"]["EncodeAnswer"])


class Bridge(httpx.BaseTransport):
    """Lets the synchronous client speak to an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> tuple[httpx.Response, bytes]:
            async with httpx.AsyncClient(transport=self._inner) as client:
                response = await client.send(
                    httpx.Request(
                        request.method, request.url, headers=request.headers, content=request.read()
                    )
                )
                return response, await response.aread()

        response, content = anyio.run(send)
        return httpx.Response(response.status_code, headers=response.headers, content=content)


@pytest.fixture
def client(service: Service) -> Iterator[EncoderClient]:
    with EncoderClient("http://e", transport=Bridge(service.app)) as client:
        yield client


def test_client_by_path_bytes_and_image(client: EncoderClient, llava: str, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    picture(1).save(file)
    refs = [client.encode(image, model=llava) for image in (str(file), file, png(picture(1)), picture(1))]
    assert len({ref.key for ref in refs}) == 1
    assert (refs[0].shape, refs[0].dtype, refs[0].tower, refs[1].tower) == (
        (16, 64),
        "float32",
        "ran",
        "reused",
    )
    assert not refs[0].in_store
    assert refs[0].seconds > 0
    np.testing.assert_array_equal(refs[0].numpy(), refs[0].tensor().numpy())
    assert client.models()[0]["name"] == llava


def test_client_errors(client: EncoderClient, llava: str, tmp_path: Path) -> None:
    with pytest.raises(EncoderRefused) as refused:
        client.encode(b"no picture", model=llava)
    assert refused.value.reason == "unknown_format"
    with pytest.raises(EncoderRefused, match="nobody"):
        client.encode(picture(1), model="nobody")
    with pytest.raises(MediaError, match="cannot read"):
        client.encode(tmp_path / "absent.png", model=llava)
    with EncoderClient("http://127.0.0.1:9", deadline_s=1) as down, pytest.raises(EncoderUnavailable) as e:
        down.encode(picture(1), model=llava)
    assert e.value.reason == "encoder_down"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="hello"),
        httpx.Response(200, json={"x": 1}),
        httpx.Response(502, text="bad gateway"),
        httpx.Response(200, headers={"content-type": "application/octet-stream"}, content=b"abc"),
        httpx.Response(
            200,
            content=b"abc",
            headers={
                "content-type": "application/octet-stream",
                "x-cornplug-key": "00",
                "x-cornplug-shape": "16,64",
                "x-cornplug-dtype": "float32",
                "x-cornplug-tower": "ran",
                "x-cornplug-seconds": "1",
            },
        ),
    ],
)
def test_client_garbage(answer: httpx.Response) -> None:
    transport = httpx.MockTransport(lambda request: answer)
    with EncoderClient("http://e", transport=transport) as client, pytest.raises(EncoderUnavailable) as e:
        client.encode(picture(1), model="m")
    assert e.value.reason == "encoder_garbage"


def test_client_reads_from_the_store_without_a_copy(
    make_encoder: MakeEncoder, config: Config, llava: str, memory_store: MemoryStore
) -> None:
    service = Service(make_encoder(memory_store.connect()), config)
    mine = memory_store.connect()
    client = EncoderClient("http://e", transport=Bridge(service.app), store=mine)
    ref = client.encode(picture(1), model=llava)
    assert ref.in_store
    found = entry.get(mine, ref.key, deadline_s=1)
    assert found is not None
    assert ref.numpy().tobytes() == bytes(found[1])
    assert not ref.numpy().flags.owndata
    assert torch.equal(ref.tensor(), torch.from_numpy(ref.numpy().copy()))
    assert mine.stat(deadline_s=1).leases == 1
    ref.close()
    assert mine.stat(deadline_s=1).leases == 0
    with pytest.raises(StoreError) as e:
        ref.numpy()
    assert e.value.reason == "lease_expired"
    collected = client.encode(picture(1), model=llava)
    del collected
    assert mine.stat(deadline_s=1).leases == 0


def test_client_falls_back_to_bytes(
    make_encoder: MakeEncoder, config: Config, llava: str, memory_store: MemoryStore
) -> None:
    """The client's store is another one, or the entry is damaged: the answer carries the bytes."""
    service = Service(make_encoder(memory_store.connect()), config)
    elsewhere = MemoryStore(capacity_bytes=1 << 20).connect()
    client = EncoderClient("http://e", transport=Bridge(service.app), store=elsewhere)
    want = client.encode(picture(1), model=llava)
    assert not want.in_store
    mine = memory_store.connect()
    lease = mine.lease([want.key], ttl_s=9, deadline_s=1)[0]
    assert lease is not None
    mine.view(lease.location, writable=True)[0] ^= 1
    mine.release([lease.token], deadline_s=1)
    near = EncoderClient("http://e", transport=Bridge(service.app), store=mine)
    ref = near.encode(picture(1), model=llava)
    assert not ref.in_store
    assert ref.numpy().tobytes() == want.numpy().tobytes()


def test_async_client(service: Service, llava: str) -> None:
    async def use() -> None:
        async with AsyncEncoderClient("http://e", transport=httpx.ASGITransport(service.app)) as client:
            ref = await client.encode(picture(1), model=llava)
            assert ref.shape == (16, 64)
            assert len(await client.models()) == 3
            with pytest.raises(EncoderRefused):
                await client.encode(b"", model=llava)

    anyio.run(use)
