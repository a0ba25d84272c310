"""Numeric class of this process: settings of torch's libraries that change results, apart from the dtype.

It is part of the keys of embeddings, in engines and in the encoder service. Only processes with equal values
share embeddings.
"""

from __future__ import annotations

import json
import os
from typing import Final

PRECISION_VARIABLES: Final = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables with which torch's libraries compute in another precision."""
USUAL: Final = "any"
"""Class of a process without such a variable."""


def numeric_class() -> str:
    """Return the class of this process. Processes of the same class compute the same embeddings."""
    given = {name: os.environ[name] for name in PRECISION_VARIABLES if os.environ.get(name)}
    return f"{USUAL} {json.dumps(given, sort_keys=True)}" if given else USUAL
