"""An engine's tensors as bytes. Imported only where an engine, and so torch, is."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.encoder_service.protocol import Tensor
from cornplug.engine_side.model import dtype_name


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, C-contiguous, from whatever device; a copy only where it is not so already."""
    host = tensor.detach().cpu().contiguous()
    return memoryview(host.view(-1).view(torch.uint8).numpy())


def to_wire(tensor: torch.Tensor) -> Tensor:
    """A tensor as the encoder service takes it."""
    return Tensor(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor).tobytes())


def rows(page: torch.Tensor) -> NDArray[np.uint8]:
    """A page in host memory, shape (heads, bytes of a head), writable, without a copy."""
    array: NDArray[np.uint8] = page.view(torch.uint8).numpy()
    return array.reshape(len(page), -1)
