"""Embedding that a client received: its key, and a verified copy of its bytes. Does not need torch.

`vllm_content_part` puts the embedding into a request to an engine, in place of the image that it was computed
from:

    by handle   for vLLM 0.32 with cornplug's connector. Sends a few hundred bytes, and the engine reads the
                embedding from its store.
    by value    for any vLLM 0.32 with --enable-mm-embeds. Sends the embedding itself, as .npy in base64.

SGLang 0.5.23 does not accept embeddings in requests to the supported families, because its LLaVA and Qwen
models run their tower over an item's `precomputed_embedding`. It accepts embeddings from the servers in
`--language-only --encoder-urls`, which `cornplug encoder` implements.
"""

from __future__ import annotations

import base64
import importlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cornplug.codec import ITEM_BYTES, PayloadKind
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.errors import CodecError, EncoderRefused, StoreError
from cornplug.store.base import Store
from cornplug.store.payload import get_payload

if TYPE_CHECKING:
    import torch


STORE_DEADLINE_S: Final = 0.25
_VLLM_FAMILIES: Final[Mapping[str, bool]] = {"llava": False, "qwen2_vl": True, "qwen2_5_vl": True}
"""Families whose models accept `image_embeds` in vLLM 0.32, and whether they also need the grid."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingRef:
    """One embedding of shape (rows, hidden_size), read-only.

    The reference has its own verified copy of the bytes, so it stays valid after the store or the service
    exits.
    """

    key: bytes
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype without the "torch." prefix."""
    origin: str
    """How the service obtained the embedding: "computed" for this request, "coalesced" with another request,
    or "cached"."""
    service_time_s: float
    """Seconds in the service, from the receipt of the request to the reply."""
    handle: str | None = None
    """Handle that the service signed, or None. It can replace the image in a request to an engine (see
    `formats.engine_seal`)."""
    data: memoryview = field(repr=False)
    """Bytes of the embedding, read-only."""
    in_store: bool = False
    """Whether the bytes were read from this host's store. If not, they were in the response."""

    @classmethod
    def from_response(
        cls,
        *,
        key: bytes,
        shape: tuple[int, ...],
        dtype: str,
        origin: str,
        service_time_s: float,
        data: bytes,
        handle: str | None = None,
    ) -> EmbeddingRef:
        """Create a reference to bytes from a response. Raises ValueError if the size of `data` does not match
        the shape."""
        _check_size(dtype, shape, len(data))
        return cls(
            key=key,
            shape=shape,
            dtype=dtype,
            origin=origin,
            service_time_s=service_time_s,
            handle=handle,
            data=memoryview(data),
        )

    def numpy(self) -> npt.NDArray[np.generic]:
        """Return the embedding as a read-only array. numpy has no bfloat16, so bfloat16 is converted to
        float32 without loss."""
        if self.dtype == "bfloat16":
            narrow = np.frombuffer(self.data, dtype="<u2").astype(np.uint32)
            return (narrow << 16).view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """Return the embedding as a CPU tensor. The tensor has its own copy of the bytes, because torch has
        no read-only tensors."""
        # Import torch only here, because this module must be importable without torch.
        torch = importlib.import_module("torch")

        flat = torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype))
        return flat.reshape(self.shape)

    def to_vllm_content_part(self, *, by_value: bool = False) -> dict[str, object]:
        """Return a content part for vLLM's OpenAI API that replaces the image. See `vllm_content_part`."""
        return vllm_content_part(self, by_value=by_value)


def from_store(
    store: Store,
    key: bytes,
    *,
    origin: str,
    service_time_s: float,
    handle: str | None = None,
    deadline_s: float = STORE_DEADLINE_S,
) -> EmbeddingRef | None:
    """Return a reference to a verified copy of a stored embedding. Return None if the store does not have it.

    The bytes are copied, because a lease expires or ends with the connection, and a list of references would
    pin the store's memory. The result is also None if the store does not respond or the entry is corrupt. The
    caller then requests the bytes from the service.
    """
    try:
        found = get_payload(store, key, deadline_s=deadline_s, recall_s=deadline_s)
        if found is None:
            return None
        header, data = found
        if header.kind != PayloadKind.EMBEDDING:
            return None
        _check_size(header.dtype, header.shape, len(data))
    except (CodecError, StoreError, ValueError):
        return None
    return EmbeddingRef(
        key=key,
        shape=header.shape,
        dtype=header.dtype,
        origin=origin,
        service_time_s=service_time_s,
        handle=handle,
        data=memoryview(data).toreadonly(),
        in_store=True,
    )


def _check_size(dtype: str, shape: tuple[int, ...], size: int) -> None:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unsupported dtype of an embedding: {dtype!r}")
    if any(n <= 0 for n in shape) or math.prod(shape) * ITEM_BYTES[dtype] != size:
        raise ValueError(f"{size} bytes do not fill {shape} of {dtype}")


def vllm_content_part(ref: EmbeddingRef, *, by_value: bool = False) -> dict[str, Any]:
    """Return a content part of a chat message for vLLM 0.32, in place of an `image_url` part.

    The part contains the handle unless `by_value` is set. A handle has three requirements. The engine must
    have the service's `store.secret_file` and store. The request's `cache_salt` must be the salt with which
    the image was encoded. The entry must still be in the store. Otherwise the request fails with status 400,
    because the engine has no pixels from which to compute the embedding.

    Raises EncoderRefused("no_handle") if the service returned no handle, and EncoderRefused("unsupported") if
    vLLM's model does not accept embeddings.
    """
    if ref.handle is None:
        raise EncoderRefused("the service returned no embedding handle", reason="no_handle")
    handle = EmbeddingHandle.parse(ref.handle)
    wants_grid = _VLLM_FAMILIES.get(handle.family)
    if wants_grid is None or handle.modality != "image":
        raise EncoderRefused(
            f"vLLM 0.32 does not accept embeddings for {handle.family} and {handle.modality}, only for "
            f"images of {', '.join(_VLLM_FAMILIES)}. Send the medium itself",
            reason="unsupported",
        )
    rows = _encode_npy(ref) if by_value else ref.handle
    if not wants_grid:
        return {"type": "image_embeds", "image_embeds": rows}
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": rows, "image_grid_thw": list(handle.grid)},
    }


def _encode_npy(ref: EmbeddingRef) -> str:
    """Return the embedding as .npy in base64. numpy has no bfloat16, so bfloat16 is converted to float32."""
    out = io.BytesIO()
    np.save(out, ref.numpy(), allow_pickle=False)
    return base64.b64encode(out.getvalue()).decode()
