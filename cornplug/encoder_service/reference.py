"""What a client holds of an embedding: its name, and its bytes where they lie."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cornplug.codec import Kind, decode_header, verify
from cornplug.encoder_service import request_parts
from cornplug.errors import CodecError, StoreError, StoreUnavailable
from cornplug.store.base import Store

if TYPE_CHECKING:
    import torch

LEASE_S: Final = 300.0
"""How long a reference may read from the store without a copy."""
STORE_DEADLINE_S: Final = 0.25
_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class EmbeddingRef:
    """One embedding, shape (rows, hidden_size), read-only.

    Read from the store it costs no copy, and is there for `LEASE_S` seconds or until
    `close` or the garbage collector ends its lease. Copy what you keep longer.
    """

    key: bytes
    shape: tuple[int, ...]
    dtype: str
    """torch's name without "torch."."""
    tower: str
    """Who ran the tower: "ran" (this request), "joined" (another's) or "reused" (nobody)."""
    seconds: float
    """The service's time from receipt to answer."""
    voucher: str | None = None
    """Signed by the service: which model made this of which medium, see `encoder_service.voucher`."""
    _data: memoryview = field(repr=False)
    _expires: float = field(repr=False, default=math.inf)
    _end_lease: list[weakref.finalize[..., EmbeddingRef]] = field(repr=False, default_factory=list)

    @classmethod
    def inline(
        cls,
        *,
        key: bytes,
        shape: tuple[int, ...],
        dtype: str,
        tower: str,
        seconds: float,
        data: bytes,
        voucher: str | None = None,
    ) -> EmbeddingRef:
        """A reference to bytes that came with the answer. ValueError when they do not fill the shape."""
        _check_size(dtype, shape, len(data))
        return cls(
            key=key,
            shape=shape,
            dtype=dtype,
            tower=tower,
            seconds=seconds,
            voucher=voucher,
            _data=memoryview(data),
        )

    @property
    def in_store(self) -> bool:
        """Whether the bytes are the store's own, not a copy."""
        return self._expires != math.inf

    @property
    def data(self) -> memoryview:
        """The bytes, read-only. Raises StoreError("lease_expired") when they are no longer ours."""
        if time.monotonic() >= self._expires:
            raise StoreError(
                f"held for over {LEASE_S:g} s; encode again, or copy what you keep", reason="lease_expired"
            )
        if any(not end.alive for end in self._end_lease):
            raise StoreError("this reference was closed", reason="lease_expired")
        return self._data

    def numpy(self) -> npt.NDArray[np.generic]:
        """An array over the bytes, without a copy. numpy has no bfloat16: that is widened to
        float32, exactly, in a copy. Raises as `data`."""
        if self.dtype == "bfloat16":
            narrow = np.frombuffer(self.data, dtype="<u2").astype(np.uint32)
            return (narrow << 16).view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """A tensor over the bytes, without a copy: do not write to it. Raises as `data`."""
        # Not an import statement: this module must load where there is no torch.
        torch = importlib.import_module("torch")

        with warnings.catch_warnings():
            # torch knows no read-only tensors, and says so each time.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self.data, dtype=getattr(torch, self.dtype))
        return flat.reshape(self.shape)

    def as_vllm_part(self, *, by_value: bool = False) -> dict[str, object]:
        """A content part for vLLM's OpenAI API, in the picture's place. See `request_parts.vllm_part`."""
        return request_parts.vllm_part(self, by_value=by_value)

    def close(self) -> None:
        """End the lease now. Arrays and tensors made before must not be read any more."""
        for end in self._end_lease:
            end()


def leased(
    store: Store,
    key: bytes,
    *,
    tower: str,
    seconds: float,
    voucher: str | None = None,
    lease_s: float = LEASE_S,
    deadline_s: float = STORE_DEADLINE_S,
) -> EmbeddingRef | None:
    """A reference to the store's own bytes, verified once; None where they are not (any more).

    A store that does not answer, or an entry that is damaged, gives None too: the caller
    asks the service for the bytes.
    """
    started = time.monotonic()
    try:
        lease = store.lease([key], ttl_s=lease_s, deadline_s=deadline_s)[0]
        if lease is None:
            return None
    except StoreError:
        return None
    try:
        header = decode_header(lease.meta, key=key)
        data = store.view(lease.location)
        if header.kind != Kind.EMBEDDING:
            raise CodecError(f"entry is a {header.kind.name}", reason="wrong_kind")
        verify(header, data)
        _check_size(header.dtype, header.shape, data.nbytes)
    except (CodecError, StoreUnavailable, ValueError) as e:
        with contextlib.suppress(StoreError):
            if not isinstance(e, StoreUnavailable):
                store.delete([key], deadline_s=deadline_s)
            store.release([lease.token], deadline_s=deadline_s)
        return None
    ref = EmbeddingRef(
        key=key,
        shape=header.shape,
        dtype=header.dtype,
        tower=tower,
        seconds=seconds,
        voucher=voucher,
        _data=data.toreadonly(),
        _expires=started + lease_s,
    )
    ref._end_lease.append(weakref.finalize(ref, _release, store, lease.token, deadline_s))
    return ref


def _release(store: Store, token: int, deadline_s: float) -> None:
    # A store that is gone has ended the lease by itself.
    with contextlib.suppress(StoreError):
        store.release([token], deadline_s=deadline_s)


def _check_size(dtype: str, shape: tuple[int, ...], size: int) -> None:
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"no embedding has dtype {dtype!r}")
    if any(n <= 0 for n in shape) or math.prod(shape) * _ITEM_BYTES[dtype] != size:
        raise ValueError(f"{size} bytes do not fill {shape} of {dtype}")
