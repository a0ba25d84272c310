"""Inputs of an engine's request in shared memory, for the unix socket.

    engine ──frame of the request, descriptor──> service
               └──────────── memory: the bytes of its large inputs, each at a multiple of 64 bytes

The event loops of engine and service then handle only a few hundred bytes per request. The service seals and
maps the memory without a copy. This module does not need torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import msgspec

from cornplug.encoder_service.formats.messages import (
    MAX_SHARED_BYTES,
    EncodeRequest,
    SharedInput,
    WireTensor,
)
from cornplug.encoder_service.formats.sealed_memory import create_memfd, seal_and_map
from cornplug.errors import ProtocolError

_MIN_SHARED_BYTES: Final = 4096
"""Minimum bytes of an input for which a request uses shared memory. Smaller inputs are in the frame."""
_ALIGN_BYTES: Final = 64


class SharedMemory(NamedTuple):
    """Memory with the inputs of one request."""

    fd: int
    size_bytes: int


def share_inputs(request: EncodeRequest) -> tuple[EncodeRequest, SharedMemory | None]:
    """Move a request's large inputs to shared memory. Return (request, memory to send with its frame). The
    memory is None if all inputs are small.

    Raises ValueError if the inputs are too large, and OSError if there is no memory for them.
    """
    large = {name: tensor for name, tensor in request.inputs.items() if len(tensor.data) >= _MIN_SHARED_BYTES}
    if not large:
        return request, None
    shared, end = {}, 0
    for name, tensor in large.items():
        size = len(tensor.data)
        shared[name] = SharedInput(tensor.dtype, tensor.shape, end, size)
        end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    if end > MAX_SHARED_BYTES:
        raise ValueError(f"{end} bytes, the limit is {MAX_SHARED_BYTES}")
    memory = SharedMemory(create_memfd(_padded(list(large.values()))), end)
    small = {name: tensor for name, tensor in request.inputs.items() if name not in large}
    return msgspec.structs.replace(request, inputs=small, shared=shared), memory


def map_inputs(request: EncodeRequest, fd: int) -> EncodeRequest:
    """Return a request whose `inputs` contain its inputs in shared memory, without a copy. Closes the
    descriptor.

    Raises ProtocolError if the memory does not match the request.
    """
    ends = [place.offset + place.size_bytes for place in request.shared.values()]
    if min(place.offset for place in request.shared.values()) < 0 or max(ends) > MAX_SHARED_BYTES:
        os.close(fd)
        raise ProtocolError("an input is outside the memory that was sent with its request")
    try:
        memory = memoryview(seal_and_map(fd, -(-max(ends) // _ALIGN_BYTES) * _ALIGN_BYTES))
    except (OSError, ValueError) as e:
        raise ProtocolError(f"the memory that was sent with a request cannot be used: {e}") from e
    inputs = dict(request.inputs)
    for name, place in request.shared.items():
        data = memory[place.offset : place.offset + place.size_bytes]
        inputs[name] = WireTensor(place.dtype, place.shape, cast(bytes, data))
    return msgspec.structs.replace(request, inputs=inputs, shared={})


def _padded(tensors: list[WireTensor]) -> Iterator[bytes | memoryview]:
    for tensor in tensors:
        yield tensor.data
        yield bytes(-len(tensor.data) % _ALIGN_BYTES)
