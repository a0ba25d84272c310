"""The operator's routes: who may, what a reload answers, and what a failed one leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from cornplug.config import Config
from cornplug.encoder_service.model_registry import ModelRegistry
from devkit import checkpoints

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service

JSON = {"content-type": "application/json"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoints.llava(tmp_path / "m", llm_seed=1)


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config, model: Path) -> Service:
    return _service(make_encoder, config, model)


def _service(make: MakeEncoder, config: Config, model: Path, **changes: Any) -> Service:
    registry = ModelRegistry.open([str(model)], dtype="float32", device="cpu")
    section = type(config.encoder).model_validate({**config.encoder.model_dump(), **changes})
    return Service(make(registry=registry), config.model_copy(update={"encoder": section}))


def reload(service: Service, body: bytes = b"{}", peer: str = "127.0.0.1", **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(service.app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
            return await client.post("/v1/reload", content=body, headers={**JSON, **headers})

    return anyio.run(send)


def embedding(service: Service, model: Path) -> dict[str, Any]:
    answer = service.post(data={"model": str(model)}, files={"image": png(sample_image(1))})
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = answer.json()
    return row


def test_reload_replaced_weights_change_keys(service: Service, model: Path, tmp_path: Path) -> None:
    before = embedding(service, model)
    assert reload(service).json() == {"models": []}
    other = checkpoints.llava(tmp_path / "other", llm_seed=1, projector_seed=99)
    for file in other.iterdir():
        shutil.copy(file, model / file.name)
    (row,) = reload(service, b'{"model": "%s"}' % str(model).encode()).json()["models"]
    assert row["epoch"] == 1
    assert row == service.call("GET", "/v1/models").json()["models"][0]
    after = embedding(service, model)
    assert after["key"] != before["key"]
    assert after["data"] != before["data"]


def test_reload_unloadable_weights_keep_old_ones(service: Service, model: Path) -> None:
    before = embedding(service, model)
    rows = service.call("GET", "/v1/models").json()
    (model / "config.json").write_text("{")
    answer = reload(service)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (409, "not_reloaded")
    assert "previous weights stay in use" in answer.json()["error"]["message"]
    assert service.call("GET", "/v1/models").json() == rows
    assert embedding(service, model)["key"] == before["key"]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"model": "nobody"}', {}, 404),
        (b"", {}, 422),
        (b"[]", {}, 422),
        (b'{"model": 1}', {}, 422),
        (b'{"models": "m"}', {}, 422),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_reload_invalid_request_is_refused(
    service: Service, body: bytes, headers: dict[str, str], status: int
) -> None:
    answer = reload(service, body, **headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["reason"]


@pytest.mark.parametrize(
    ("peer", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("10.0.0.1", {}, 403),
        ("", {}, 403),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 403),
        ("127.0.0.1", {"forwarded": "for=1.2.3.4"}, 403),
        ("10.0.0.1", {"authorization": "Bearer "}, 403),
    ],
)
def test_reload_without_admin_key_is_for_this_host(
    service: Service, peer: str, headers: dict[str, str], status: int
) -> None:
    assert reload(service, peer=peer, **headers).status_code == status


@pytest.mark.parametrize(
    ("peer", "authorization", "status"),
    [
        ("10.0.0.1", "Bearer s3cret", 200),
        ("10.0.0.1", "Bearer s3cre", 403),
        ("10.0.0.1", "Bearer ", 403),
        ("127.0.0.1", "", 403),
    ],
)
def test_reload_with_admin_key_needs_that_key(
    make_encoder: MakeEncoder, config: Config, model: Path, peer: str, authorization: str, status: int
) -> None:
    service = _service(make_encoder, config, model, admin_key="s3cret")
    answer = reload(service, peer=peer, authorization=authorization)
    assert answer.status_code == status
    assert "s3cret" not in answer.text + repr(service.config)


def test_http_models_list_modalities_and_rows(
    make_encoder: MakeEncoder, config: Config, llava_pair: tuple[Path, Path], qwen: Path
) -> None:
    llava, _, qwen_row = Service(make_encoder(), config).call("GET", "/v1/models").json()["models"]
    assert llava["modalities"] == ["image"]
    assert [(m["name"], m["rows"]) for m in llava["media"]] == [("image", "fixed")]
    assert llava["media"][0]["identity"] == llava["identity"]
    assert {m["rows"] for m in qwen_row["media"]} == {"by medium"}
    assert [m["name"] for m in qwen_row["media"]] == qwen_row["modalities"]
    assert llava["epoch"] == 0
