"""File and engine of `cornplug warm`. The file's requests are sent to the engine's OpenAI API, and the
engine's metrics are read.

The file has one JSON object per line, in the form in which an app sends requests to an engine:

    {"prompt": "..."}                                  for /v1/completions
    {"messages": [{"role": "user", "content": ...}]}   for /v1/chat/completions
    {"images": ["photo.jpg"]}                          for the encoder service only

A line can also come from an OpenAI batch file, which has the request in "body". Images are paths relative to
the file, data URLs, or http(s) URLs, which the engine fetches. Errors are reported separately for each line.
"""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.encoder_service.formats.messages import Decoding, decoding_of
from cornplug.errors import ConfigError
from cornplug.host import tls_context

_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.5
"""Delay in seconds before the second attempt. The delay doubles for each further attempt."""
_RETRY_STATUSES: Final = (408, 429, 502, 503, 504)
_REMOVED_FIELDS: Final = ("max_completion_tokens", "min_tokens", "n", "stream_options")
"""Fields that are removed from a request, because with them it could generate more than one token."""


@dataclass(slots=True)
class StoreCounts:
    """Counts of what an engine has saved and loaded since it started, or between two readings (`since`)."""

    pages: Counter[str] = field(default_factory=Counter)
    """Number of KV pages offered to the store, by outcome."""
    embeddings: Counter[str] = field(default_factory=Counter)
    """Number of embeddings offered to the store, by outcome."""
    embedding_hits: int = 0
    loaded_tokens: int = 0
    saved_bytes: int = 0
    """Number of bytes in saved KV pages."""

    def since(self, before: StoreCounts) -> StoreCounts:
        """Return the changes since the counts `before`."""
        return StoreCounts(
            self.pages - before.pages,
            self.embeddings - before.embeddings,
            max(0, self.embedding_hits - before.embedding_hits),
            max(0, self.loaded_tokens - before.loaded_tokens),
            max(0, self.saved_bytes - before.saved_bytes),
        )


class WarmedEngine:
    """One engine at a URL. Thread-safe."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, timeout_s: float) -> None:
        """Connect to the engine. Raises ConfigError if it does not respond."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10),
            trust_env=False,
            verify=tls_context(),
        )
        self._is_unreachable = False
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models").raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as e:
            raise ConfigError("--engine", f"{self.url}: {e}", "Use the address of a running engine.") from e

    def send(self, line: WarmLine) -> int | LineError:
        """Send a request and return the number of prompt tokens that the engine reports, or the error."""
        if self._is_unreachable:
            return LineError(line.number, "", "not sent, because the engine does not respond")
        body = {"model": self.model, **line.body}
        problem, lost = "", 0
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
            try:
                response = self._client.post(line.path, json=body)
            except httpx.HTTPError as e:
                problem, lost = f"the engine does not respond: {str(e) or type(e).__name__}", attempt + 1
                continue
            if response.status_code == 200:
                return _prompt_tokens(response)
            name, problem = _error_details(response)
            if response.status_code not in _RETRY_STATUSES:
                return LineError(line.number, name, problem)
        # Do not send other lines, because each of them would wait equally long.
        if lost == _ATTEMPTS:
            self._is_unreachable = True
        return LineError(line.number, "", problem)

    def read_counts(self) -> StoreCounts | None:
        """Return the engine's counts, or None if the engine does not publish cornplug's counters."""
        try:
            response = self._client.get("/metrics", timeout=10, follow_redirects=True)
            if response.status_code != 200 or "cornplug_" not in response.text:
                return None
            samples = [s for f in text_string_to_metric_families(response.text) for s in f.samples]
        except (httpx.HTTPError, ValueError):
            return None
        found = StoreCounts()
        for name, labels, value in ((s.name, s.labels, int(s.value)) for s in samples):
            page = labels.get("kind") == "kv_page"
            if name == "cornplug_saves_total":
                (found.pages if page else found.embeddings)[labels.get("outcome", "")] += value
            elif name == "cornplug_hits_total" and not page:
                found.embedding_hits += value
            elif name == "cornplug_saved_tokens_total":
                found.loaded_tokens += value
            elif name == "cornplug_bytes_total" and page and labels.get("direction") == "save":
                found.saved_bytes += value
        return found

    def detect_decoding(self) -> Decoding | None:
        """Return the image decoding rules of the engine's release, or None if the release cannot be
        determined."""
        # SGLang has no /version, and vLLM has /server_info only in development mode.
        for engine, path in (("vllm", "/version"), ("sglang", "/server_info")):
            try:
                response = self._client.get(path, timeout=10)
                version = response.raise_for_status().json()["version"]
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                continue
            return decoding_of(engine, str(version))
        return None

    def close(self) -> None:
        """Close the connections to the engine."""
        self._client.close()


@dataclass(frozen=True, slots=True)
class LineError:
    """Error in a line of the file. `field` is the name of the invalid field, or "" if the error concerns the
    whole line."""

    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        where = f"line {self.line}" + (f", {self.field}" if self.field else "")
        return f"{where}: {self.problem}"


