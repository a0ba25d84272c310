"""Measurement of an engine's iteration times through its HTTP API, with `vllm bench serve`.

`vllm bench serve` sends a list of requests with a given concurrency and times each request. It uses the
completions API, so it also measures SGLang. Prompts are random tokens that no two requests share, so that a
prefix cache has no hits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.errors import ConfigError, CornplugError
from cornplug.host import tls_context, without_proxies
from cornplug.planner.inputs.profile_tables import ProfileRow
from cornplug.planner.profiler.sample_grid import GridPoint, SampleGrid, TimedPoint

_CACHED_MAX = 0.02
"""Maximum fraction of prompt tokens that the engine may take from its prefix cache. With a larger fraction,
the times of requests are not prefill times."""
_CHUNK_TOKENS: Final = 16
"""Number of tokens that one hash id in a trace represents."""


def fetch_model(url: str, tokenizer: str | None) -> BenchedModel:
    """Return the model that the engine at this URL serves.

    `tokenizer` is the folder or hub id of the tokenizer, or None to use the tokenizer of the engine's model.
    Raises CornplugError if the engine does not reply or serves no model.
    """
    (model,) = _get_json(f"{url}/v1/models")["data"][:1] or [{}]
    if "id" not in model:
        raise CornplugError(f"{url} does not serve a model", reason="server")
    return BenchedModel(
        url, model["id"], tokenizer or model.get("root") or model["id"], model.get("max_model_len") or 32_768
    )


def measure_rows(
    target: BenchedModel, grid: SampleGrid, progress: Callable[[str, float], None], **cell: str | int | None
) -> list[ProfileRow]:
    """Measure every point of the grid, and return the rows of a profile table. `cell` contains the other
    fields of `ProfileRow`.

    Raises CornplugError if a request fails or if the engine used its prefix cache.
    """
    grid = grid.limit_to(target.max_model_len)
    parts = len(grid.batches)
    cached = _cached_tokens(target.url)
    progress("requests one by one", 0.0)
    isolated = _bench(target, grid.isolated_requests(), concurrency=1)
    batched = {}
    for i, batch in enumerate(grid.batches[1:], start=1):
        progress(f"{batch} requests at a time", i / parts)
        batched[batch] = _bench(target, grid.batched_requests(batch), concurrency=batch, first_id=i)
    progress("done", 1.0)
    prompt_tokens = sum(t.point.prompt_tokens for timed in (isolated, *batched.values()) for t in timed)
    found = _cached_tokens(target.url) - cached
    if found > _CACHED_MAX * prompt_tokens:
        raise CornplugError(
            f"the engine found {found:g} of {prompt_tokens} prompt tokens in its prefix cache. "
            "Start it with --no-enable-prefix-caching (SGLang: --disable-radix-cache)",
            reason="cached",
        )
    kv_tokens = capacity_tokens(target.url)
    room = [ProfileRow(kind="kv_tokens", x=kv_tokens, **cell)] if kv_tokens else []  # type: ignore[arg-type]
    return [*grid.rows(isolated, batched, **cell), *room]


def capacity_tokens(url: str) -> int:
    """Return the capacity of the engine's KV cache in tokens, or 0 if the engine does not report it."""
    for family in text_string_to_metric_families(_metrics(url)):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    try:
        return int(_get_json(f"{url}/get_server_info").get("max_total_num_tokens") or 0)
    except CornplugError:
        return 0


def version(url: str) -> str:
    """Return the engine's version, or "unknown" if the engine does not report it."""
    for path, field in (("/version", "version"), ("/get_server_info", "version")):
        try:
            return str(_get_json(url + path)[field])
        except (CornplugError, KeyError):
            continue
    return "unknown"


def _cached_tokens(url: str) -> float:
    """Return the number of prompt tokens that the engine has taken from its prefix cache since it started."""
    names = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
    return sum(
        sample.value
        for family in text_string_to_metric_families(_metrics(url))
        for sample in family.samples
        if sample.name in names
    )


