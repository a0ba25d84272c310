"""An engine as `cornplug warm` uses it: requests to its OpenAI API, and its counters of the store."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.commands.warm_file import LineError, WarmLine
from cornplug.encoder_service.wire.decodings import Decoding, decoding_of
from cornplug.errors import ConfigError
from cornplug.host import tls_context

_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.5
"""Before the second attempt; twice as long before each further one."""
_AGAIN: Final = (408, 429, 502, 503, 504)


@dataclass(slots=True)
class StoreCounts:
    """The engine's counts since its start."""

    pages: Counter[str] = field(default_factory=Counter)
    """Outcome -> KV pages offered to the store."""
    embeddings: Counter[str] = field(default_factory=Counter)
    """Outcome -> embeddings offered to the store."""
    embedding_hits: int = 0
    loaded_tokens: int = 0
    saved_bytes: int = 0
    """Of KV pages."""

    def since(self, before: StoreCounts) -> StoreCounts:
        """The differences from the counts `before`."""
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
        """Raises ConfigError where no engine answers."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10),
            trust_env=False,
            verify=tls_context(),
        )
        self._lost = False
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            answer = self._client.get("/v1/models").raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as e:
            raise ConfigError("--engine", f"{self.url}: {e}", "Give the address of a running engine.") from e

    def send(self, line: WarmLine) -> int | LineError:
        """The prompt's tokens by the engine's count; or why it has not answered."""
        if self._lost:
            return LineError(line.number, "", "not sent, as the engine does not answer")
        body = {"model": self.model, **line.body}
        problem, lost = "", 0
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
            try:
                answer = self._client.post(line.path, json=body)
            except httpx.HTTPError as e:
                problem, lost = f"the engine does not answer: {str(e) or type(e).__name__}", attempt + 1
                continue
            if answer.status_code == 200:
                return _prompt_tokens(answer)
            name, problem = _refusal(answer)
            if answer.status_code not in _AGAIN:
                return LineError(line.number, name, problem)
        # The other lines would wait as long for an engine that is gone.
        if lost == _ATTEMPTS:
            self._lost = True
        return LineError(line.number, "", problem)

    def counts(self) -> StoreCounts | None:
        """None where the engine publishes no counters of cornplug's."""
        try:
            answer = self._client.get("/metrics", timeout=10, follow_redirects=True)
            if answer.status_code != 200 or "cornplug_" not in answer.text:
                return None
            samples = [s for f in text_string_to_metric_families(answer.text) for s in f.samples]
        except (httpx.HTTPError, ValueError):
            return None
        found = StoreCounts()
        for name, labels, value in ((s.name, s.labels, int(s.value)) for s in samples):
            page = labels.get("what") == "kv_page"
            if name == "cornplug_saves_total":
                (found.pages if page else found.embeddings)[labels.get("outcome", "")] += value
            elif name == "cornplug_hits_total" and not page:
                found.embedding_hits += value
            elif name == "cornplug_saved_tokens_total":
                found.loaded_tokens += value
            elif name == "cornplug_bytes_total" and page and labels.get("direction") == "save":
                found.saved_bytes += value
        return found

    def decoding(self) -> Decoding | None:
        """The rule by which the engine decodes images; None if it names no known release."""
        # SGLang has no /version; vLLM has /server_info in its development mode only.
        for engine, path in (("vllm", "/version"), ("sglang", "/server_info")):
            try:
                answer = self._client.get(path, timeout=10)
                version = answer.raise_for_status().json()["version"]
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                continue
            return decoding_of(engine, str(version))
        return None

    def close(self) -> None:
        """End its connections."""
        self._client.close()


def _prompt_tokens(answer: httpx.Response) -> int:
    try:
        return int(answer.json()["usage"]["prompt_tokens"])
    except (ValueError, LookupError, TypeError):
        return 0


def _refusal(answer: httpx.Response) -> tuple[str, str]:
    """(field, problem) of an answer that is an error, as vLLM and SGLang write it."""
    problem: Any = None
    name: Any = None
    try:
        body = answer.json()
        error = body.get("error", body)
        problem, name = error.get("message"), error.get("param")
    except (ValueError, AttributeError):
        pass
    return str(name or ""), f"HTTP {answer.status_code}: {problem or answer.text[:200]}"
