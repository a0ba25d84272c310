"""Embedding in a request to an engine, in place of the image that it was computed from. Does not need torch.

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
"""Family whose model accepts `image_embeds` in vLLM 0.32 -> whether it also needs the grid."""


def vllm_part(ref: EmbeddingRef, *, by_value: bool = False) -> dict[str, Any]:
    """Return a content part of a chat message for vLLM 0.32, in place of an `image_url` part.

    By handle, the engine must share the service's `store.secret_file` and store, the request's `cache_salt`
    must be the salt that the image was encoded with, and the entry must still be in the store. Otherwise the
    request fails with status 400, because there are no pixels to fall back to.

    Raises EncoderRefused: "no_handle" if the service returned none, "unsupported" if vLLM's model accepts no
    embeddings.
    """
    if ref.handle is None:
        raise EncoderRefused("the service returned no embedding handle", reason="no_handle")
    handle = EmbeddingHandle.read(ref.handle)
    wants_grid = _VLLM.get(handle.family)
    if wants_grid is None or handle.modality != "image":
        raise EncoderRefused(
            f"vLLM 0.32 does not accept embeddings for {handle.family} and {handle.modality}, only for "
            f"images of {', '.join(_VLLM)}. Send the medium itself",
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
    """Encode the rows as .npy. numpy has no bfloat16, so it is widened to float32, without loss."""
    out = io.BytesIO()
    np.save(out, ref.numpy(), allow_pickle=False)
    return base64.b64encode(out.getvalue()).decode()
