"""Digests of a tower's inputs, and the identity of a tower that only SGLang servers run.

Some of SGLang's towers compute other values than the encoder service, or belong to a family that the encoder
service does not support. SGLang servers with the same release, settings and checkpoint can still share the
embeddings of these towers. The key depends on the exact tensors that the tower receives:

    medium ──SGLang's processor──> tensors of an item ──digest──> embedding key ──> store
                                                                      │
                    checkpoint, release, settings ──own_identity──────┘

Processor arguments therefore do not have to be part of the key. The embeddings are shared, but the KV after a
medium with such an embedding is not (`placeholder_tokens.py`), because the positions and masks of its tokens
depend on more than the embedding.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import torch

from cornplug.encoder_service.wire.tensors import dtype_name, raw_bytes
from cornplug.engine_common.model_identity import EngineModel, TowerIdentity
from cornplug.identity import array_digest, digest
from cornplug.sglang_hooks.compat import validated_families

_CODE: Final = ("sglang", "torch", "torchvision", "transformers")
"""Packages with the code of SGLang's towers."""
_SETTINGS: Final = (
    "attention_backend",
    "device",
    "mm_attention_backend",
    "prefill_attention_backend",
    "tp_size",
)
_MODALITIES: Final = ("image", "video", "audio")
OURS: Final = "cornplug_"
"""Prefix of fields that this plugin adds to an item."""


@dataclass(frozen=True, slots=True)
class OwnTower:
    """A tower whose embeddings are shared only among SGLang servers."""

    tower: TowerIdentity
    modalities: frozenset[str] = field(default_factory=frozenset)
    """Names of tested modalities: "image", "video", "audio"."""


def own_modalities(model_type: str, dtype: str) -> frozenset[str]:
    """Return the modalities for which SGLang servers share embeddings of this family in this dtype."""
    return frozenset(m for m in _MODALITIES if model_type in validated_families(dtype, f"own {m}"))


def own_tower(model: EngineModel, settings: Any, *, generic: bool) -> OwnTower | None:
    """Return the identity of a model's tower for sharing among SGLang servers, or None if it is not tested.

    This reads all weights, whose digests are cached on disk.

    Args:
        settings: SGLang's resolved settings.
        generic: whether SGLang runs the model with its generic backend. The backend's
            `MultiModalMixin._forward_hidden_states` does not call a tower of SGLang, so the result is None.

    Raises CheckpointError in the same cases as `EngineModel.own_identity`.
    """
    modalities = own_modalities(str(model.checkpoint.config.get("model_type")), model.dtype)
    if not modalities or generic:
        return None
    code = {package: version(package) for package in _CODE}
    chosen = {name: getattr(settings, name) for name in _SETTINGS}
    return OwnTower(model.own_identity({"code": code, "settings": chosen}), modalities)


def inputs_digest(item: Any) -> bytes | None:
    """Return the digest (32 bytes) of everything that an item passes to its tower.

    Returns None if the item has no features of its own, or if a field is not a tensor, number, text or
    collection of these (for example a handle to another process's GPU memory).
    """
    from sglang.srt.managers.schedule_batch import MultimodalInputFormat

    if item.format != MultimodalInputFormat.NORMAL or item.feature is None:
        return None
    named = {k: v for k, v in item.model_specific_data.items() if not k.startswith(OURS)}
    try:
        return digest(
            "cornplug-sglang-inputs-v1", item.modality.name.encode(), _digest(item.feature), _digest(named)
        )
    except TypeError:
        return None


def _digest(value: object) -> bytes:
    """Return a digest that distinguishes values of all types. Raises TypeError for unsupported types."""
    match value:
        case torch.Tensor():
            if value.layout != torch.strided or value.is_quantized:
                raise TypeError(f"unsupported tensor layout {value.layout}")
            return digest("tensor", array_digest(dtype_name(value.dtype), value.shape, raw_bytes(value)))
        case np.ndarray():
            if value.dtype.kind not in "biuf":
                raise TypeError(f"unsupported array dtype {value.dtype}")
            data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
            return digest("array", array_digest(value.dtype.name, value.shape, data.tobytes()))
        case None | bool():
            return digest("constant", str(value).encode())
        case int():
            return digest("int", str(value).encode())
        case float():
            return digest("float", struct.pack(">d", value))
        case str():
            return digest("text", value.encode("utf-8", errors="surrogatepass"))
        case bytes():
            return digest("bytes", value)
        case list() | tuple():
            return digest("list", *map(_digest, value))
        case Mapping():
            # Sort by digest, because keys of different types cannot be sorted.
            return digest("mapping", *sorted(_digest(k) + _digest(v) for k, v in value.items()))
    raise TypeError(f"a {type(value).__name__}")
