"""Computation of the root of page keys, for both engines: a digest of everything that determines KV except
the tokens.

MLA latents have the same bytes in both engines only for models on an allow list, for which a test compares
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cornplug.identity import kv_root
from cornplug.kv_page import PageGeometry

_COMPARED: Final = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})
"""Model architectures whose latents in both engines are compared by
tests/integration/test_latents_of_two_engines.py."""

_YARN: Final = frozenset({"yarn", "deepseek_yarn"})
"""Names of YaRN rotary embeddings: the published name, and the name that both engines write into the config
of a loaded model."""

_READ_ALIKE: Final = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)
"""Config fields of rotary embeddings that both engines interpret in the same way."""


def page_root(
    secret: bytes,
    identity: tuple[bytes, Mapping[str, Any]],
    page: PageGeometry,
    *,
    adapter: bytes | None,
    salt: str | None,
) -> bytes:
    """Return the root from which page keys are derived (32 bytes), for one model, page geometry, adapter and
    salt.

    Args:
        identity: (language model fingerprint, KV spec), from `EngineModel.kv_identity`.
        page: geometry of the complete model's pages, not of one rank's part.
        adapter: `LoraDigests.digest` of the request's LoRA adapter, or None.
        salt: the tenant's salt, or None for the domain that the whole deployment shares. "" is a valid salt.
    """
    fingerprint, spec = identity
    extra: dict[str, Any] = {"page": page.spec()}
    if adapter is not None:
        extra["lora"] = adapter.hex()
    return kv_root(secret, fingerprint, {**spec, **extra}, salt)


def engine_of_latents(engine: str, config: Mapping[str, Any]) -> str:
    """Return the name of the only engine that can share this model's MLA latents, for `PageGeometry.engine`,
    or "" if both engines can.

    Args:
        engine: "vllm" or "sglang".
        config: the complete config that the engine runs, from transformers' `to_dict`.
    """
    rope, named = config.get("rope_parameters") or {}, set(config.get("architectures") or ())
    compared = (
        len(named) == 1
        and named <= _COMPARED
        # Both engines cache the rotary key with interleaved pairs. SGLang reads this field, but vLLM does
        # not.
        and config.get("rope_interleave", True) is True
        # SGLang uses a different class for unscaled rotary embeddings, which is not tested.
        and rope.get("rope_type") in _YARN
        and rope.keys() <= _READ_ALIKE
    )
    return "" if compared else engine
