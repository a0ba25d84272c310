"""Real engines for tests, benchmarks and the demo, spoken to by their OpenAI API.

`VllmServer` is here; `SglangServer`, with the same face, is in `sglang_engine.py`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.errors import ProcessFailed
from cornplug.host import free_port, has_gpu, tls_context
from cornplug.processes import ManagedProcess, responds_ok
from devkit.engines_in_use import UsedEngine, dtype_in, names_cornplug, note
from devkit.photos import Photo, photos
from devkit.processes import EncoderProcess, StoreProcess, environment, wait_until
from devkit.vllm_beds import bed_environment, bed_of_this_run

__all__ = [
    "Answer",
    "EncoderProcess",
    "EngineServer",
    "Photo",
    "RequestFailed",
    "StoreProcess",
    "VllmServer",
    "photos",
    "wait_until",
]

# Small and exact, unless the caller says otherwise: greedy answers are then comparable.
_DEFAULTS: Mapping[str, str | None] = {
    "--max-model-len": "2048",
    "--dtype": "float32",
    "--enforce-eager": None,
}
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


class RequestFailed(RuntimeError):
    """The engine answered with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion. `logprobs` are of the chosen tokens, in order."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    finish_reason: str | None
    ttft_s: float
    """From sending the request to its first token."""
    total_s: float
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    """A row a token, highest first; empty unless the request asked for `top_logprobs`."""
    cached_tokens: int | None = None
    """Of the prompt, found in a cache; None where the engine does not say."""


class EngineServer(ManagedProcess):
    """An engine's HTTP server on this host; it calls its model `model`.

    A test that reads its `url` uses `engine` (`devkit.engines_in_use`).
    """

    _ASKS: ClassVar[Mapping[str, Any]] = {}
    """Fields by which this engine is asked for the ids of its output tokens."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        env: Mapping[str, str],
        ready_s: float,
        engine: UsedEngine,
    ) -> None:
        self.port = port
        self._engine = engine
        super().__init__(command, log=log, env=environment(env), ready_timeout_s=ready_s)

    @property
    def url(self) -> str:
        """Where the server listens."""
        note(self._engine)
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        return responds_ok(f"http://127.0.0.1:{self.port}/health")

    def chat(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        images: Sequence[bytes] = (),
        max_tokens: int = 16,
        cache_salt: str | None = None,
        timeout_s: float = 120,
        **fields: Any,
    ) -> Answer:
        """One greedy chat completion, streamed.

        Args:
            prompt: The user's words, or whole OpenAI messages (then without `images`).
            images: Encoded images, placed before the words.
            fields: Further fields of the request's body, as `temperature` or `ignore_eos`.

        Raises RequestFailed for an error status, httpx.TransportError when the server is gone.
        """
        messages = [_user(prompt, images)] if isinstance(prompt, str) else list(prompt)
        body: dict[str, Any] = {
            "model": "model",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._ASKS,
            **({} if cache_salt is None else {"cache_salt": cache_salt}),
            **fields,
        }
        url = f"{self.url}/v1/chat/completions"
        with httpx.Client(timeout=timeout_s, trust_env=False, verify=tls_context()) as client:
            sent = time.perf_counter()
            with client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise RequestFailed(response.status_code, response.read().decode(errors="replace"))
                return _collect(_events(response), sent)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: `name{label="value",...}`, labels sorted, -> value."""
        answer = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False, verify=tls_context())
        text = answer.raise_for_status().text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}"] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of `name` that have these labels; 0 where there is none."""
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == name and all(label in sample for label in wanted)
        )


class VllmServer(EngineServer):
    """`vllm serve MODEL`, ready when /health answers 200.

    `args` are further command-line arguments; they override `_DEFAULTS`. Every server calls its model
    `model`. `bed` is one of `devkit.vllm_beds`, and `packages` are further ones for its path; `vllm` is the
    command, by default the one of this environment.
    """

    _ASKS: ClassVar[Mapping[str, Any]] = {"return_token_ids": True}

    def __init__(
        self,
        model: str | Path,
        *args: str,
        log: Path,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        bed: str | None = None,
        packages: Sequence[str | Path] = (),
        vllm: Path | None = None,
        ready_s: float = 600,
    ) -> None:
        port = port or free_port()
        vllm = vllm or Path(vllm_command())
        command = [str(vllm), "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", "model"]
        for flag, value in _DEFAULTS.items():
            command += [flag] if value is None else [flag, value]
        command += args
        # Kernel builds look for ninja on PATH, beside this interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        cpu = {} if has_gpu() else {"VLLM_CPU_KVCACHE_SPACE": "1"}
        of_bed = bed_environment(bed, *packages)
        env = {"PATH": path, **_QUIET, **cpu, **of_bed, **(env or {})}
        folders = filter(None, [env.get("PYTHONPATH"), of_bed.get("PYTHONPATH")])
        if path_of_modules := os.pathsep.join(dict.fromkeys(folders)):
            env["PYTHONPATH"] = path_of_modules
        engine = UsedEngine(
            engine="vllm",
            bed=bed or bed_of_this_run(),
            python=vllm.with_name("python"),
            dtype=dtype_in(command),
            with_cornplug=names_cornplug(command[2:]),
        )
        super().__init__(command, port=port, log=log, env=env, ready_s=ready_s, engine=engine)


def vllm_command() -> str:
    """The command `vllm`: of this environment, else on PATH. Raises ProcessFailed where there is none."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ProcessFailed("the command `vllm` is not installed. Run: script/setup")
    return found


def _user(prompt: str, images: Sequence[bytes]) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in images
    ]
    return {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}


def data_url(image: bytes) -> str:
    mime = "png" if image.startswith(b"\x89PNG") else "webp" if image[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{mime};base64,{base64.b64encode(image).decode()}"


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RequestFailed(int(event["error"].get("code") or 500), line)
            yield event


def _collect(events: Iterator[dict[str, Any]], sent: float) -> Answer:
    text, finish, usage, first = "", None, None, None
    token_ids: list[int] = []
    logprobs: list[float] = []
    top: list[tuple[float, ...]] = []
    for event in events:
        usage = event.get("usage") or usage
        # SGLang gives the ids at the end, in an event of their own; vLLM with each choice.
        for of_choice in (event.get("sglext") or {}).get("output_ids") or []:
            token_ids += of_choice
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            entries = (choice.get("logprobs") or {}).get("content") or []
            if (new or entries) and first is None:
                first = time.perf_counter()
            token_ids += new
            text += choice["delta"].get("content") or ""
            for entry in entries:
                logprobs.append(entry["logprob"])
                if entry.get("top_logprobs"):
                    top.append(tuple(sorted((t["logprob"] for t in entry["top_logprobs"]), reverse=True)))
            finish = choice.get("finish_reason") or finish
    done = time.perf_counter()
    if usage is None or first is None:
        raise RequestFailed(200, f"the stream ended early, after {len(token_ids)} tokens")
    return Answer(
        text=text,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        prompt_tokens=usage["prompt_tokens"],
        finish_reason=finish,
        ttft_s=first - sent,
        total_s=done - sent,
        top_logprobs=tuple(top),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )
