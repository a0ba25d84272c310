"""Numeric class of this process: settings other than the dtype that change the results of torch's libraries.

The numeric class is part of embedding keys, in engines and in the encoder service. Only processes of the same
class share embeddings.
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
"""Environment variables that change the precision in which torch's libraries compute."""
USUAL: Final = "any"
"""Numeric class of a process in which none of these variables is set."""


def numeric_class() -> str:
    """Return the numeric class of this process. Processes of the same class compute the same embeddings."""
    given = {name: os.environ[name] for name in PRECISION_VARIABLES if os.environ.get(name)}
    return f"{USUAL} {json.dumps(given, sort_keys=True)}" if given else USUAL
