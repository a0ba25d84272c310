"""Each family on a GPU against itself on the CPU. Needs torch with CUDA and transformers, no engine.

In float32 (no TF32) a value may differ by 1e-4 of the largest; in bfloat16 each row's cosine with the CPU's
float32 is over 0.98, the bound that `test_towers` sets on the CPU, and a batch of all media is as one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cornplug.encoder_service.execution.executor import InProcessExecutor

from ..tower_rig import CPU
from .test_cuda_branches import items_of, loaded, task
from .test_towers import Tiny, each_case, tiny

__all__ = ["tiny"]
pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@each_case
def test_towers_gpu_embeddings_equal_cpu(name: str, tiny: Tiny) -> None:
    path = tiny(name)
    here, there = loaded(path, "float32", CPU), loaded(path, "float32", GPU)
    items = items_of(name, path, here)
    wanted = InProcessExecutor(CPU).run(task(here, items))
    executor = InProcessExecutor(GPU)
    made = executor.run(task(there, items))
    # Features kept on the host go through the projector alone.
    kept = executor.run(task(there, items, [made.features[i] for i in range(len(items))]))
    for ours in (made, kept):
        for on_gpu, on_cpu in zip(ours.embeddings, wanted.embeddings, strict=True):
            assert on_gpu.device == CPU
            assert (on_gpu - on_cpu).abs().max() <= 1e-4 * max(1.0, float(on_cpu.abs().max()))


@each_case
def test_towers_gpu_half_precision_is_near_float32(name: str, tiny: Tiny) -> None:
    path = tiny(name)
    exact, half = loaded(path, "float32", CPU), loaded(path, "bfloat16", GPU)
    items = items_of(name, path, half)
    wanted = InProcessExecutor(CPU).run(task(exact, items_of(name, path, exact)))
    executor = InProcessExecutor(GPU)
    batched = executor.run(task(half, items)).embeddings
    for i, (ours, theirs) in enumerate(zip(batched, wanted.embeddings, strict=True)):
        assert torch.nn.functional.cosine_similarity(ours.float(), theirs, dim=-1).min() > 0.98
        alone = executor.run(task(half, items[i : i + 1])).embeddings[0]
        assert torch.nn.functional.cosine_similarity(ours.float(), alone.float(), dim=-1).min() > 0.99
