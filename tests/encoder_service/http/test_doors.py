"""Who is let in by HTTP: keys, tenants' salts, Host, Origin, content types; and what strangers are told."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from expected_errors import expect_error
from starlette.requests import HTTPConnection

from cornplug import identity
from cornplug.config import Config, QosConfig, load
from cornplug.encoder_service.access import AuditLog, check_exposure
from cornplug.encoder_service.formats import image
from cornplug.encoder_service.http import requests
from cornplug.errors import ConfigError
from cornplug.qos import QosClasses
from cornplug.store.memory import MemoryStore

from ..conftest import SECRET, MakeEncoder, png, sample_image
from ..http_service import Service

QOS = QosConfig.model_validate(
    {
        "classes": {
            "gold": {"share": 0.5, "api_keys": ["gold-key"], "tenants": {"acme": ["acme-key", "acme-2"]}},
            "silver": {"tenants": {"beta": ["beta-key"]}},
        }
    }
)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


Make = Callable[..., Service]


@pytest.fixture
def make(make_encoder: MakeEncoder, config: Config) -> Make:
    def made(store: Any = None, qos: QosConfig = QOS, **changes: Any) -> Service:
        changed = {"trust_salts": False, **changes}
        section = type(config.encoder).model_validate({**config.encoder.model_dump(), **changed})
        encoder = make_encoder(store, classes=QosClasses(qos))
        return Service(encoder, config.model_copy(update={"encoder": section}))

    return made


def encode(
    service: Service, model: Path, *, headers: Any = None, seed: int = 1, **fields: Any
) -> httpx.Response:
    return service.post(
        data={"model": str(model), **fields}, files={"image": png(sample_image(seed))}, headers=headers or {}
    )


def reason(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["reason"]


# -- keys ------------------------------------------------------------------------------------


def test_http_require_key_refuses_others(make: Make, llava_pair: Any) -> None:
    service = make(require_key=True, admin_key="operators", sglang=True)
    model = llava_pair[0]
    refused = [encode(service, model), encode(service, model, headers={"authorization": "Bearer x"})]
    paths = ("/v1/models", "/v1/status", "/metrics", "/openapi.json", "/", "/no-such-path")
    refused += [service.call("GET", path) for path in paths]
    refused += [
        service.call("POST", path, json={}) for path in ("/v1/reload", "/encode", "/scheduler_receive_url")
    ]
    for answer in refused:
        assert reason(answer) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert str(model) not in answer.text
    for path in ("/health", "/ready"):
        assert service.call("GET", path).status_code == 200
    for who in ("gold", "acme", "beta"):
        assert encode(service, model, headers=key(who)).status_code == 200
    operator = {"authorization": "Bearer operators"}
    assert service.call("GET", "/v1/status", headers=operator).status_code == 200
    assert service.call("POST", "/v1/reload", json={}, headers=operator).status_code == 200
    assert reason(service.call("POST", "/v1/reload", json={}, headers=key("gold"))) == (403, "forbidden")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host": "0.0.0.0"}, "encoder.host"),
        ({"host": "::"}, "encoder.host"),
        ({"host": "10.1.2.3"}, "encoder.host"),
        ({"host": "encoder.example.org"}, "encoder.host"),
        ({"require_key": True}, "encoder.require_key"),
        ({"host": "127.0.0.1"}, None),
        ({"host": "::1"}, None),
        ({"host": "localhost"}, None),
        ({"host": "0.0.0.0", "allow_anonymous": True}, None),
        ({"host": "0.0.0.0", "require_key": True, "admin_key": "k"}, None),
    ],
)
def test_check_exposure_public_host_without_keys_is_refused(
    settings: dict[str, Any], field: str | None
) -> None:
    config = load({f"encoder.{name}": value for name, value in settings.items()}, environ={}).encoder
    if field is None:
        check_exposure(config, QosConfig())
    else:
        with pytest.raises(ConfigError) as e:
            check_exposure(config, QosConfig())
        assert e.value.field == field
    if config.require_key:
        check_exposure(config, QOS)


# -- tenants ---------------------------------------------------------------------------------


def test_encode_tenant_key_sets_salt(make: Make, llava_pair: Any) -> None:
    store = MemoryStore(capacity_bytes=16 << 20).connect()
    service = make(store)
    (loaded, *_) = service.encoder.registry.loaded_models()
    digest = image.digest_image(sample_image(1))

    def made(salt: str | None) -> str:
        return identity.embedding_key(SECRET, loaded.served.identity, digest, salt).hex()

    def said(headers: dict[str, str], **fields: Any) -> dict[str, Any]:
        answer = encode(service, Path(loaded.served.name), headers=headers, **fields)
        assert answer.status_code == 200, answer.text
        row: dict[str, Any] = answer.json()
        return row

    assert said(key("acme"))["key"] == made("acme")
    assert said({"authorization": "Bearer acme-2"})["origin"] == "cached"
    # Within a tenant a body may tell apart; it never leads out of it, whatever it says.
    for salt in ("beta", "../beta", "", "acme", "/beta"):
        assert said(key("acme"), cache_salt=salt)["key"] == made(f"acme/{salt}")
    assert said(key("beta"))["key"] == made("beta")
    # Keys without a tenant, and callers without a key, share the deployment's domain.
    assert said({})["key"] == said(key("gold"))["key"] == made(None)


@pytest.mark.parametrize("headers", [{}, key("gold"), key("unknown"), {"x-cornplug-class": "gold"}])
def test_encode_salt_without_tenant_key_is_refused(
    make: Make, llava_pair: Any, headers: dict[str, str]
) -> None:
    service = make()
    acme = encode(service, llava_pair[0], headers=key("acme"))
    for salt in ("acme", "acme/x", "anything"):
        answer = encode(service, llava_pair[0], headers=headers, cache_salt=salt)
        assert reason(answer) == (403, "forbidden_salt")
        assert "encoder.trust_salts" in answer.json()["error"]["message"]
        assert acme.json()["handle"] not in answer.text


def test_encode_trust_salts_accepts_any_salt(make: Make, llava_pair: Any) -> None:
    service = make(trust_salts=True)
    keys = [encode(service, llava_pair[0], cache_salt=salt).json()["key"] for salt in ("acme", "beta")]
    assert keys[0] == encode(service, llava_pair[0], headers=key("acme")).json()["key"] != keys[1]


@pytest.mark.parametrize("name", ["a/b", "", "ä", "x" * 49, "a b"])
def test_config_tenant_name_with_slash_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="tenants"):
        load({"qos.classes": {"gold": {"tenants": {name: ["k"]}}}}, environ={})


def test_config_key_of_two_tenants_is_refused() -> None:
    for classes in (
        {"gold": {"tenants": {"a": ["k"], "b": ["k"]}}},
        {"gold": {"tenants": {"a": ["k"]}, "api_keys": ["k"]}},
        {"gold": {"tenants": {"a": ["k"]}}, "silver": {"api_keys": ["k"]}},
        {"default": {"tenants": {"a": ["k"]}}},
    ):
        with expect_error(ConfigError, field="qos"):
            load({"qos.classes": classes}, environ={})


# -- Host, Origin, content types -----------------------------------------------------------------


def reload(service: Service, **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(service.app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8750") as client:
            return await client.post(
                "/v1/reload", content=b"{}", headers={"content-type": "application/json", **headers}
            )

    return anyio.run(send)


def test_http_foreign_host_is_refused(make: Make) -> None:
    service = make()
    origin = "https://attacker.example"
    assert reason(reload(service, host="attacker.example", origin=origin)) == (421, "forbidden_host")
    assert reason(reload(service, host="attacker.example:8750")) == (421, "forbidden_host")
    assert reason(service.call("GET", "/v1/status", headers={"host": "attacker.example"}))[0] == 421
    for mine in ("127.0.0.1:8750", "localhost", "LOCALHOST.:1", "[::1]:8750", "10.1.2.3", "e", "e:80"):
        assert reload(service, host=mine).status_code == 200
    # Who has a key is no browser that was led here.
    named = encode(service, Path("none"), headers={"host": "gateway.example", **key("gold")})
    assert reason(named) == (404, "unknown_model")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://attacker.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9"},
        {"origin": "http://127.0.0.1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_http_foreign_origin_cannot_post(make: Make, headers: dict[str, str]) -> None:
    service = make(sglang=True)
    assert reason(reload(service, **headers)) == (403, "forbidden_origin")
    for path in ("/v1/encode", "/encode", "/scheduler_receive_url"):
        assert reason(service.call("POST", path, json={}, headers=headers)) == (403, "forbidden_origin")


def test_http_own_origin_can_post(make: Make) -> None:
    assert (
        reload(make(), origin="http://127.0.0.1:8750", **{"sec-fetch-site": "same-origin"}).status_code == 200
    )


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]
)
def test_json_only_other_content_types_are_refused(make: Make, kind: str) -> None:
    service = make(sglang=True)
    for path in ("/v1/reload", "/encode", "/scheduler_receive_url", "/send", "/sglang/x/encode"):
        answer = service.call("POST", path, content=b"{}", headers={"content-type": kind})
        assert reason(answer) == (415, "media_type")


def test_app_docs_pages_are_not_served(make: Make) -> None:
    service = make()
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert service.call("GET", path).status_code == 404
    assert service.call("GET", "/openapi.json").status_code == 200


# -- what strangers are told ---------------------------------------------------------------------


def test_encode_unknown_model_answer_names_no_paths(make: Make, llava_pair: Any) -> None:
    service = make()
    answer = encode(service, Path("/etc"))
    assert reason(answer) == (404, "unknown_model")
    assert str(llava_pair[0].parent) not in answer.text
    assert "GET /v1/models" in answer.json()["error"]["message"]


def test_encode_internal_error_hides_exception_text(
    make: Make, llava_pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = make()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("/srv/secret/customers.db")

    for where in (
        "cornplug.encoder_service.preprocess.preparer.UndecodedMedia.prepare",
        "cornplug.encoder_service.towers.llava.TileTower.prepare",
        "cornplug.encoder_service.towers.llava.TileTower.encode",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, fail)
            answer = encode(service, llava_pair[0])
        assert reason(answer) == (500, "internal")
        assert "customers" not in answer.text
        assert "log" in answer.json()["error"]["message"]
    assert caplog.text.count("customers.db") >= 3


def test_encode_uploads_stay_in_memory(make: Make, llava_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled: list[bool] = []

    class Watched(requests._InMemoryFormParser):
        async def parse(self) -> Any:
            form = await super().parse()
            rolled.extend(value.file._rolled for _, value in form.multi_items() if hasattr(value, "file"))
            return form

    monkeypatch.setattr(requests, "_InMemoryFormParser", Watched)
    big = png(sample_image(1)) + bytes(3 << 20)
    service = make()
    assert service.post(data={"model": str(llava_pair[0])}, files={"image": big}).status_code == 200
    assert rolled == [False]


# -- image formats -----------------------------------------------------------------------------


def saved(kind: str) -> bytes:
    out = io.BytesIO()
    sample_image(1).save(out, kind)
    return out.getvalue()


def test_encode_image_formats_outside_list_are_refused(make: Make, llava_pair: Any) -> None:
    service = make()
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        body = {"model": str(llava_pair[0]), "image": base64.b64encode(saved(kind)).decode()}
        assert service.post(json=body).status_code == 200
    for kind in ("TIFF", "JPEG2000", "ICO", "TGA", "PPM"):
        body = {"model": str(llava_pair[0]), "image": base64.b64encode(saved(kind)).decode()}
        answer = service.post(json=body)
        assert reason(answer) == (422, "unknown_format")
        assert "send one of JPEG, PNG, WEBP, GIF, BMP" in answer.json()["error"]["message"]


# -- audit ---------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "cornplug.audit"]


def test_audit_log_has_reloads_and_refusals(
    make: Make, llava_pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cornplug.audit")
    service = make(admin_key="operators")
    reload(service, authorization="Bearer operators")
    reload(service, authorization="Bearer wrong")
    reload(service, host="attacker.example\x1b[2J", origin="x")
    encode(service, llava_pair[0], cache_salt="acme")
    encode(service, llava_pair[0])
    done, *refused = lines(caplog)
    assert (done["event"], done["peer"], done["changed"]) == ("reload", "127.0.0.1", [])
    assert [(r["event"], r["reason"], r["path"]) for r in refused] == [
        ("refused", "forbidden", "/v1/reload"),
        ("refused", "forbidden_host", "/v1/reload"),
        ("refused", "forbidden_salt", "/v1/encode"),
    ]
    assert "\x1b" not in caplog.text
    assert "operators" not in caplog.text
    assert "wrong" not in caplog.text


def test_audit_log_flood_is_counted_not_written(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    audit = AuditLog(clock=lambda: now[0])
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": ("192.0.2.1", 1)}
    for _ in range(5000):
        audit.log_refusal(HTTPConnection(scope), "unauthorized")
    assert len(lines(caplog)) == 100
    now[0] = 1.0
    audit.log_refusal(HTTPConnection(scope), "overloaded")
    audit.log_refusal(HTTPConnection(scope), "unauthorized")
    assert len(lines(caplog)) == 101
    assert lines(caplog)[-1]["left_out"] == 4900
