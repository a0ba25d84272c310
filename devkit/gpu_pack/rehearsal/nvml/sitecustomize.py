"""NVML that names one H200, so that vLLM chooses its CUDA platform where there is no GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from devkit.gpu_pack.rehearsal.hooks import activate_triton, install

_ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlDeviceGetHandleByUUID": 0,
    "nvmlDeviceGetIndex": 0,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150 << 30, free=149 << 30, used=1 << 30),
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"0", device=0, pciDeviceId=0),
    "nvmlDeviceGetNumaNodeId": 0,
    "nvmlDeviceGetP2PStatus": 0,
    "nvmlDeviceGetCpuAffinity": [3],
}


def _one_h200(nvml: ModuleType) -> None:
    for name, answer in _ANSWERS.items():
        setattr(nvml, name, lambda *_, answer=answer: answer)


install({"vllm.third_party.pynvml": _one_h200, "triton.backends.nvidia.driver": activate_triton})
