"""torch.cuda that claims one H200, so that SGLang takes its CUDA path. No tensor can be put there."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from devkit.gpu_pack.rehearsal.hooks import activate_triton, install

_GIB = 1 << 30
_H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=140 * _GIB,
    multi_processor_count=132,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    max_threads_per_multi_processor=2048,
    L2_cache_size=60 << 20,
)
_ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": _H200.name,
    "get_device_capability": (9, 0),
    "get_device_properties": _H200,
    "mem_get_info": (139 * _GIB, 140 * _GIB),
    "_is_compiled": True,
}


def _one_h200(cuda: ModuleType) -> None:
    for name, answer in _ANSWERS.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)


install({"torch.cuda": _one_h200, "triton.backends.nvidia.driver": activate_triton})
