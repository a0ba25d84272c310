"""What data-parallel replicas of a mixture of experts exchange in each step, for vLLM's CPU platform.

A `vllm.general_plugins` entry point for tests. vLLM's CPU communicator gathers only tensors of equal
length, so the first step of such replicas fails. These versions are simple and slow.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Adds the two operations to vLLM's CPU communicator."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The ranks' tensors, one after another; of a list of tensors, each by itself.

    Args:
        input_: (rows, ...) of this rank, or a list of such.
        dim: 0.
        sizes: Rows of each rank; None: as many as this one's.
    """
    import torch

    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    rows = sizes or [input_.shape[0]] * self.world_size
    parts = [input_.new_zeros((max(rows), *input_.shape[1:])) for _ in rows]
    mine = torch.zeros_like(parts[0])
    mine[: input_.shape[0]] = input_
    torch.distributed.all_gather(parts, mine, group=self.device_group)
    return torch.cat([part[:number] for part, number in zip(parts, rows, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum of all ranks' tensors.

    Args:
        input_: (rows of all ranks, ...).
        dim: 0.
        sizes: Rows of each rank; None: equal numbers.
    """
    import torch

    assert dim == 0
    rows = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    first = sum(rows[: self.rank_in_group])
    return total[first : first + rows[self.rank_in_group]].contiguous()
