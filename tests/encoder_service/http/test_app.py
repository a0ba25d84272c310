"""HTTP over ASGI: every answer, every refusal, every limit; and the HTTP clients."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from cornplug import identity
from cornplug.config import Config, QosConfig
from cornplug.encoder_service.formats.engine_seal import EMBEDDING_MEDIA_TYPE as SAFETENSORS
from cornplug.encoder_service.formats.image import digest_image
from cornplug.encoder_service.formats.messages import DECODINGS
from cornplug.encoder_service.towers.tiles import TileTower
from cornplug.qos import QosClasses

from ..conftest import SECRET, MakeEncoder, inputs_of, png, sample_image
from ..hostile_images import clear_rgb
from ..http_service import Service
from ..media.test_image import bomb

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config) -> Service:
    small = config.encoder.model_copy(update={"max_body_bytes": 200_000, "max_pixels": 100_000})
    return Service(make_encoder(), config.model_copy(update={"encoder": small}))


@pytest.fixture
def llava(llava_pair: tuple[Path, Path]) -> str:
    return str(llava_pair[0])


def test_encode_form_json_and_raw_agree(service: Service, llava: str) -> None:
    data = png(sample_image(1))
    form = service.post(data={"model": llava}, files={"image": data})
    assert form.status_code == 200, form.text
    answer = form.json()
    assert answer["shape"] == [16, 64]
    assert answer["dtype"] == "float32"
    assert answer["origin"] == "computed"
    loaded = service.encoder.registry.find_by_name(llava)
    assert loaded is not None
    key = identity.embedding_key(SECRET, loaded.served.identity, digest_image(sample_image(1)), None)
    assert answer["key"] == key.hex()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for image in (url, url.partition(",")[2]):
        again = service.post(json={"model": llava, "image": image}).json()
        assert again["data"] == answer["data"]
        assert again["origin"] == "cached"
    file = service.post(data={"model": llava}, files={"image": data}, headers={"accept": SAFETENSORS})
    assert file.headers["content-type"] == SAFETENSORS
    tensor = safetensors.torch.load(file.content)["embedding"]
    assert tensor.numpy().tobytes() == base64.b64decode(answer["data"])
    assert list(tensor.shape) == answer["shape"]
    header = json.loads(file.content[8 : 8 + int.from_bytes(file.content[:8], "little")])
    assert json.loads(header["__metadata__"]["cornplug"])["key"] == answer["key"]


def test_encode_by_http_equals_engine_inputs(service: Service, qwen: Path) -> None:
    """What HTTP gives is what the tower gives for the processor's own outputs."""
    loaded = service.encoder.registry.find_by_name(str(qwen))
    assert loaded is not None
    item = loaded.tower.prepare(inputs_of(qwen, sample_image(1)))
    want = loaded.projector.project(loaded.tower.encode([item]), [item])[0]
    answer = service.post(data={"model": str(qwen)}, files={"image": png(sample_image(1))}).json()
    got = np.frombuffer(base64.b64decode(answer["data"]), np.float32).reshape(answer["shape"])
    np.testing.assert_array_equal(got, want.numpy())


def test_encode_cache_salt_changes_key(service: Service, llava: str) -> None:
    keys = {
        service.post(data={"model": llava, **salt}, files={"image": png(sample_image(1))}).json()["key"]
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    }
    assert len(keys) == 3


def test_encode_decoding_header_chooses_the_engines_pixels(service: Service, llava: str) -> None:
    def keyed(rule: str | None) -> str:
        headers = {} if rule is None else {"x-cornplug-decoding": rule}
        answer = service.post(data={"model": llava}, files={"image": clear_rgb()}, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["key"])

    keys = {rule: keyed(rule) for rule in (*DECODINGS, None)}
    assert keys[None] == keys["vllm-0.33"] != keys["vllm-0.32"] == keys["sglang-0.5.23"]
    plain = service.post(data={"model": llava}, files={"image": png(sample_image(1))})
    assert plain.json()["key"] == keys["vllm-0.32"]
    refused = service.post(
        data={"model": llava}, files={"image": clear_rgb()}, headers={"x-cornplug-decoding": "vllm-9"}
    )
    assert (refused.status_code, refused.json()["error"]["reason"]) == (422, "bad_input")
    assert "x-cornplug-decoding" in refused.json()["error"]["message"]
    assert "vllm-0.33" in refused.json()["error"]["message"]


