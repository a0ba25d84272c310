"""The numeric class of this process: how torch's libraries compute, beyond what a model's dtype says.

It counts in the keys of embeddings, in an encoder service as in an engine: processes with equal values share,
others do not.
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
"""Variables of torch's libraries that make them compute in another precision."""
USUAL: Final = "any"
"""The class of a process without such a variable."""


def numeric_class() -> str:
    """The class of this process. Processes of one class are trusted to compute the same embeddings."""
    given = {name: os.environ[name] for name in PRECISION_VARIABLES if os.environ.get(name)}
    return f"{USUAL} {json.dumps(given, sort_keys=True)}" if given else USUAL
