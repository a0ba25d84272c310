"""Beds: the runners, KV layouts and schedulers with which a test can start vLLM on a machine without a GPU.

On a CPU vLLM takes its model runner V1, the CPU's KV layout, a process a worker and synchronous scheduling;
on a GPU it takes V2, the attention backend's layout, one process and asynchronous scheduling. script/setup
lays packages of dev/ beside the environment, and a bed puts them on an engine's path:

| bed    | runner | KV layout          | executor          | scheduling   |
|--------|--------|--------------------|-------------------|--------------|
| v1     | V1     | CPU's              | several processes | synchronous  |
| v1-one | V1     | CPU's              | one process       | synchronous  |
| v2     | V2     | CPU's              | several processes | synchronous  |
| v2-gpu | V2     | Triton attention's | one process       | asynchronous |

All but v1 offer native KV offloading, which vLLM has for GPUs only.

script/test takes v1-one, on which an engine starts in three quarters of the time; v1 is what a user without a
GPU has.

Kernels run in Triton's interpreter (50 to 90 ms a step): no time is measured on V2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

VARIABLE: Final = "DEVKIT_VLLM_BED"
"""Names the bed of every vLLM that devkit starts; v1 where it is not set."""

_TREE: Final = Path(__file__).parents[1]
_PACKAGES: Final = _TREE / ".venv" / "vllm-beds"
_NEXT: Final = _TREE / ".venv-vllm-next" / "bin" / "vllm"
_V2: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for 9 s
}
_ONE: Final = "one-process-cpu"
_TRITON: Final = "triton-interpreted-cpu"
_GPU: Final = "gpu-like-cpu"
_OFFLOADING: Final = "host-offloading-cpu"

BEDS: Final[Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]]] = MappingProxyType(
    {
        "v1": ({}, ()),
        "v1-one": ({}, (_ONE, _OFFLOADING)),
        "v2": (_V2, (_TRITON, _OFFLOADING)),
        "v2-gpu": (_V2, (_TRITON, _ONE, _GPU, _OFFLOADING)),
    }
)
"""Bed -> variables of an engine on it, and packages of dev/ on its path."""

NIXL: Final = "nixl"
"""The package of NIXL, which a prefill and a decode server have on their path."""

REPLICAS_IN_STEP: Final = "replicas-in-step-cpu"
"""The package with what data-parallel replicas of a mixture of experts exchange; vLLM has none for a CPU."""


def bed_environment(name: str | None = None, *more: str | Path) -> dict[str, str]:
    """The environment that puts an engine on a bed; by default on the one that `VARIABLE` names.

    `more` are further packages for its path: names of those that script/setup laid there, or folders.

    Raises ValueError for an unknown bed, FileNotFoundError where script/setup did not lay its packages.
    """
    name = name or bed_of_this_run()
    if name not in BEDS:
        raise ValueError(f"{VARIABLE}={name}: there are {', '.join(BEDS)}")
    variables, packages = BEDS[name]
    path = [str(_laid(_PACKAGES / package)) for package in (*packages, *more)]
    if not path:
        return dict(variables)
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def bed_of_this_run() -> str:
    """The bed of engines that a test puts on no other."""
    return os.environ.get(VARIABLE, "v1")


def next_vllm() -> Path:
    """The command `vllm` of the next release, which script/setup lays over the environment.

    Raises FileNotFoundError where it did not.
    """
    return _laid(_NEXT)


def _laid(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing. Run: script/setup")
    return path