def image64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"image": image64(png(sample_image(1)))}, 422, "bad_input"),
        ({"model": "M"}, 422, "bad_input"),
        ({"model": "M", "image": "x", "key": "00"}, 422, "bad_input"),
        ({"model": "M", "image": "!!"}, 422, "bad_input"),
        ({"model": "M", "image": "data:image/png,abc"}, 422, "bad_input"),
        ({"model": "M", "image": "https://192.0.2.1/cat.png"}, 422, "remote_url"),
        ({"model": "M", "image": "file:///etc/passwd"}, 422, "remote_url"),
        ({"model": "M", "image": ""}, 422, "empty"),
        ({"model": "M", "image": image64(b"no image")}, 422, "unknown_format"),
        ({"model": "M", "image": image64(png(sample_image(1))[:80])}, 422, "damaged"),
        ({"model": "M", "image": image64(bomb(60_000, 60_000))}, 413, "too_many_pixels"),
        ({"model": "M", "image": image64(png(sample_image(1))), "deadline_s": -1}, 422, "bad_input"),
        ({"model": "nobody", "image": image64(png(sample_image(1)))}, 404, "unknown_model"),
    ],
)
def test_encode_bad_fields_are_refused_and_counted(
    service: Service, llava: str, body: dict[str, Any], status: int, reason: str
) -> None:
    if body.get("model") == "M":
        body = {**body, "model": llava}
    answer = service.post(json=body)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
    assert answer.json()["error"]["message"]
    assert service.post(data={"model": llava}, files={"image": png(sample_image(1))}).status_code == 200
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
def test_encode_broken_bodies_are_refused(service: Service, options: dict[str, Any], status: int) -> None:
    answer = service.post(**options)
    assert answer.status_code == status, answer.text
    assert "reason" in answer.json()["error"]


def test_encode_body_without_length_is_limited(service: Service) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    answer = service.post(content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "too_large")
    announced = service.post(content=b"x" * 300_000, headers={"content-type": "application/json"})
    assert announced.json()["error"] == answer.json()["error"]
    counted = 'cornplug_encoder_refusals_total{qos="default",reason="too_large"} 2.0'
    assert counted in service.call("GET", "/metrics").text


def test_encode_key_selects_class_and_deadline(make_encoder: MakeEncoder, config: Config, llava: str) -> None:
    gold = {"share": 0.5, "deadline_s": 1e-9, "api_keys": ["k"], "apps": ["shop"]}
    classes = QosClasses(QosConfig.model_validate({"classes": {"gold": gold}}))
    service = Service(make_encoder(classes=classes), config)
    form = {"data": {"model": llava}, "files": {"image": png(sample_image(1))}}
    late = service.post(headers={"authorization": "Bearer k", "x-cornplug-app": "shop"}, **form)
    assert late.json()["error"]["reason"] == "too_late"
    assert service.post(headers={"authorization": "Bearer wrong"}, **form).status_code == 200
    metrics = service.call("GET", "/metrics").text
    assert 'cornplug_encoder_refusals_total{qos="gold",reason="too_late"} 1.0' in metrics
    assert 'cornplug_encoder_answers_total{app="http",origin="computed",qos="default"} 1.0' in metrics


def test_encode_overloaded_has_retry_after(make_encoder: MakeEncoder, config: Config, llava: str) -> None:
    encoder = make_encoder(max_waiting=0)
    answer = Service(encoder, config).post(data={"model": llava}, files={"image": png(sample_image(1))})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["retry_after_s"] > 0


def test_encode_too_late_is_504(
    make_encoder: MakeEncoder, config: Config, llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = TileTower.prepare
    monkeypatch.setattr(TileTower, "prepare", lambda *a: (release.wait(0.2), real(*a))[1])
    answer = Service(make_encoder(), config).post(
        data={"model": llava, "deadline_s": "0.01"}, files={"image": png(sample_image(1))}
    )
    assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "too_late")


def test_app_models_health_metrics_and_openapi_answer(service: Service, llava: str) -> None:
    rows = service.call("GET", "/v1/models").json()["models"]
    assert rows[0]["name"] == llava
    assert rows[0]["tower_fp"] == rows[1]["tower_fp"] != rows[2]["tower_fp"]
    assert service.call("GET", "/health").json() == {"status": "ok"}
    service.post(data={"model": llava}, files={"image": png(sample_image(1))})
    metrics = service.call("GET", "/metrics").text
    assert "cornplug_encoder_tower_passes_total 1.0" in metrics
    assert 'cornplug_encoder_answers_total{app="http",origin="computed",qos="default"} 1.0' in metrics
    spec = service.call("GET", "/openapi.json").json()
    content = spec["paths"]["/v1/encode"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data"}
    assert "key" in json.dumps(spec["components"]["schemas"]["EncodeAnswer"])
