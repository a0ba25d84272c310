"""docs/http-api.md, from the OpenAPI document of an encoder service that serves no model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cornplug.config import load
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.models.registry import ModelRegistry

from .markdown import notice, table

_SECRET: Final = bytes(32)
_FASTAPI: Final = frozenset({"HTTPValidationError", "ValidationError"})
"""Schemas of FastAPI, which differ from release to release."""
_INTRO: Final = """# HTTP API of the encoder service

This page lists the HTTP endpoints of `cornplug encoder`. Python applications can use the
[client](python-api.md) instead.

{notice}

The service listens on `encoder.host` and `encoder.port` (127.0.0.1:8750 by default) and serves its OpenAPI
document at `/openapi.json`. Every error response is an `ErrorAnswer`. Look up its `reason` in
[troubleshooting](troubleshooting.md). See [security](security.md#encoder-over-http) for keys and tenants.
"""


def page() -> str:
    """The text of docs/http-api.md."""
    document = _document()
    parts = [_INTRO.format(notice=notice("the service's OpenAPI document"))]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name not in _FASTAPI:
            parts.append(_schema(name, schema))
    return "\n".join(parts)


def _document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="cp-") as folder:
        config = load({"encoder.socket": str(Path(folder) / "e"), "encoder.port": 0}, environ={})
        encoder = EncoderCore(
            ModelRegistry(dtype="float32", device="cpu"),
            ResultCache(None, deadline_s=1.0, kept_bytes=0),
            secret=_SECRET,
        )
        try:
            document: dict[str, Any] = create_app(encoder, config.encoder, secret=_SECRET).openapi()
        finally:
            encoder.close()
    return document


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    lines = [
        f"## `{method.upper()} {path}`\n",
        f"{operation.get('description', operation.get('summary', ''))}\n",
    ]
    parameters = [
        (f"`{p['name']}`", p["in"], _type(p.get("schema", {})), p.get("description", ""))
        for p in operation.get("parameters", ())
    ]
    if parameters:
        lines.append(table(("parameter", "in", "type", "meaning"), parameters) + "\n")
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"Body, `{kind}`: {_type(body.get('schema', {}))}\n")
        if "properties" in body.get("schema", {}):
            lines.append(_fields(body["schema"]) + "\n")
    rows = []
    for status, answer in sorted(operation["responses"].items()):
        content = answer.get("content", {})
        kinds = "<br>".join(f"`{kind}`: {_type(c.get('schema', {}))}" for kind, c in content.items())
        headers = ", ".join(f"`{name}`" for name in answer.get("headers", {}))
        rows.append((status, answer["description"], kinds, headers))
    lines.append(table(("status", "meaning", "answer", "headers"), rows) + "\n")
    return "\n".join(lines)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    said = schema.get("description", "")
    return f"## {name}\n\n{said}\n\n{_fields(schema)}\n" if said else f"## {name}\n\n{_fields(schema)}\n"


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (f"`{name}`", _type(field), "yes" if name in required else "", field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]
    return table(("field", "type", "required", "meaning"), rows)


def _type(schema: Mapping[str, Any]) -> str:
    return " or ".join(_types(schema)) or "any"


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        yield f"[{name}](#{name.lower()})" if name not in _FASTAPI else name
    elif schema.get("type") == "array":
        yield f"list of {_type(schema.get('items', {}))}"
    elif "type" in schema:
        yield "binary" if schema.get("format") == "binary" else str(schema["type"])
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _types(one)
