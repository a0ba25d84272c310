"""torch's tensors as bytes, for the service, its towers and both engines' plugins."""

from __future__ import annotations

import torch

from cornplug.encoder_service.wire.messages import WireTensor


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, C-contiguous; a copy if it is on another device or not contiguous."""
    host = tensor.detach().cpu().contiguous()
    return memoryview(host.view(-1).view(torch.uint8).numpy())


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """A tensor as a message field."""
    return WireTensor(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor).tobytes())
