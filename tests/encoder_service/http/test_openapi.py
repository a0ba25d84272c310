"""The OpenAPI document is complete and true: schemathesis asks what it says, and what it does not."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from cornplug.config import Config

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service

SETTINGS = {
    "seed": 4,
    "cache": {"enabled": False},
    "workers": 1,
    "continue-on-failure": True,
    "request-timeout": 10,
    "generation": {"max-examples": 15, "deterministic": True, "database": "none", "no-shrink": True},
    "phases": {"stateful": {"enabled": False}},
    # A base64 text that is no image fits the schema, and is refused all the same.
    "checks": {"positive_data_acceptance": {"enabled": False}},
}


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config) -> Service:
    small = config.encoder.model_copy(
        update={"max_body_bytes": 200_000, "deadline_s": 5.0, "names": "e, testserver"}
    )
    return Service(make_encoder(), config.model_copy(update={"encoder": small}))


@pytest.mark.more
def test_openapi_every_answer_matches_schema(service: Service, llava_pair: tuple[Path, Path]) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    engine = pytest.importorskip("schemathesis.engine")
    from schemathesis.checks import load_all_checks

    load_all_checks()
    settings = schemathesis.Config.from_dict(SETTINGS)
    _give_examples(service, str(llava_pair[0]))
    schema = schemathesis.openapi.from_asgi("/openapi.json", service.app, config=settings)
    problems: set[str] = set()
    statuses: set[tuple[str, int]] = set()
    asked: dict[str, int] = {}
    checked: set[str] = set()
    for event in engine.from_schema(schema).execute():
        recorder = getattr(event, "recorder", None)
        if type(event).__name__ in ("NonFatalError", "FatalError"):
            problems.add(str(getattr(event, "value", None) or event.exception))
        if type(event).__name__ != "ScenarioFinished":
            continue
        asked[recorder.label] = asked.get(recorder.label, 0) + len(recorder.cases)
        for one in recorder.interactions.values():
            statuses.add((recorder.label, one.response.status_code))
        for nodes in recorder.checks.values():
            checked |= {node.name for node in nodes}
            for info in (node.failure_info for node in nodes):
                if info is not None:
                    problems.add(f"{info.failure.title}: {info.failure.message}\n{info.code_sample}")
    assert not problems, "\n\n".join(sorted(problems))
    assert set(asked) == {f"{m.upper()} {p}" for p, methods in _paths(service).items() for m in methods}
    assert asked["POST /v1/encode"] > 50
    assert statuses >= {("POST /v1/encode", status) for status in (200, 404, 405, 415, 422)}
    assert checked >= {
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    }


def _give_examples(service: Service, model: str) -> None:
    """Only this test knows a model that is served, and an image: so that there are answers to check."""
    image = base64.b64encode(png(sample_image(1))).decode()
    document = service.app.openapi()
    content = document["paths"]["/v1/encode"]["post"]["requestBody"]["content"]
    content["application/json"]["examples"] = {
        "one": {"value": {"model": model, "image": image}},
    }
    service.app.openapi_schema = document


def _paths(service: Service) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = service.call("GET", "/openapi.json").json()["paths"]
    return paths
