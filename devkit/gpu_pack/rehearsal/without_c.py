"""vLLM's CPU platform without the CPU build's compiled operators, which the archive does not have.

A `vllm.general_plugins` entry point. Layers look their operators up by name when they are made, even if torch
computes in their place. The CUDA library has the names.
"""

from __future__ import annotations

from typing import Any

_defined: list[Any] = []


def register() -> None:
    """Patches vLLM's CPU platform, once a process."""
    if _defined:
        return
    import torch
    import vllm._C_stable_libtorch  # noqa: F401
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels = classmethod(lambda cls: None)
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    _defined.append(library)
