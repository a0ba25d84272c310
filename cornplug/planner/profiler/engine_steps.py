"""Measurement of an engine's iteration times through its HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.errors import CornplugError
from cornplug.host import tls_context
from cornplug.planner.inputs.profile_tables import ProfileRow
from cornplug.planner.profiler import vllm_bench
from cornplug.planner.profiler.sample_grid import SampleGrid
from cornplug.planner.profiler.vllm_bench import BenchedModel

_CACHED_MAX = 0.02
"""Maximum fraction of prompt tokens from the engine's prefix cache. Above it, times of requests are not
prefill times."""


def served(url: str, tokenizer: str | None) -> BenchedModel:
    """Return the model that the engine at this URL serves.

    `tokenizer` is the folder or hub id of the tokenizer, or None to use the one of the engine's model. Raises
    CornplugError if the engine does not reply or serves no model.
    """
    (model,) = _get_json(f"{url}/v1/models")["data"][:1] or [{}]
    if "id" not in model:
        raise CornplugError(f"{url} does not serve a model", reason="server")
    return BenchedModel(
        url, model["id"], tokenizer or model.get("root") or model["id"], model.get("max_model_len") or 32_768
    )


def rows(
    target: BenchedModel, grid: SampleGrid, progress: Callable[[str, float], None], **cell: str | int | None
) -> list[ProfileRow]:
    """Measure every point of the grid, and return the rows of a profile table. `cell` has the other fields of
    `ProfileRow`.

    Raises CornplugError if a request fails or if the engine used its prefix cache.
    """
    grid = grid.within(target.max_model_len)
    parts = len(grid.batches)
    cached = _cached_tokens(target.url)
    progress("requests one by one", 0.0)
    isolated = vllm_bench.measure(target, grid.isolated(), concurrency=1)
    batched = {}
    for i, batch in enumerate(grid.batches[1:], start=1):
        progress(f"{batch} requests at a time", i / parts)
        batched[batch] = vllm_bench.measure(target, grid.batched(batch), concurrency=batch, first_id=i)
    progress("done", 1.0)
    prompt_tokens = sum(t.ask.prompt_tokens for timed in (isolated, *batched.values()) for t in timed)
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
