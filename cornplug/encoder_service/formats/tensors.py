"""Conversion of torch tensors to bytes, for the service, its towers and both engines' plugins."""

from __future__ import annotations

from typing import cast

import torch

from cornplug.encoder_service.formats.messages import WireTensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without the "torch." prefix."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, C-contiguous. If the tensor is not on the CPU or not contiguous, the bytes are
    copied."""
    host = tensor.detach().cpu().contiguous()
    return memoryview(host.view(-1).view(torch.uint8).numpy())


def view_as_wire(tensor: torch.Tensor) -> WireTensor:
    """Return a tensor as a message field that uses the tensor's memory, for a message that is sent before the
    tensor changes."""
    return WireTensor(dtype_name(tensor.dtype), tuple(tensor.shape), cast(bytes, raw_bytes(tensor)))


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """Return a tensor as a message field, with a copy of its bytes."""
    return WireTensor(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor).tobytes())
