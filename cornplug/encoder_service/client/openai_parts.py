"""An embedding in a request to an engine, instead of the image that it was computed from. Torch-free.

    by handle   vLLM 0.32 with cornplug's connector: a few hundred bytes; the engine reads its store
    by value    any vLLM 0.32 with --enable-mm-embeds: the rows themselves, as .npy in base64

SGLang 0.5.23 takes no embeddings in requests to supported families: its LLaVA and Qwen models run
their tower over an item's `precomputed_embedding`. It takes embeddings from
`--language-only --encoder-urls`, which `cornplug encoder` serves.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cornplug.encoder_service.wire.embedding_handle import EmbeddingHandle
from cornplug.errors import EncoderRefused

if TYPE_CHECKING:
    from cornplug.encoder_service.client.embedding_ref import EmbeddingRef

_VLLM: Final[Mapping[str, bool]] = {"llava": False, "qwen2_vl": True, "qwen2_5_vl": True}
"""Families whose model takes `image_embeds` in vLLM 0.32 -> whether it wants their grid as well."""


def vllm_part(ref: EmbeddingRef, *, by_value: bool = False) -> dict[str, Any]:
    """A content part of a chat message for vLLM 0.32, in the place of an `image_url` part.

    By handle the engine must share the service's `store.secret_file` and store, the request's
    `cache_salt` must be the salt that the image was encoded with, and the entry must still be in the
    store: otherwise the request fails with a 400, as there are no pixels to fall back to.

    Raises EncoderRefused("no_handle") if the service gave none, ("unsupported") if vLLM's model takes no
    embeddings.
    """
    if ref.handle is None:
        raise EncoderRefused("the service gave no embedding handle", reason="no_handle")
    handle = EmbeddingHandle.read(ref.handle)
    wants_grid = _VLLM.get(handle.family)
    if wants_grid is None or handle.modality != "image":
        raise EncoderRefused(
            f"vLLM 0.32 takes no embedding for {handle.family} and {handle.modality}; it does for images "
            f"of {', '.join(_VLLM)}. Send the medium itself",
            reason="unsupported",
        )
    rows = _npy(ref) if by_value else ref.handle
    if not wants_grid:
        return {"type": "image_embeds", "image_embeds": rows}
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": rows, "image_grid_thw": list(handle.grid)},
    }


def _npy(ref: EmbeddingRef) -> str:
    """numpy knows no bfloat16: that travels as float32, exactly, in twice the bytes."""
    out = io.BytesIO()
    np.save(out, ref.numpy(), allow_pickle=False)
    return base64.b64encode(out.getvalue()).decode()
