"""Root of page keys, for both engines: a digest of everything that determines KV except the tokens.

MLA latents have the same bytes in both engines for models on an allow list, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cornplug.identity import kv_root
from cornplug.kv_page import PageGeometry

_COMPARED: Final = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})
"""Architectures whose latents tests/integration/test_latents_of_two_engines.py compares."""

_YARN: Final = frozenset({"yarn", "deepseek_yarn"})
"""Names of YaRN: the published name, and the name that both engines write into the config of a loaded
model.
"""

_READ_ALIKE: Final = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)
"""Fields of a rotary embedding that both engines interpret in the same way."""


def page_root(
    secret: bytes,
    identity: tuple[bytes, Mapping[str, Any]],
    page: PageGeometry,
    *,
    adapter: bytes | None,
    salt: str | None,
) -> bytes:
    """Return the root of the page keys of one namespace (32 bytes).

    Args:
        identity: (language model fingerprint, KV spec), from `EngineModel.kv_identity`.
        page: geometry of the whole model's pages, not of a rank's shard.
        adapter: `LoraDigests.digest` of the request's LoRA adapter, or None.
        salt: the tenant's salt. None is the deployment's shared domain, "" is a salt.
    """
    fingerprint, spec = identity
    extra: dict[str, Any] = {"page": page.spec()}
    if adapter is not None:
        extra["lora"] = adapter.hex()
    return kv_root(secret, fingerprint, {**spec, **extra}, salt)


def engine_of_latents(engine: str, config: Mapping[str, Any]) -> str:
    """Return the only engine that can share this model's MLA latents, for `PageGeometry.engine`, or "" if
    both can.

    Args:
        engine: "vllm" or "sglang".
        config: The whole config that the engine runs, from transformers' `to_dict`.
    """
    rope, named = config.get("rope_parameters") or {}, set(config.get("architectures") or ())
    compared = (
        len(named) == 1
        and named <= _COMPARED
        # Both engines cache the rotary key with interleaved pairs. SGLang reads this field, vLLM does not.
        and config.get("rope_interleave", True) is True
        # SGLang uses another class for unscaled rotary embeddings, which is not tested.
        and rope.get("rope_type") in _YARN
        and rope.keys() <= _READ_ALIKE
    )
    return "" if compared else engine
