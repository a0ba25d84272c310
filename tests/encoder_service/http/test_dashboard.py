"""`/v1/status`, and the files of the status page (in Chromium: tests/promises)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from cornplug import __version__
from cornplug.config import Config
from cornplug.encoder_service.http.models import CONTENT_SECURITY_POLICY

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config) -> Service:
    return Service(make_encoder(), config)


def test_dashboard_status_lists_models_and_counts(service: Service, llava_pair: tuple[Path, Path]) -> None:
    first = service.call("GET", "/v1/status").json()
    assert (first["state"], first["version"], first["store"]) == ("serving", __version__, False)
    assert first["executors"] == {"alive": 1, "total": 1}
    a, b, qwen = first["models"]
    assert a["tower_fp"] == b["tower_fp"] != qwen["tower_fp"]
    assert (
        service.post(data={"model": str(llava_pair[0])}, files={"image": png(sample_image(1))}).status_code
        == 200
    )
    assert service.post(data={"model": "nope"}, files={"image": png(sample_image(1))}).status_code == 404
    now = service.call("GET", "/v1/status").json()
    assert now["instance"] == first["instance"]
    assert now["answers"] == {"computed": 1, "coalesced": 0, "cached": 0}
    assert now["apps"] == [{"app": "http", "answers": 1}]
    assert now["refusals"] == [{"qos": "default", "reason": "unknown_model", "refusals": 1}]
    assert now["tokens"] == 17, "patches and CLS"
    assert now["waiting"] == 0
    service.gate.close()
    assert service.call("GET", "/v1/status").json()["state"] == "draining"


def test_dashboard_status_matches_openapi_schema(service: Service) -> None:
    spec = service.call("GET", "/openapi.json").json()
    schemas = spec["components"]["schemas"]
    assert set(service.call("GET", "/v1/status").json()) == set(schemas["Overview"]["required"])


def test_dashboard_page_loads_no_foreign_scripts(service: Service) -> None:
    page = service.call("GET", "/")
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    names = ("status.js", "status.css", "icon.svg")
    for answer in (page, *(service.call("GET", f"/page/{name}") for name in names)):
        assert answer.status_code == 200
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("//\n", ""), "an address"
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
    assert service.call("GET", "/page/..%2Fserver.py").status_code == 404
    assert service.call("GET", "/page/nothing.js").status_code == 404


def test_dashboard_page_files_are_in_package() -> None:
    shipped = {file.name for file in (files("cornplug.encoder_service.http") / "static").iterdir()}
    assert shipped >= {"index.html", "status.js", "status.css", "icon.svg"}
