"""Settings for the KV transfer from prefill to decode engines: buffer sizes, pages, and the engines' flags.

Buffers have the size that NIXL and LMCache need: the KV of the longest prompt, 2·L·N·H·D·bytes, rounded up to
256 MiB. Pages have at least 128 tokens, because a transfer needs one descriptor per page and layer. Latent
attention (MLA) stores one vector per token and layer instead of K and V of every head, and every rank holds
all vectors.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from cornplug.planner.plan import KVGeometry

Transfer = Literal["nixl", "mooncake", "lmcache"]

BUFFER_STEP: Final = 256 << 20
MIN_PAGE_TOKENS: Final = 128
LMCACHE_PORT: Final = 5655
LMCACHE_HTTP_PORT: Final = 8855

_VLLM_CONNECTOR: Final = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
_VLLM_ROLE: Final = {"P": "kv_producer", "D": "kv_consumer"}


def page_tokens(kv: KVGeometry) -> int:
    """Return the number of tokens in a KV page of an engine that transfers KV.

    MLA kernels support only pages of 64 tokens. These pages are large enough, because one vector is for all
    heads.
    """
    return 64 if kv.mla else MIN_PAGE_TOKENS


def prompt_bytes(kv: KVGeometry, *, tp: int = 1, pp: int = 1) -> int:
    """Return the size in bytes of the longest prompt's KV on one rank, rounded up to 128 tokens."""
    tokens = _round_up(kv.max_prompt_tokens, MIN_PAGE_TOKENS)
    layers = -(-kv.layers // pp)
    if kv.mla:
        return layers * tokens * kv.head_dim * kv.element_bytes
    heads = max(-(-kv.kv_heads // tp), 1)
    return 2 * layers * tokens * heads * kv.head_dim * kv.element_bytes


def buffer_bytes(kv: KVGeometry, *, tp: int = 1, pp: int = 1) -> int:
    """Return the size in bytes of a rank's transfer buffer: `prompt_bytes`, rounded up to 256 MiB."""
    return _round_up(prompt_bytes(kv, tp=tp, pp=pp), BUFFER_STEP)


def vllm_config(role: Literal["P", "D"], transfer: Transfer) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config` for one side of a prefill-decode pair.

    With this configuration, KV is computed again if its transfer fails. With vLLM's default, the request
    would fail.
    """
    if transfer == "lmcache":
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": LMCACHE_PORT,
            },
        }
    return {
        "kv_connector": _VLLM_CONNECTOR[transfer],
        "kv_role": _VLLM_ROLE[role],
        "kv_load_failure_policy": "recompute",
    }


def combine_vllm_connectors(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that combines several connectors.

    vLLM loads a prefix from the first connector that has it, and saves to all connectors.
    """
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def lmcache_server(gib: float) -> list[str]:
    """Return the command of LMCache's server, through which a host's engines transfer KV. `gib` is the size
    of the server's buffer in GiB."""
    return [
        "lmcache", "server", "--host", "127.0.0.1", "--port", str(LMCACHE_PORT),
        "--http-port", str(LMCACHE_HTTP_PORT), "--l1-size-gb", f"{gib:g}",
        "--chunk-size", "256", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip


def sglang_staging(kv: KVGeometry, *, tp: int, pp: int) -> dict[str, str]:
    """Return SGLang's environment for a prefill-decode pair with different tensor-parallel degrees.

    SGLang gathers slices of heads in a buffer, because single heads are too small for efficient transfers.
    The result is empty for MLA, which has no heads to gather.
    """
    if kv.mla:
        return {}
    mib = buffer_bytes(kv, tp=tp, pp=pp) >> 20
    return {"SGLANG_DISAGG_STAGING_BUFFER": "true", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": str(mib)}


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
