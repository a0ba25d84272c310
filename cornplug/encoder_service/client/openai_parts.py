"""An embedding in a request to an engine, instead of the image that it was made of. Torch-free.

    by voucher  vLLM 0.32 with cornplug's connector: some hundred bytes; the engine reads its store
    by value    any vLLM 0.32 with --enable-mm-embeds: the rows themselves, as .npy in base64

SGLang 0.5.23 takes an embedding in a request for no family of ours: its LLaVA and Qwen models run
their tower over what an item calls `precomputed_embedding`. It takes them from
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

    By voucher the engine must share the service's `store.secret_file` and store, the request's
    `cache_salt` must be the salt that the image was encoded with, and the entry must still be in the
    store: otherwise the request fails with a 400, as there are no pixels to fall back to.

    Raises EncoderRefused("no_voucher") where the service gave none, ("unsupported") where vLLM's model
    takes no embeddings.
    """
    if ref.voucher is None:
        raise EncoderRefused("the service gave no voucher with this embedding", reason="no_voucher")
    voucher = EmbeddingHandle.read(ref.voucher)
    wants_grid = _VLLM.get(voucher.family)
    if wants_grid is None or voucher.modality != "image":
        raise EncoderRefused(
            f"vLLM 0.32 takes no embedding for {voucher.family} and {voucher.modality}; it does for images "
            f"of {', '.join(_VLLM)}. Send the medium itself",
            reason="unsupported",
        )
    rows = _npy(ref) if by_value else ref.voucher
    if not wants_grid:
        return {"type": "image_embeds", "image_embeds": rows}
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": rows, "image_grid_thw": list(voucher.grid)},
    }


def _npy(ref: EmbeddingRef) -> str:
    """numpy knows no bfloat16: that travels as float32, exactly, in twice the bytes."""
    out = io.BytesIO()
    np.save(out, ref.numpy(), allow_pickle=False)
    return base64.b64encode(out.getvalue()).decode()
