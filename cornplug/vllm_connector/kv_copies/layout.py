"""Layout of K and V, or of MLA latents, in vLLM's caches. It is determined by test writes, never assumed.

`kv_caches[layer]` has shape (blocks, heads, block_size, planes * dim), but the shape does not determine the
layout. The CPU backend stores transposed K before V, and the packing depends on the instruction set.
Therefore, at start, the backend's own cache-write operation writes patterns into a scratch block. Their
values identify token, head, dim and plane. Reading the values back gives the mapping. A mapping that is not a
permutation of the complete block is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.errors import LayoutError
from cornplug.kv_page import PLANES, PageGeometry

# Cache-write operation of an attention backend: (*planes, kv_cache, slot_mapping) -> None. The planes are key
# and value, or a latent, each of shape (tokens, heads, dim).
WriteOp = Callable[..., None]

_LABELS = 128
"""Number of different labels (test values) in one test. Labels stay below 2^8, because bfloat16 represents
integers exactly up to this limit."""
_FP8_LABELS = 8
"""Number of different labels in one test of an fp8 cache. Both fp8 formats represent integers exactly up to
this value."""
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class TokenSlots:
    """Positions of a request's tokens [start, end) in its blocks. `blocks` has all blocks of the request, in
    order, each with `block_size` slots."""

    def __init__(self, blocks: NDArray[np.int64], start: int, end: int, block_size: int) -> None:
        self._blocks, self._start, self._end, self._block_size = blocks, start, end, block_size

    @cached_property
    def runs(self) -> list[tuple[int, slice, slice]]:
        """Tuples (block, slots in the block, tokens counted from `start`), one for each block that contains
        some of the tokens."""
        found, size = [], self._block_size
        at = self._start
        while at < self._end:
            stop = min(self._end, (at // size + 1) * size)
            tokens = slice(at - self._start, stop - self._start)
            found.append((int(self._blocks[at // size]), slice(at % size, at % size + stop - at), tokens))
            at = stop
        return found


@dataclass(frozen=True)
class BlockPlane:
    """Element offsets of one plane (K, V or latents) inside one block, relative to the block's first element.

    `offsets` has shape (heads, block_size, dim). If the offsets are affine (`strides` of head, token and dim,
    starting at `base`), values are addressed by a strided view, otherwise by an index.
    """

    offsets: torch.Tensor
    base: int
    strides: tuple[int, int, int] | None

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Read this plane's values for n tokens, shape (n, heads, dim). `blocks` and `slots` have shape
        (n,)."""
        if self.strides is not None:
            return self._view(cache)[blocks, :, slots]
        return _flat_view(cache)[self._index(cache, blocks, slots)]

    def scatter(
        self, cache: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write this plane's values, of shape (n, heads, dim), for the n tokens at these blocks and slots."""
        if self.strides is not None:
            self._view(cache)[blocks, :, slots] = values
        else:
            _flat_view(cache)[self._index(cache, blocks, slots)] = values

    def _view(self, cache: torch.Tensor) -> torch.Tensor:
        assert self.strides is not None
        heads, tokens, dim = self.offsets.shape
        return cache.as_strided(
            (cache.shape[0], heads, tokens, dim),
            (cache.stride(0), *self.strides),
            cache.storage_offset() + self.base,
        )

    def _index(self, cache: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        within = self.offsets.to(cache.device)[:, slots].transpose(0, 1)
        return blocks[:, None, None] * cache.stride(0) + within


@dataclass(frozen=True)
class BlockLayout:
    """Mapping from one layer's cache blocks to its planes."""

    planes: tuple[BlockPlane, ...]
    """Planes of the layer: K and V, or only MLA's latents."""
    block_size: int


def _flat_view(cache: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of a cache's storage, from the cache's first element to the end of the
    storage."""
    size = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    return cache.as_strided((size,), (1,), cache.storage_offset())


def derive_layouts(
    caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    page: PageGeometry,
    heads: int,
    block_size: int,
    scales: Mapping[str, tuple[float, float]],
) -> list[BlockLayout]:
    """Return the layout of each of a rank's caches, in the order of `caches`. Raises LayoutError if a cache
    cannot be mapped.

    `heads` is the number of heads on this rank. `block_size` is the engine's block size. A block of the
    caches may be a part of an engine's block. `scales` maps layer names to `ValueFormat.scales`.
    """
    known: dict[tuple[Any, ...], BlockLayout] = {}
    found = []
    for name, cache in caches.items():
        if str(cache.dtype).removeprefix("torch.") != page.dtype:
            raise LayoutError(
                f"{name} has a cache of {cache.dtype}, but pages have {page.dtype}", reason="kv_dtype"
            )
        layer, scaled = layers[name], scales.get(name, (1.0, 1.0))
        if page.quantised:
            require_scales(name, layer, scaled)
        kind = (type(layer), type(layer.impl), cache.shape, cache.stride(), cache.dtype)
        if kind not in known:
            write = (latent_write_op if page.planes == 1 else write_op)(layer)
            slots = cache.shape[2] if cache.ndim == 4 else 0
            size = slots if slots and block_size % slots == 0 else block_size
            values = ValueFormat(page.quantised, scaled)
            known[kind] = derive_layout(cache, heads, size, page.dim, write, page.planes, values)
        found.append(known[kind])
    if len({layout.block_size for layout in found}) > 1:
        raise LayoutError("layers have different block sizes", reason="layout")
    return found


def write_op(layer: Any) -> WriteOp:
    """Return the cache-write operation of an attention layer. Raises LayoutError if its backend has no such
    operation."""
    update = _cache_update_op(layer)

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        update(layer, key, value, cache, slots)

    return write


def latent_write_op(layer: Any) -> WriteOp:
    """Return the cache-write operation of an MLA layer. Raises LayoutError if the layer's class is not
    supported or its backend has no such operation.

    Layer classes other than vLLM's own may pad a latent or store its parts differently.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    if type(layer) is not MLAAttention:
        raise LayoutError(
            f"cornplug does not support the KV layout of {type(layer).__name__}", reason="attention_kind"
        )
    update = _cache_update_op(layer)

    def write(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        compressed, rotary = latent.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
        # Same operation as `MLAAttention.update_kv_cache`, whose cache has no heads dimension.
        update(
            compressed.squeeze(1).contiguous(),
            rotary.contiguous(),
            cache.squeeze(1),
            slots,
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    return write


def _cache_update_op(layer: Any) -> Callable[..., None]:
    update: Callable[..., None] | None = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise LayoutError(
            f"{type(layer.impl).__name__} has no cache-write operation to verify the cache layout with",
            reason="layout",
        )
    return update


def require_scales(name: str, layer: Any, expected: tuple[float, float]) -> None:
    """Raise LayoutError unless a layer's scales for fp8 K and V equal `expected`. Page keys depend on the
    `expected` scales."""
    kept = [getattr(layer, f"_{plane}_scale{form}", None) for plane in "kv" for form in ("", "_float")]
    scales = [one.flatten().tolist() if isinstance(one, torch.Tensor) else [one] for one in kept]
    if scales != [[scale] for scale in expected for _ in range(2)]:
        raise LayoutError(
            f"{name} scales its fp8 values by {scales}, but the checkpoint has {expected}", reason="kv_dtype"
        )


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """Format of the values in a KV cache."""

    quantised: str = ""
    """Name of the quantised format of the values, or "" if they are not quantised (see
    `PageGeometry.quantised`)."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors by which the cache-write operation divides K and V."""


PLAIN_VALUES: Final = ValueFormat()


def derive_layout(
    cache: torch.Tensor,
    heads: int,
    block_size: int,
    dim: int,
    write: WriteOp,
    planes: int = PLANES,
    values: ValueFormat = PLAIN_VALUES,
) -> BlockLayout:
    """Determine the layout of `cache`, which has shape (blocks, heads, block_size, planes * dim) and any
    strides. `planes` is 1 or 2.

    Writes test patterns into a scratch tensor with the same strides, so `cache` is not modified. Raises
    LayoutError("layout") if the shape or the strides are not supported, or if `write` does not permute the
    values of a block.
    """
    if tuple(cache.shape[1:]) != (heads, block_size, planes * dim):
        raise LayoutError(
            f"the KV cache has shape {tuple(cache.shape)}, expected (blocks, {heads}, {block_size}, "
            f"{planes * dim})",
            reason="layout",
        )
    inner = sum((n - 1) * s for n, s in zip(cache.shape[1:], cache.stride()[1:], strict=True)) + 1
    if inner > cache.stride(0):
        raise LayoutError(
            f"a block of this cache is not contiguous (strides {cache.stride()}, as in vLLM's layout "
            "LHBNC); set VLLM_KV_CACHE_LAYOUT to another layout that this backend supports",
            reason="layout",
        )
    raw = torch.zeros(cache.stride(0) + inner, dtype=cache.dtype, device=cache.device)
    scratch = raw.as_strided((2, *cache.shape[1:]), cache.stride())

    token, head, channel = torch.meshgrid(
        torch.arange(block_size), torch.arange(heads), torch.arange(dim), indexing="ij"
    )
    slots = torch.arange(block_size, 2 * block_size, dtype=torch.int64, device=cache.device)
    # Write positive labels for K (or the latents) and negative labels for V, so that the sign identifies the
    # plane.
    signs = (1, -1)[:planes]
    quantised = values.quantised
    stored, digit = (_FP8[quantised], _FP8_LABELS) if quantised else (cache.dtype, _LABELS)
    given = torch.bfloat16 if quantised else cache.dtype
    # For fp8, write slightly more than the label, because vLLM's CPU operation truncates digits that fp8
    # cannot represent.
    factors = [scale * (65 / 64 if quantised else 1) for scale in values.scales]
    found = []
    for coordinate, size in ((token, block_size), (head, heads), (channel, dim)):
        position = torch.zeros(cache.shape[1:], dtype=torch.int64)
        scale = 1
        while scale < size or scale == 1:
            label = (coordinate // scale % digit + 1).float()
            written = (label * sign * factor for sign, factor in zip(signs, factors, strict=False))
            raw.zero_()
            write(*(one.to(given).to(cache.device).contiguous() for one in written), scratch, slots)
            read = scratch[1].view(stored).float().cpu().round().to(torch.int64)
            if int(torch.count_nonzero(raw)) > int(torch.count_nonzero(read)):
                raise LayoutError(
                    "the backend's cache-write operation writes outside its block", reason="layout"
                )
            position += torch.where(read != 0, (read.abs() - 1) * scale, 0)
            plane = read.sign()
            scale *= digit
        found.append((position.flatten(), plane.flatten()))
    (tokens, plane), (heads_at, plane_h), (channels, plane_c) = found
    if not (torch.equal(plane, plane_h) and torch.equal(plane, plane_c)):
        raise LayoutError(
            "the backend's cache-write operation wrote to different locations in two runs", reason="layout"
        )

    axes = (torch.arange(n) * s for n, s in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    addresses = sum(torch.meshgrid(*axes, indexing="ij"), torch.zeros((), dtype=torch.int64)).flatten()
    mapped = []
    for sign in signs:
        at = torch.nonzero(plane == sign).flatten()
        offsets = torch.full((heads, block_size, dim), -1, dtype=torch.int64)
        if at.numel() == heads * block_size * dim:
            offsets[heads_at[at], tokens[at], channels[at]] = addresses[at]
        if (offsets < 0).any():
            raise LayoutError(
                "the backend's cache-write operation does not permute the values of a block (they are "
                "packed, padded or quantised)",
                reason="layout",
            )
        mapped.append(_create_plane(offsets))
    return BlockLayout(tuple(mapped), block_size)


def single_row_layout(dim: int) -> BlockLayout:
    """Return the layout for blocks that are a single row of `dim` values, as in a cache of shape (blocks, 1,
    1, dim)."""
    return BlockLayout((_create_plane(torch.arange(dim)[None, None]),), 1)


def _create_plane(offsets: torch.Tensor) -> BlockPlane:
    base = int(offsets[0, 0, 0])
    strides = tuple(
        int(offsets.select(axis, 1)[0, 0]) - base if offsets.shape[axis] > 1 else 1 for axis in range(3)
    )
    heads, tokens, dim = (torch.arange(n) for n in offsets.shape)
    affine = base + heads[:, None, None] * strides[0] + tokens[:, None] * strides[1] + dim * strides[2]
    if torch.equal(affine, offsets) and min(strides) >= 0:
        return BlockPlane(offsets, base, (strides[0], strides[1], strides[2]))
    return BlockPlane(offsets, base, None)