@dataclass(slots=True)
class WarmLine:
    """Request in one line of the file."""

    number: int
    path: str = ""
    """Path of the API, or "" for a line that has only images."""
    body: dict[str, Any] = field(default_factory=dict)
    images: list[tuple[str, bytes]] = field(default_factory=list)
    """(field, bytes) of each image. Images at http(s) URLs are not included."""

    @property
    def salt(self) -> str | None:
        """The request's `cache_salt`."""
        return self.body.get("cache_salt")


class _InvalidField(Exception):
    """A field is invalid. `read_warm_file` converts this exception to a `LineError`."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


def read_warm_file(path: Path) -> tuple[list[WarmLine], list[LineError]]:
    """Return the requests in valid lines, and the errors in other lines. Raises OSError or UnicodeDecodeError
    if the file cannot be read."""
    lines, errors = [], []
    # Do not use `splitlines`, which also splits at other line separators that JSON does not escape.
    for number, raw in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not raw.strip():
            continue
        try:
            lines.append(_parse_line(number, raw, path.parent))
        except _InvalidField as e:
            errors.append(LineError(number, e.name, str(e)))
    return lines, errors


def _prompt_tokens(response: httpx.Response) -> int:
    try:
        return int(response.json()["usage"]["prompt_tokens"])
    except (ValueError, LookupError, TypeError):
        return 0


def _error_details(response: httpx.Response) -> tuple[str, str]:
    """Return (field, problem) from an error response of vLLM or SGLang."""
    problem: Any = None
    name: Any = None
    try:
        body = response.json()
        error = body.get("error", body)
        problem, name = error.get("message"), error.get("param")
    except (ValueError, AttributeError):
        pass
    return str(name or ""), f"HTTP {response.status_code}: {problem or response.text[:200]}"


def _parse_line(number: int, raw: str, folder: Path) -> WarmLine:
    try:
        found = json.loads(raw)
    except ValueError as e:
        raise _InvalidField("", f"not JSON: {e}") from None
    if isinstance(found, dict) and isinstance(found.get("body"), dict):
        found = found["body"]
    if not isinstance(found, dict):
        raise _InvalidField("", "not a JSON object")
    line = WarmLine(number)
    salt = found.get("cache_salt")
    if not (salt is None or isinstance(salt, str)):
        raise _InvalidField("cache_salt", "must be a string")
    given = [name for name in ("prompt", "messages") if name in found]
    if len(given) > 1:
        raise _InvalidField("prompt", 'cannot be combined with "messages": a line is one request')
    if not given and "images" not in found:
        raise _InvalidField("", 'needs "prompt", "messages" or "images"')
    line.body = {name: value for name, value in found.items() if name not in (*_REMOVED_FIELDS, "images")}
    if given == ["prompt"]:
        if not isinstance(found["prompt"], (str, list)) or not found["prompt"]:
            raise _InvalidField("prompt", "must be a string or a list of tokens")
        line.path = "/v1/completions"
    elif given:
        line.path = "/v1/chat/completions"
        line.body["messages"] = list(_parse_messages(line, found["messages"], folder))
    images = found.get("images", [])
    if not isinstance(images, list):
        raise _InvalidField("images", "must be a list")
    for i, image in enumerate(images):
        name = f"images[{i}]"
        data = _read_image(name, image, folder)
        if data is None:
            raise _InvalidField(name, "URLs are only supported in messages: use a file instead")
        line.images.append((name, data))
    line.body |= {"max_tokens": 1, "temperature": 0, "stream": False}
    return line


def _parse_messages(line: WarmLine, messages: object, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages with images in files replaced by data URLs, and add the images to `line`."""
    if not isinstance(messages, list) or not messages:
        raise _InvalidField("messages", "must be a list of messages")
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _InvalidField(name, "must be an object")
        if not isinstance(message.get("role"), str):
            raise _InvalidField(f"{name}.role", "missing")
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                _parse_part(line, f"{name}.content[{j}]", part, folder) for j, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        elif not (content is None or isinstance(content, str)):
            raise _InvalidField(f"{name}.content", "must be a string or a list of parts")
        yield message


def _parse_part(line: WarmLine, name: str, part: object, folder: Path) -> Any:
    if not isinstance(part, dict):
        raise _InvalidField(name, "must be an object")
    if part.get("type") != "image_url":
        return part
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    name = f"{name}.image_url"
    data = _read_image(name, url, folder)
    if data is None:
        return part
    line.images.append((name, data))
    assert isinstance(url, str)
    kind = mimetypes.guess_type(url)[0] or "image/png"
    sent = url if url.startswith("data:") else f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {**part, "image_url": {**(image if isinstance(image, dict) else {}), "url": sent}}


def _read_image(name: str, url: object, folder: Path) -> bytes | None:
    """Return the bytes of the image at a path or data URL, or None for an http(s) URL."""
    if not isinstance(url, str) or not url:
        raise _InvalidField(name, "must be a path or URL")
    if url.startswith(("http://", "https://")):
        return None
    if url.startswith("data:"):
        try:
            return base64.b64decode(url.partition(",")[2], validate=True)
        except binascii.Error as e:
            raise _InvalidField(name, f"invalid base64: {e}") from None
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else folder / url
    try:
        return path.read_bytes()
    except (OSError, ValueError) as e:
        raise _InvalidField(name, f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