def _metrics(url: str) -> str:
    """Return the text of the engine's /metrics, or "" if the engine has no metrics, which is SGLang's
    default."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=10, trust_env=False, verify=tls_context())
    except httpx.TransportError as e:
        raise CornplugError(f"{url} does not respond: {e}", reason="server") from e
    return answer.text if answer.status_code == 200 else ""


def _get_json(url: str) -> dict[str, Any]:
    try:
        answer = httpx.get(url, timeout=10, trust_env=False, verify=tls_context()).raise_for_status()
    except httpx.HTTPError as e:
        raise CornplugError(
            f"{url}: {e}. Check that this is the address of an engine.", reason="server"
        ) from e
    body: dict[str, Any] = answer.json()
    return body


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """Model that an engine serves, for `vllm bench serve`."""

    url: str
    name: str
    """Name of the model in the engine's API."""
    tokenizer: str
    """Folder or hub id of the tokenizer."""
    max_model_len: int
    """Maximum number of prompt and output tokens of a request."""


def bench_command(
    model: BenchedModel, trace: Path, result: Path, *, requests: int, concurrency: int
) -> list[str]:
    """Return the command that sends the requests of the file `trace` and writes their times to `result`."""
    return [
        _vllm_path(),
        *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", model.url, "--model", model.name, "--tokenizer", model.tokenizer),
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(_CHUNK_TOKENS)),
        *("--timed-trace-label-timestamp", "at_s", "--timed-trace-label-hash-ids", "hash_ids"),
        *("--timed-trace-label-input-length", "prompt_tokens"),
        *("--timed-trace-label-output-length", "output_tokens"),
        *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
        # Send no test request, because it would leave the first prompt in a prefix cache.
        *("--request-rate", "inf", "--ready-check-timeout-sec", "0", "--temperature", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent)),
        *("--result-filename", result.name, "--disable-tqdm"),
    ]


def _bench(
    model: BenchedModel,
    points: Sequence[GridPoint],
    *,
    concurrency: int,
    first_id: int = 0,
    timeout_s: float = 3600,
) -> list[TimedPoint]:
    """Send the requests `points` in order, and return their times.

    Calls with different values of `first_id` use different prompts. Raises CornplugError if a request fails,
    or with the end of the command's output if the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="cornplug-bench-") as folder:
        trace, result = Path(folder) / "trace.jsonl", Path(folder) / "result.json"
        trace.write_text(trace_lines(points, first_id))
        line = bench_command(model, trace, result, requests=len(points), concurrency=concurrency)
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout_s,
            env=without_proxies(os.environ),
        )  # fmt: skip
        if done.returncode or not result.exists():
            raise CornplugError(
                f"`vllm bench serve` ended with status {done.returncode}:\n{_tail(done.stdout)}",
                reason="bench",
            )
        return bench_times(points, json.loads(result.read_text()))


def trace_lines(points: Sequence[GridPoint], first_id: int) -> str:
    """Return the JSON lines of a trace whose prompts share no hash id, and therefore no tokens."""
    lines, unused = [], first_id * 1_000_000
    for point in points:
        chunks = -(-point.prompt_tokens // _CHUNK_TOKENS)
        lines.append(
            json.dumps(
                {
                    "at_s": 0,
                    "prompt_tokens": point.prompt_tokens,
                    "output_tokens": point.output_tokens,
                    "hash_ids": list(range(unused, unused + chunks)),
                }
            )
        )
        unused += chunks
    return "\n".join(lines) + "\n"


def bench_times(points: Sequence[GridPoint], result: dict[str, Any]) -> list[TimedPoint]:
    """Return the requests `points`, each with its time from the command's detailed result.

    Raises CornplugError if a request failed, or if its prompt or output did not have the requested length.
    """
    for i, error in enumerate(result["errors"]):
        if error:
            last = str(error).strip().splitlines()[-1]
            raise CornplugError(f"request {i} ({points[i]}) failed: {last}", reason="bench")
    got = [
        GridPoint(prompt, output)
        for prompt, output in zip(result["input_lens"], result["output_lens"], strict=True)
    ]
    wrong = [i for i, (point, ours) in enumerate(zip(points, got, strict=True)) if point != ours]
    if wrong:
        raise CornplugError(
            f"request {wrong[0]} should have been {points[wrong[0]]}, but was {got[wrong[0]]}", reason="bench"
        )
    return [TimedPoint(point, seconds) for point, seconds in zip(points, result["latencies"], strict=True)]


def _vllm_path() -> str:
    """Return the path of the `vllm` command, next to this Python interpreter or on the PATH. Raises
    ConfigError if vLLM is not installed."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ConfigError(
            "vllm", "not installed, but `vllm bench serve` is needed to measure", "Install vLLM"
        )
    return found


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
