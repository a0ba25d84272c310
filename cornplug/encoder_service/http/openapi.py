"""Additions to `/openapi.json` that FastAPI cannot derive from the routes: bodies, statuses and media
types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.http.access_control import OPEN_PATHS
from cornplug.encoder_service.http.requests import MODALITIES, EncodeBody
from cornplug.encoder_service.http.responses import ErrorAnswer

Responses = Mapping[int | str, Mapping[str, Any]]
_REF: Final = "#/components/schemas/"
_BINARY: Final = {"type": "string", "format": "binary"}
_RETRY: Final = {
    "Retry-After": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Seconds to wait before a retry.",
    }
}


def _error(description: str, *, retry: bool = False) -> dict[str, Any]:
    return {"model": ErrorAnswer, "description": description, **({"headers": _RETRY} if retry else {})}


ENCODE: Final[Responses] = {
    200: {
        "description": "The embedding. A safetensors file has it as tensor `embedding`, and the other fields "
        "of EncodeAnswer as JSON in its metadata, under `cornplug`.",
        "content": {engine_seal.EMBEDDING_MEDIA_TYPE: {"schema": _BINARY}},
    },
    403: _error(
        "The caller sent a salt without a tenant's key, or the request came from a web page of another site."
    ),
    404: _error("The model is not served."),
    408: _error("The body did not arrive in time."),
    413: _error("Too many bytes or pixels."),
    415: _error("The content type is neither multipart/form-data nor application/json."),
    422: _error("A field is invalid, or a medium is damaged or not supported by the model."),
    424: _error("A remote URL could not be fetched."),
    429: _error("The caller's class has used its share while other classes wait.", retry=True),
    500: _error("Internal error of the service."),
    503: _error("The service is overloaded or stopping. Use another service, or retry.", retry=True),
    504: _error("The deadline passed before the work started."),
}
NOT_READY: Final[Responses] = {503: _error("The service is stopping, or no tower can run.", retry=True)}
RELOAD: Final[Responses] = {
    403: _error(
        "The caller is not on this host and has no operator's key, or is a web page of another site."
    ),
    404: _error("The model is not served."),
    409: _error("The files on disk cannot be loaded. The previous weights stay in use."),
    415: _error("The content type is not application/json."),
    422: _error("A field is invalid."),
    503: _error("Another reload is in progress, or the service is stopping.", retry=True),
}
METRICS: Final[Responses] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

_ACCESS_RESPONSES: Final = {
    status: {
        "description": why,
        "content": {"application/json": {"schema": {"$ref": f"{_REF}ErrorAnswer"}}},
    }
    for status, why in {
        "401": "A key is required (encoder.require_key).",
        "421": "The Host header is not a name of this service, and the request has no key.",
    }.items()
}

_FILES: Final = dict.fromkeys(MODALITIES, _BINARY)
_FORM_FIELDS: Final = ("model", "cache_salt", "inline", "deadline_s", "fps", "num_frames")


def _form_schema() -> dict[str, Any]:
    fields = EncodeBody.model_json_schema()["properties"]
    return {
        "type": "object",
        "required": ["model"],
        "properties": {**{name: fields[name] for name in _FORM_FIELDS}, **_FILES},
        "additionalProperties": False,
    }


ENCODE_BODY: Final[Mapping[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": f"{_REF}EncodeBody"}},
            "multipart/form-data": {"schema": _form_schema()},
        },
    }
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body that the route parses itself."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": model.model_json_schema()}},
        }
    }


def complete_schema(app: FastAPI) -> None:
    """Make `app.openapi` include the schemas and statuses that are not in any route's signature."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, extra = models_json_schema([(EncodeBody, "validation")], ref_template=_REF + "{model}")
            made["components"]["schemas"] |= extra["$defs"]
            for path, methods in made["paths"].items():
                for operation in methods.values() if path not in OPEN_PATHS else ():
                    operation["responses"] |= _ACCESS_RESPONSES
            app.openapi_schema = made
        return dict(app.openapi_schema)

    app.openapi = document
