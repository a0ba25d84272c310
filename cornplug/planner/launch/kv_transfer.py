"""KV from prefill to decode: the buffer's size, pages, and each engine's flags for the transfer.

The sizing rule is that of NIXL and LMCache set-ups: room for the longest prompt's KV,
2·L·N·H·D·bytes, rounded up to 256 MiB; pages of at least 128 tokens, for a transfer
costs one descriptor a page and layer. Latent attention (MLA) keeps one vector a token and layer in place
of K and V of every head, and every rank keeps all of it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from cornplug.planner.plan import KVGeometry

Transfer = Literal["nixl", "mooncake", "lmcache"]

BUFFER_STEP: Final = 256 << 20
LEAST_PAGE_TOKENS: Final = 128
LMCACHE_PORT: Final = 5655
LMCACHE_HTTP_PORT: Final = 8855

_VLLM_CONNECTOR: Final = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
_VLLM_ROLE: Final = {"P": "kv_producer", "D": "kv_consumer"}


def page_tokens(kv: KVGeometry) -> int:
    """Tokens of an engine's KV page where it is transferred.

    MLA kernels take pages of 64 only; theirs are large as they are, one vector for all heads.
    """
    return 64 if kv.mla else LEAST_PAGE_TOKENS


def prompt_bytes(kv: KVGeometry, *, tp: int = 1, pp: int = 1) -> int:
    """Bytes of the longest prompt's KV on one rank, in whole pages of at least 128 tokens."""
    tokens = _up(kv.max_prompt_tokens, LEAST_PAGE_TOKENS)
    layers = -(-kv.layers // pp)
    if kv.mla:
        return layers * tokens * kv.head_dim * kv.element_bytes
    heads = max(-(-kv.kv_heads // tp), 1)
    return 2 * layers * tokens * heads * kv.head_dim * kv.element_bytes


def buffer_bytes(kv: KVGeometry, *, tp: int = 1, pp: int = 1) -> int:
    """Bytes that a rank sets aside for transfers: `prompt_bytes`, rounded up to 256 MiB."""
    return _up(prompt_bytes(kv, tp=tp, pp=pp), BUFFER_STEP)


def vllm_config(role: Literal["P", "D"], transfer: Transfer) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for one side of a pair.

    A transfer that fails is computed again: vLLM's own default would fail the request.
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


def vllm_together(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Several connectors as one: vLLM loads from the first that has a prefix, and saves to all."""
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def lmcache_server(gib: float) -> list[str]:
    """The server through which a host's engines hand over KV with transfer "lmcache"."""
    return [
        "lmcache", "server", "--host", "127.0.0.1", "--port", str(LMCACHE_PORT),
        "--http-port", str(LMCACHE_HTTP_PORT), "--l1-size-gb", f"{gib:g}",
        "--chunk-size", "256", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip


def sglang_staging(kv: KVGeometry, *, tp: int, pp: int) -> dict[str, str]:
    """Environment for a pair of unequal tensor parallelism: SGLang gathers slices of heads in a
    buffer, as single heads are too small to be sent. MLA has no heads to gather."""
    if kv.mla:
        return {}
    mib = buffer_bytes(kv, tp=tp, pp=pp) >> 20
    return {"SGLANG_DISAGG_STAGING_BUFFER": "true", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": str(mib)}


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
