"""A real SGLang server for tests, benchmarks and the demo: by OpenAI API, and by its own `/generate`.

SGLang pins other library versions than vLLM, so it has a separate environment, which
`script/setup` makes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx

from cornplug.errors import ProcessFailed
from cornplug.host import free_port, has_gpu, tls_context
from devkit.engines import EngineServer, RequestFailed, data_url
from devkit.engines_in_use import UsedEngine, dtype_in, names_cornplug

# Small and exact, unless the caller says otherwise.
_DEFAULTS: Final[Mapping[str, str | None]] = {
    "--dtype": "float32",
    "--max-total-tokens": "8192",
    "--enable-multimodal": None,
    "--enable-cache-report": None,
    "--enable-metrics": None,
}
_CPU_DEFAULTS: Final[Mapping[str, str | None]] = {
    "--device": "cpu",
    # Of the memory that was free before its weights. "--max-total-tokens" bounds the KV; engines that start
    # beside it take memory meanwhile, which SGLang counts as its weights'.
    "--mem-fraction-static": "0.5",
    "--attention-backend": "torch_native",
    "--mm-attention-backend": "sdpa",
    # Else an idle scheduler polls its sockets without a pause, and takes a core from whoever computes.
    "--sleep-on-idle": None,
}
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Else each /health computes a token and takes a second.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
# Without the second the first image waits 16 s for the compiler.
_CPU_ENV: Final = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An answer of `/generate`. `logprobs` are of the chosen tokens, in order."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    """A row a token, highest first: (token id, logprob)."""
    prompt_tokens: int
    cached_tokens: int
    cached: Mapping[str, int]
    """`cached_tokens` by where they were found: `device`, `host`, `storage`."""
    finish_reason: str
    total_s: float
    meta_info: Mapping[str, Any]
    """SGLang's own account, whole."""


class SglangServer(EngineServer):
    """`python -m sglang.launch_server --model-path MODEL`, ready when /health answers 200.

    `args` are further command-line arguments; those of `_DEFAULTS`, and without a GPU of
    `_CPU_DEFAULTS`, that they do not set are added. The server calls its
    model `model`.

    Args:
        python: Interpreter of the environment with SGLang; by default `sglang_python()`.

    Raises ProcessFailed when there is no such interpreter.
    """

    _ASKS: ClassVar[Mapping[str, Any]] = {"return_output_ids_in_sglext": True}

    def __init__(
        self,
        model: str | Path,
        *args: str,
        log: Path,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        ready_s: float = 600,
        python: Path | None = None,
    ) -> None:
        python = python or sglang_python()
        if python is None:
            raise ProcessFailed("SGLang is not installed. Run: script/setup")
        port = port or free_port()
        given = {arg.partition("=")[0] for arg in args}
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", *args]
        for flag, value in {**_DEFAULTS, **({} if has_gpu() else _CPU_DEFAULTS)}.items():
            if flag not in given:
                command += [flag] if value is None else [flag, value]
        # Kernel builds look for ninja on PATH, beside the interpreter.
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        cpu = {} if has_gpu() else _CPU_ENV
        super().__init__(
            command,
            port=port,
            log=log,
            env={"PATH": path, **_QUIET, **cpu, **(env or {})},
            ready_s=ready_s,
            engine=UsedEngine(
                engine="sglang",
                bed="",
                python=python,
                dtype=dtype_in(command),
                with_cornplug=names_cornplug(command[3:]),
            ),
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        images: Sequence[bytes] = (),
        max_tokens: int = 16,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 120,
        **fields: Any,
    ) -> Generation:
        """One greedy completion of `prompt` as it is, without a chat template.

        Args:
            prompt: Text or token ids; with `images`, holding the model's placeholder of each.
            images: Encoded images.
            sampling: Further sampling parameters, as `ignore_eos`.
            fields: Further fields of the request's body, as `cache_salt` or `extra_key`.

        Raises RequestFailed for an error status, httpx.TransportError when the server is gone.
        """
        body = {
            **({"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}),
            **({"image_data": [data_url(image) for image in images]} if images else {}),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, **(sampling or {})},
            "return_logprob": True,
            "top_logprobs_num": 5,
            **fields,
        }
        sent = time.perf_counter()
        answer = self._post("/generate", body, timeout_s).json()
        return _generation(answer, time.perf_counter() - sent)

    def flush_cache(self) -> None:
        """Forget the prefix caches of device and host memory, not the storage behind them.

        Raises RequestFailed while requests are in the engine.
        """
        self._post("/flush_cache", {}, 30)

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> httpx.Response:
        response = httpx.post(
            self.url + path, json=body, timeout=timeout_s, trust_env=False, verify=tls_context()
        )
        if response.status_code != 200:
            raise RequestFailed(response.status_code, response.text)
        return response


def sglang_python() -> Path | None:
    """The interpreter with SGLang: `CORNPLUG_SGLANG_PYTHON`, else `.venv-sglang` of this checkout.

    None where there is neither. Not resolved: an environment's interpreter is a link.
    """
    named = os.environ.get("CORNPLUG_SGLANG_PYTHON")
    python = Path(named) if named else Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
    return python if python.exists() else None


def _generation(answer: Mapping[str, Any], total_s: float) -> Generation:
    meta = answer["meta_info"]
    tiers = meta.get("cached_tokens_details") or {}
    return Generation(
        text=answer["text"],
        output_ids=tuple(answer["output_ids"]),
        logprobs=tuple(logprob for logprob, _, _ in meta["output_token_logprobs"]),
        top=tuple(tuple((i, logprob) for logprob, i, _ in row) for row in meta["output_top_logprobs"]),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        cached={tier: tiers.get(tier, 0) for tier in ("device", "host", "storage")},
        finish_reason=meta["finish_reason"]["type"],
        total_s=total_s,
        meta_info=meta,
    )
