"""Pages of KV as engines hold them in host memory. Imported only where an engine, and so torch, is."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def rows(page: torch.Tensor) -> NDArray[np.uint8]:
    """A page in host memory, shape (heads, bytes of a head), writable, without a copy."""
    array: NDArray[np.uint8] = page.view(torch.uint8).numpy()
    return array.reshape(len(page), -1)
