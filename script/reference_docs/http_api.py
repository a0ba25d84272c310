"""docs/http-api.md, from the OpenAPI document of an encoder service that serves no model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from cornplug.config import load
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.http.requests import EncodeBody
from cornplug.encoder_service.http.responses import EncodeAnswer
from cornplug.encoder_service.model_registry import ModelRegistry

from .configuration import descriptions
from .markdown import notice

_SECRET: Final = bytes(32)
_FASTAPI: Final = frozenset({"HTTPValidationError", "ValidationError"})
"""Schemas of FastAPI, which differ from release to release."""
_LEFT_OUT: Final = frozenset({"Overview", "ModelList", "ModelRow", "ModalityRow", "ErrorAnswer"})
"""Schemas that the page does not show: clients need few of their fields."""
_SMALL: Final = 3
"""Maximum number of fields of a schema without a section."""
_INTRO: Final = """# HTTP API of the encoder service

This page lists the HTTP endpoints of `cornplug encoder`, which listens on `encoder.host` and `encoder.port`
(127.0.0.1:8750 by default). Python applications can use the [client](python-api.md). [Security](security.md)
explains keys and tenants. Bodies are JSON unless another type is named. `/openapi.json` has all types.

{notice}
"""
_ERRORS: Final = """## Errors

The body is `{"error": {"reason": ..., "message": ..., "retry_after_s": ...}}`. `message` has the remedy, and
[troubleshooting](troubleshooting.md) explains each `reason`.
"""
_DOCUMENTED: Final = (EncodeBody, EncodeAnswer)
"""Models whose fields are explained by docstrings, which are not in the OpenAPI document."""


def page() -> str:
    """The text of docs/http-api.md."""
    document = _document()
    schemas = document["components"]["schemas"]
    parts = [_INTRO.format(notice=notice("the service's OpenAPI document"))]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation, schemas))
    errors = [f"- {status}: {text}" for status, text in _errors(document["paths"])]
    parts.append("\n".join([_ERRORS, *errors, ""]))
    small = dict(_small(schemas))
    for name, schema in sorted(schemas.items()):
        if name not in _FASTAPI | _LEFT_OUT and name not in small:
            parts.append(_schema(name, schema))
    text = "\n".join(parts)
    for name in _LEFT_OUT:
        text = text.replace(f"[{name}](#{name.lower()})", f"`{name}`")
    for name, inline in small.items():
        text = text.replace(f"[{name}](#{name.lower()})", inline)
    return text


def _small(schemas: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Schemas that are shown as a list of field names instead of in a section of their own."""
    for name, schema in schemas.items():
        if len(schema.get("properties", ())) <= _SMALL and "$ref" not in json.dumps(schema):
            yield name, f"`{{{', '.join(schema['properties'])}}}`"


def _document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="cp-") as folder:
        config = load({"encoder.socket": str(Path(folder) / "e"), "encoder.port": 0}, environ={})
        encoder = EncoderCore(
            ModelRegistry(dtype="float32", device="cpu"),
            ResultCache(None, deadline_s=1.0, max_feature_bytes=0),
            secret=_SECRET,
        )
        try:
            document: dict[str, Any] = create_app(encoder, config.encoder, secret=_SECRET).openapi()
        finally:
            encoder.close()
    return document


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    lines = [
        f"## `{method.upper()} {path}`\n",
        f"{operation.get('description', operation.get('summary', ''))}\n",
    ]
    listed: set[str] = set()
    """Fields that an earlier content type of the body has."""
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        fields = _resolved(body.get("schema", {}), schemas).get("properties", {}).keys()
        if listed and fields == listed:
            lines.append(f"A `{kind}` body has the same fields.\n")
        elif "properties" in body.get("schema", {}):
            said = body["schema"].get("description", "")
            lines.append(f"Body: {said}\n\n{_fields(body['schema'])}\n")
        else:
            lines.append(f"Body: {_content(kind, body)}.\n")
        listed |= fields
    answer = operation["responses"]["200"]
    kinds = [_content(kind, content) for kind, content in answer.get("content", {}).items()]
    said = "" if answer["description"] == "Successful Response" else f" {answer['description']}"
    lines.append(f"Response: {' or '.join(kinds)}.{said}")
    if errors := [status for status in sorted(operation["responses"]) if status != "200"]:
        lines[-1] += f" Errors: {', '.join(errors)}."
    lines[-1] += "\n"
    return "\n".join(lines)


def _content(kind: str, content: Mapping[str, Any]) -> str:
    """A body's type and, unless it is JSON, its content type."""
    text = _type(content.get("schema", {}))
    return text if kind == "application/json" else f"`{kind}` ({text})"


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def _errors(paths: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each error status and its meaning, which begins with the path if the paths differ in it."""
    found: dict[str, dict[str, list[str]]] = {}
    for path, methods in paths.items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                # A route without a text of its own explains the status in its description.
                if status != "200" and answer["description"] != HTTPStatus(int(status)).phrase:
                    text = answer["description"]
                    if "Retry-After" in answer.get("headers", {}):
                        text += " (`Retry-After`)"
                    found.setdefault(status, {}).setdefault(text, []).append(f"`{path}`")
    for status, texts in sorted(found.items()):
        for text, places in texts.items():
            yield status, text if len(texts) == 1 else f"{', '.join(places)}: {text}"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    said = schema.get("description", "")
    return f"## {name}\n\n{said}\n\n{_fields(schema)}\n" if said else f"## {name}\n\n{_fields(schema)}\n"


def _fields(schema: Mapping[str, Any]) -> str:
    """A list of fields: first those without an explanation, by type, then the others."""
    said = next((descriptions(one) for one in _DOCUMENTED if one.__name__ == schema.get("title")), {})
    required = schema.get("required", ()) if schema.get("title", "").endswith("Body") else ()
    plain: dict[str, list[str]] = {}
    explained = []
    for name, field in schema.get("properties", {}).items():
        kind = _type(field) + (", required" if name in required else "")
        if text := field.get("description") or said.get(name):
            explained.append(f"- `{name}` ({kind}): {' '.join(text.split())}")
        else:
            plain.setdefault(kind, []).append(f"`{name}`")
    return "\n".join([*(f"- {', '.join(names)} ({kind})" for kind, names in plain.items()), *explained])


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
