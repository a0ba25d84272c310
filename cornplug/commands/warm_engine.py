"""Client of an engine for `cornplug warm`. It sends requests to the engine's OpenAI API and reads its
metrics."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.commands.warm_file import LineError, WarmLine
from cornplug.encoder_service.wire.messages import Decoding, decoding_of
from cornplug.errors import ConfigError
from cornplug.host import tls_context

_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.5
"""Delay in seconds before the second attempt. The delay doubles for each further attempt."""
_RETRY_STATUSES: Final = (408, 429, 502, 503, 504)


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
            answer = self._client.get("/v1/models").raise_for_status()
            return str(answer.json()["data"][0]["id"])
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
                answer = self._client.post(line.path, json=body)
            except httpx.HTTPError as e:
                problem, lost = f"the engine does not respond: {str(e) or type(e).__name__}", attempt + 1
                continue
            if answer.status_code == 200:
                return _prompt_tokens(answer)
            name, problem = _error_details(answer)
            if answer.status_code not in _RETRY_STATUSES:
                return LineError(line.number, name, problem)
        # Do not send other lines, because each of them would wait equally long.
        if lost == _ATTEMPTS:
            self._is_unreachable = True
        return LineError(line.number, "", problem)

    def read_counts(self) -> StoreCounts | None:
        """Return the engine's counts, or None if the engine does not publish cornplug's counters."""
        try:
            answer = self._client.get("/metrics", timeout=10, follow_redirects=True)
            if answer.status_code != 200 or "cornplug_" not in answer.text:
                return None
            samples = [s for f in text_string_to_metric_families(answer.text) for s in f.samples]
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
                answer = self._client.get(path, timeout=10)
                version = answer.raise_for_status().json()["version"]
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                continue
            return decoding_of(engine, str(version))
        return None

    def close(self) -> None:
        """Close the connections to the engine."""
        self._client.close()


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
