"""The GPU's checksums: computed by Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from cornplug.vllm_connector.kv_copies.arena_copies import (
    BLOCK_BYTES,
    DeviceChecksums,
    chain_blocks,
    fold_checksums,
    sum_blocks,
)


def interpreted() -> DeviceChecksums:
    kernels = InterpretedFunction(sum_blocks), InterpretedFunction(chain_blocks)
    return DeviceChecksums(torch.device("cpu"), kernels)


@pytest.mark.parametrize("segment_bytes", [BLOCK_BYTES, 2 * BLOCK_BYTES, 17 * BLOCK_BYTES])
@pytest.mark.parametrize("segments", [1, 3])
def test_device_checksums_equal_xxhash(segment_bytes: int, segments: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, segments * segment_bytes, np.uint8)
    data[:32] = 255  # products and sums that wrap
    words = interpreted().begin(torch.from_numpy(data).view(torch.bfloat16), segment_bytes)
    expected = [xxhash.xxh3_64_intdigest(one) for one in data.reshape(segments, -1)]
    assert fold_checksums(words, segment_bytes).tolist() == expected


def test_device_checksums_see_each_byte() -> None:
    size = 2 * BLOCK_BYTES
    data = torch.zeros(size, dtype=torch.uint8)
    checksums = interpreted()
    seen = set()
    for at in [0, 7, 63, 64, 1023, 1024, size - 64, size - 1]:
        data.zero_()
        data[at] = 1
        seen.update(fold_checksums(checksums.begin(data, size), size).tolist())
    assert len(seen) == 8


@pytest.mark.parametrize("capability", [80, 90])
def test_device_checksums_kernels_compile_for_gpu(capability: int) -> None:
    """Triton compiles without a GPU; its interpreter takes operations that the compiler refuses."""
    target = GPUTarget("cuda", capability, 32)
    signature = dict.fromkeys(("data", "keys", "sums"), "*i64") | dict.fromkeys(("blocks", "total"), "i32")
    constants = {"ROWS": DeviceChecksums.ROWS}
    source = ASTSource(JITFunction(sum_blocks), signature | {"ROWS": "constexpr"}, constants)
    assert "cubin" in triton.compile(source, target=target).asm
    signature = {"sums": "*i64", "keys": "*i64", "state": "*i64", "blocks": "i32"}
    source = ASTSource(JITFunction(chain_blocks), signature)
    assert "cubin" in triton.compile(source, target=target, options={"num_warps": 1}).asm
