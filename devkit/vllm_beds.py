"""Beds: the runners, KV layouts and schedulers with which a test can start vLLM on a machine without a GPU.

On a CPU vLLM takes its model runner V1, the CPU's KV layout, a process a worker and synchronous scheduling;
on a GPU it takes V2, the attention backend's layout, one process and asynchronous scheduling. script/setup
lays two packages of dev/ beside the environment, and a bed puts them on an engine's path:

| bed    | runner | KV layout              | executor        | scheduling   |
|--------|--------|------------------------|-----------------|--------------|
| v1     | V1     | CPU's                  | several processes | synchronous  |
| v2     | V2     | CPU's                  | several processes | synchronous  |
| v2-gpu | V2     | Triton attention's     | one process     | asynchronous |

Kernels run in Triton's interpreter (50 to 90 ms a step): no time is measured on V2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

VARIABLE: Final = "DEVKIT_VLLM_BED"
"""Names the bed of every vLLM that devkit starts; v1 where it is not set."""

_PACKAGES: Final = Path(sys.prefix) / "vllm-beds"
_V2: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for 9 s
}


def _path(*packages: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(str(_PACKAGES / name) for name in packages)}


BEDS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        "v2": _V2 | _path("triton-interpreted-cpu"),
        "v2-gpu": _V2 | _path("triton-interpreted-cpu", "gpu-like-cpu"),
    }
)
"""Bed -> the environment of an engine on it."""


def bed_environment(name: str | None = None) -> dict[str, str]:
    """The environment that puts an engine on a bed; by default on the one that `VARIABLE` names.

    Raises ValueError for an unknown bed, FileNotFoundError where script/setup did not lay its packages.
    """
    name = name or os.environ.get(VARIABLE, "v1")
    if name not in BEDS:
        raise ValueError(f"{VARIABLE}={name}: there are {', '.join(BEDS)}")
    env = dict(BEDS[name])
    for folder in env.get("PYTHONPATH", "").split(os.pathsep):
        if folder and not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is missing. Run: script/setup")
    if "PYTHONPATH" in env and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    return env
