"""Late misses: embeddings that the scheduler half promised, and that a worker cannot load.

    scheduler: item is leased, so the tower does not run ──> worker: the entry is corrupt or out of reach
        ──> all ranks agree which items are lost ──> the tower encodes these items in the same step

vLLM 0.32 and 0.33 have no recovery from a promised embedding that is missing. They raise an error in the
worker, which ends the engine. However, a worker still has the processed inputs of each scheduled item. The
wrappers in this module let the tower encode lost items before vLLM's own items. A tower may run collectives
over the tensor-parallel ranks, so all of these ranks run it for the same items. Items are encoded one at a
time, because the memory of the device suffices for the largest item but not for any number of items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch


def find_common(loaded: Sequence[bool]) -> list[bool]:
    """Return for each embedding whether all tensor-parallel ranks have loaded it. `loaded` is whether this
    rank has. All ranks of the group must make this call in the same step."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return list(loaded)
    mask = torch.tensor(loaded, dtype=torch.int32)
    torch.distributed.all_reduce(mask, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [bool(one) for one in mask.tolist()]


def _take_lost_inputs() -> list[tuple[str, int]]:
    """Return (request id, index of the media item) for each item that this step's workers could not load."""
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

    connector: Any = get_ec_transfer() if has_ec_transfer() else None
    # Another project's connector does not have this method.
    take = getattr(getattr(connector, "worker", None), "take_lost_inputs", list)
    lost: list[tuple[str, int]] = take()
    return lost


def _execute_in_first_runner(original: Callable[..., Any], runner: Any, output: Any) -> Any:
    for request_id, input_id in _take_lost_inputs():
        original(runner, replace(output, scheduled_encoder_inputs={request_id: [input_id]}))
    return original(runner, output)


def _execute_in_second_runner(original: Callable[..., Any], state: Any, scheduled: Any) -> Any:
    for request_id, input_id in _take_lost_inputs():
        original(state, {request_id: [input_id]})
    return original(state, scheduled)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._execute_mm_encoder", _execute_in_first_runner),
    (
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState.execute_mm_encoder",
        _execute_in_second_runner,
    ),
)
