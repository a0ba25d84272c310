"""Layouts found by writing: vLLM's own CPU operation, GPU-like strides, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expected_errors import expect_error
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.mla import cpu_mla

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies
from cornplug.vllm_connector.kv_copies.layout import (
    BlockLayout,
    ValueFormat,
    WriteOp,
    derive_layout,
    latent_write_op,
    require_scales,
    write_op,
)

from ..rig import mla_layer

Tensor = torch.Tensor


def side_by_side(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Token-major, as FlashAttention: the last axis holds K, then V."""
    size, dim = cache.shape[2], key.shape[2]
    cache[slots // size, :, slots % size, :dim] = key
    cache[slots // size, :, slots % size, dim:] = value


def check(cache: Tensor, layout: BlockLayout, write: WriteOp, heads: int, size: int, dim: int) -> None:
    """gather reads what `write` wrote, scatter writes the very same cache, and nothing else."""
    generator = torch.Generator().manual_seed(7)
    blocks = torch.tensor([2, 0, 1, 2, 0])
    slots = torch.tensor([3, 0, size - 1, size - 2, 5])
    values = [torch.randn(5, heads, dim, generator=generator).to(cache.dtype) for _ in layout.planes]
    before = torch.randn(cache.shape, generator=generator).to(cache.dtype)
    cache.copy_(before)
    write(*values, cache, blocks * size + slots)
    theirs = cache.clone()
    for plane, written in zip(layout.planes, values, strict=True):
        assert torch.equal(plane.gather(cache, blocks, slots), written)
    cache.copy_(before)
    for plane, written in zip(layout.planes, values, strict=True):
        plane.scatter(cache, blocks, slots, written)
    assert torch.equal(cache, theirs)
    check_runs(cache, layout, heads, size, dim)


def check_runs(cache: Tensor, layout: BlockLayout, heads: int, size: int, dim: int) -> None:
    """Pages over several blocks come and go as the same tokens one by one, whichever way."""
    table, pages, page_tokens = np.array([2, 0, 1]), (0, 1), size + size // 2
    tokens = torch.arange(2 * page_tokens)
    at = torch.from_numpy(table)[tokens // size], tokens % size
    shape = heads, 1, len(layout.planes), page_tokens, dim
    for direct in (True, False) if layout.planes[0].strides is not None else (False,):
        copies = BlockCopies([cache], [layout], shape, direct=direct)
        host = torch.cat([copies.begin_copy_out([(table, page)], None).wait_host().clone() for page in pages])
        for i, plane in enumerate(layout.planes):
            found = host[:, :, 0, i].transpose(1, 2).flatten(0, 1)
            assert torch.equal(found, plane.gather(cache, *at))
        start, end = 3, 2 * page_tokens - 1
        before = cache.clone()
        for i, plane in enumerate(layout.planes):
            new = (host[:, :, 0, i] + 1).transpose(1, 2).flatten(0, 1)[start:end]
            plane.scatter(cache, at[0][start:end], at[1][start:end], new)
        theirs = cache.clone()
        cache.copy_(before)
        for page in pages:
            slab = copies.next_slab(1)
            slab.host.copy_(host[page : page + 1] + 1)
            copies.begin_copy_in(slab, table, page, 1, (start, end), None)
        copies.wait()
        assert torch.equal(cache, theirs)
        cache.copy_(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "dim"), [(2, 32, 32), (1, 64, 64), (3, 128, 128)])
def test_layout_of_vllm_cpu_operation_round_trips(
    dtype: torch.dtype, heads: int, size: int, dim: int
) -> None:
    isa = cpu_attn._get_attn_isa(dtype, size, dim)
    impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
    impl.attn_type = cpu_attn.AttentionType.DECODER
    impl.kv_cache_dtype = "auto"
    layer = SimpleNamespace(impl=impl, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    write = write_op(layer)
    cache = torch.zeros(3, heads, size, 2 * dim, dtype=dtype)
    layout = derive_layout(cache, heads, size, dim, write)
    keys, values = layout.planes
    if isa == "amx":
        assert keys.strides is None, "no strides describe tiles"
    else:
        assert keys.strides != values.strides, "the CPU keeps K transposed"
    check(cache, layout, write, heads, size, dim)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 on a CPU is for AVX-512")
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.0371, 2.9)])
@pytest.mark.parametrize(
    ("name", "quantised", "stored"),
    [("fp8", "fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", "fp8_e5m2", torch.float8_e5m2)],
)
def test_layout_of_fp8_in_bytes_is_that_of_vllm_cpu_operation(
    name: str, quantised: str, stored: torch.dtype, scales: tuple[float, float]
) -> None:
    heads, size, dim = 2, 32, 64
    impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = cpu_attn.AttentionType.DECODER, name
    isa = cpu_attn._get_attn_isa(torch.bfloat16, size, dim, name)
    kept = {"_k_scale_float": scales[0], "_v_scale_float": scales[1]}
    write = write_op(SimpleNamespace(impl=impl, isa=isa, **kept))
    cache = torch.zeros(3, heads, size, 2 * dim, dtype=torch.uint8)
    layout = derive_layout(cache, heads, size, dim, write, values=ValueFormat(quantised, scales))
    values = torch.randint(-8, 9, (2, size, heads, dim)).to(torch.bfloat16)
    slots = torch.arange(size, 2 * size)
    # Cut off, not rounded: a little more stays the same number.
    more = (plane * scale * (65 / 64) for plane, scale in zip(values, scales, strict=True))
    write(*more, cache, slots)
    for plane, expected in zip(layout.planes, values, strict=True):
        found = plane.gather(cache, slots // size, slots % size)
        assert torch.equal(found.view(stored).float(), expected.float())


@pytest.mark.parametrize(
    "scales", [{"_k_scale": torch.tensor(0.5)}, {"_v_scale": torch.ones(2)}, {"_k_scale_float": 2.0}]
)
def test_require_scales_other_than_the_checkpoints_are_refused(scales: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"_k_scale": torch.ones(()), "_v_scale": torch.ones(1)}
    plain |= {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    require_scales("layer", SimpleNamespace(**plain), (1.0, 1.0))
    for layer, expected in ((plain | scales, (1.0, 1.0)), (plain, (0.5, 1.0)), (plain, (1.0, 0.5))):
        with pytest.raises(LayoutError) as refused:
            require_scales("layer", SimpleNamespace(**layer), expected)
        assert refused.value.reason == "kv_dtype"


def test_require_scales_of_the_checkpoint_are_fine() -> None:
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _k_scale_float=0.5,
                            _v_scale=torch.tensor(2.0), _v_scale_float=2.0)  # fmt: skip
    require_scales("layer", layer, (0.5, 2.0))


@pytest.mark.parametrize("order", ["HND", "NHD", "cross-layer", "sliced storage"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layout_with_strides_round_trips(order: str, dtype: torch.dtype) -> None:
    heads, size, dim = 3, 16, 8
    if order == "HND":
        cache = torch.zeros(3, heads, size, 2 * dim, dtype=dtype)
    elif order == "NHD":
        cache = torch.zeros(3, size, heads, 2 * dim, dtype=dtype).transpose(1, 2)
    elif order == "cross-layer":
        # One allocation for four layers, block outermost: this is layer 2.
        cache = torch.zeros(3, 4, heads, size, 2 * dim, dtype=dtype)[:, 2]
    else:
        cache = torch.zeros(1000 + 3 * heads * size * 2 * dim, dtype=dtype)[1000:].view(
            3, heads, size, 2 * dim
        )
    layout = derive_layout(cache, heads, size, dim, side_by_side)
    assert all(plane.strides is not None for plane in layout.planes)
    check(cache, layout, side_by_side, heads, size, dim)


def test_layout_scatter_leaves_neighbour_layers() -> None:
    whole = torch.full((3, 4, 2, 16, 16), 5.0)
    cache = whole[:, 2]
    layout = derive_layout(cache, 2, 16, 8, side_by_side)
    assert (whole == 5).all(), "deriving works on a copy"
    for plane in layout.planes:
        plane.scatter(cache, torch.tensor([1]), torch.tensor([4]), torch.ones(1, 2, 8))
    assert (whole[:, [0, 1, 3]] == 5).all()
    assert int((whole == 1).sum()) == 2 * 2 * 8


def test_layout_without_strides_uses_index() -> None:
    heads, size, dim = 2, 16, 8
    places = torch.randperm(heads * size * 2 * dim, generator=torch.Generator().manual_seed(3))

    def shuffled(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        at = places.view(heads, size, 2 * dim)
        flat = cache.view(cache.shape[0], -1)
        for i, slot in enumerate(slots.tolist()):
            for plane, source in enumerate((key, value)):
                where = at[:, slot % size, plane * dim : (plane + 1) * dim]
                flat[slot // size, where] = source[i]

    cache = torch.zeros(3, heads, size, 2 * dim)
    layout = derive_layout(cache, heads, size, dim, shuffled)
    assert all(plane.strides is None for plane in layout.planes)
    check(cache, layout, shuffled, heads, size, dim)


def test_layout_of_256_bfloat16_slots_round_trips() -> None:
    """256 tokens and 256 channels: a label of 256 would not survive bfloat16 by itself."""
    cache = torch.zeros(3, 1, 256, 512, dtype=torch.bfloat16)
    layout = derive_layout(cache, 1, 256, 256, side_by_side)
    check(cache, layout, side_by_side, 1, 256, 256)


def test_layout_of_one_head_and_channel_round_trips() -> None:
    cache = torch.zeros(3, 1, 16, 2)
    check(cache, derive_layout(cache, 1, 16, 1, side_by_side), side_by_side, 1, 16, 1)


# -- latents ----------------------------------------------------------------------------------

RANK, ROTARY = 24, 8


class LatentBackend:
    """As CUDA's `concat_and_cache_mla`, which takes caches of any strides of block and token."""

    def __init__(self, loses: int = 0) -> None:
        self._loses = loses

    def do_kv_cache_update(
        self, compressed: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor, dtype: str, scale: Tensor
    ) -> None:
        size = cache.shape[1]
        rotary = rotary.squeeze(1)[:, : ROTARY - self._loses]
        cache[slots // size, slots % size, :RANK] = compressed
        cache[slots // size, slots % size, RANK : RANK + rotary.shape[1]] = rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64])
def test_layout_of_vllm_cpu_latents_round_trips(dtype: torch.dtype, size: int) -> None:
    write = latent_write_op(mla_layer(object.__new__(cpu_mla.CPUMLAImpl), RANK, ROTARY))
    cache = torch.zeros(3, 1, size, RANK + ROTARY, dtype=dtype)
    layout = derive_layout(cache, 1, size, RANK + ROTARY, write, 1)
    check(cache, layout, write, 1, size, RANK + ROTARY)


@pytest.mark.parametrize("order", ["by layer", "by block", "padded rows"])
def test_layout_of_latents_with_strides_round_trips(order: str) -> None:
    size, dim = 16, RANK + ROTARY
    if order == "by layer":
        cache = torch.zeros(4, 3, 1, size, dim)[2]
    elif order == "by block":
        cache = torch.zeros(3, 4, 1, size, dim)[:, 2]
    else:
        cache = torch.zeros(3, 1, size, dim + 4)[..., :dim]
    write = latent_write_op(mla_layer(LatentBackend(), RANK, ROTARY))
    layout = derive_layout(cache, 1, size, dim, write, 1)
    assert layout.planes[0].strides is not None
    check(cache, layout, write, 1, size, dim)


def test_layout_of_576_wide_latents_round_trips() -> None:
    """DeepSeek's width: 512 + 64, in bfloat16, which holds integers up to 256."""

    def write(latent: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache.view(-1, 576)[slots] = latent.squeeze(1)

    cache = torch.zeros(3, 1, 64, 576, dtype=torch.bfloat16)
    check(cache, derive_layout(cache, 1, 64, 576, write, 1), write, 1, 64, 576)


def test_derive_latents_without_permutation_are_refused() -> None:
    write = latent_write_op(mla_layer(LatentBackend(loses=1), RANK, ROTARY))
    with expect_error(LayoutError, reason="layout", match="does not permute"):
        derive_layout(torch.zeros(3, 1, 16, RANK + ROTARY), 1, 16, RANK + ROTARY, write, 1)


def test_derive_latents_in_cache_of_two_planes_are_refused() -> None:
    write = latent_write_op(mla_layer(LatentBackend(), RANK, ROTARY))
    with expect_error(LayoutError, reason="layout", match="shape"):
        derive_layout(torch.zeros(3, 1, 16, 2 * (RANK + ROTARY)), 1, 16, RANK + ROTARY, write, 1)


# -- refusals ---------------------------------------------------------------------------------


def drops_a_channel(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side(key, value, cache, slots)
    cache[..., 3] = 0


def writes_twice(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side(key, value, cache, slots)
    cache[0] = cache[1]


def rounds(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side((key / 4).round() * 4, (value / 4).round() * 4, cache, slots)


def scales(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side(key * 0.5, value * 0.5, cache, slots)


def quantises(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side(key.to(torch.float8_e4m3fn).float(), value.to(torch.float8_e4m3fn).float(), cache, slots)


def keeps_no_values(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side(key, key, cache, slots)


def into_the_wrong_block(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    side_by_side(key, value, cache, slots - cache.shape[2])


class ChangesItsMind:
    """Another place at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        self.calls += 1
        size = cache.shape[2]
        side_by_side(key, value, cache, size + (slots + self.calls) % size)
        if self.calls > 1:
            cache[1, 0, 0, 0] = 0


@pytest.mark.parametrize(
    "write",
    [
        drops_a_channel, writes_twice, rounds, scales, quantises, keeps_no_values, into_the_wrong_block,
        ChangesItsMind(),
    ],
)  # fmt: skip
def test_derive_write_without_permutation_is_refused(write: WriteOp) -> None:
    with pytest.raises(LayoutError) as error:
        derive_layout(torch.zeros(3, 2, 32, 32), 2, 32, 16, write)
    assert error.value.reason == "layout"


def test_layout_padding_between_tokens_is_untouched() -> None:
    """A view into a padded allocation is a permutation of the block's own elements."""
    whole = torch.full((3, 2, 16, 24), 9.0)
    cache = whole[..., :16]
    layout = derive_layout(cache, 2, 16, 8, side_by_side)
    check(cache, layout, side_by_side, 2, 16, 8)
    assert (whole[..., 16:] == 9).all()


@pytest.mark.parametrize("shape", [(3, 2, 16, 17), (3, 3, 16, 16), (3, 2, 32, 16), (2, 3, 2, 16, 8), (3, 16)])
def test_derive_other_shape_is_refused(shape: tuple[int, ...]) -> None:
    with expect_error(LayoutError, reason="layout", match="shape"):
        derive_layout(torch.zeros(shape), 2, 16, 8, side_by_side)


def test_write_op_layer_without_operation_is_refused() -> None:
    layer: Any = SimpleNamespace(impl=object())
    with expect_error(LayoutError, reason="layout", match="no cache-write operation"):
        write_op(layer)
    with expect_error(LayoutError, reason="layout", match="no cache-write operation"):
        latent_write_op(mla_layer(object(), RANK, ROTARY))


def test_latent_write_op_of_another_layer_is_refused() -> None:
    """Models that bring a class of their own pad latents, or split them otherwise."""
    with expect_error(LayoutError, reason="attention_kind", match="SimpleNamespace"):
        latent_write_op(SimpleNamespace(impl=LatentBackend()))
