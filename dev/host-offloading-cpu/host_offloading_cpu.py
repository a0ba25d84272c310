"""vLLM's native KV offloading (`--kv-offloading-size`) without a GPU.

A `vllm.general_plugins` entry point for tests and benchmarks. vLLM 0.32 and 0.33 copy offloaded blocks on
GPUs only (`CPUOffloadingSpec.get_worker` refuses a CPU). Here torch makes the copies, at once; connector,
scheduler half, manager and metrics are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_registered = False


def register() -> None:
    """Patches vLLM's specification of offloading to main memory, once a process."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    CPUOffloadingSpec.get_worker = _with_host_worker(CPUOffloadingSpec.get_worker)


def _with_host_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's choice of a worker, which then has one for engines whose KV is in main memory."""

    def get_worker(spec: Any, kv_caches: Any) -> Any:
        if kv_caches.tensors[0].tensor.device.type != "cpu":
            return original(spec, kv_caches)
        if spec.blocks_per_chunk != 1:
            raise ValueError("blocks_per_chunk: on a CPU whole blocks are copied only")
        if not spec._worker:
            spec._worker = _host_worker(kv_caches, spec.num_chunks)
        return spec._worker

    return get_worker


def _host_worker(kv_caches: Any, chunks: int) -> Any:
    """A worker that copies blocks when it is asked to."""
    import torch
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

    cache = [one.tensor for one in kv_caches.tensors]
    kept = [torch.empty(chunks, tensor.shape[1], dtype=torch.int8) for tensor in cache]
    tensors_of_group = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]

    class HostWorker(OffloadingWorker):
        def __init__(self) -> None:
            self.done: list[TransferResult] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, src_spec.group_sizes, (cache, src_spec), (kept, dst_spec))

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, dst_spec.group_sizes, (kept, src_spec), (cache, dst_spec))

        def get_finished(self) -> list[TransferResult]:
            done, self.done = self.done, []
            return done

        def wait(self, job_ids: set[int]) -> None:
            """Nothing is ever under way."""

        def _copy(self, job_id: int, sizes: Sequence[int], source: Any, target: Any) -> bool:
            (read, read_spec), (written, written_spec) = source, target
            at = copied = 0
            for size, tensors in zip(sizes, tensors_of_group, strict=True):
                rows = torch.from_numpy(read_spec.block_ids[at : at + size]).long()
                places = torch.from_numpy(written_spec.block_ids[at : at + size]).long()
                for i in tensors:
                    written[i][places] = read[i][rows]
                    copied += size * read[i].shape[1]
                at += size
            self.done.append(TransferResult(job_id, True, copied, 1e-6))
            return True

    return HostWorker()
