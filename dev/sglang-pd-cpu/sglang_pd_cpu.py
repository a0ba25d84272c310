"""SGLang 0.5.23's prefill/decode disaggregation over NIXL on a machine without a GPU, for tests only.

SGLang tells NIXL that its KV pools lie in a GPU's memory ("VRAM"). On a CPU they lie in host memory, which
NIXL moves as well if it is told so ("DRAM"). One more thing of its way is a GPU's: the event that a forward
has ended, as a forward on a CPU has when it returns. Everything else is SGLang's and NIXL's own: handshake,
metadata, transfers. Does nothing where CUDA is available, and in servers of no PD pair.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_MANAGER = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"


def register() -> None:
    """SGLang's plugin entry point: runs in each of its processes, before anything is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    # A hook imports what it is on, and few servers are of a pair. Children inherit the arguments.
    is_of_pair = any(arg.startswith("--disaggregation-mode") for arg in sys.argv)
    if torch.cuda.is_available() or not is_cpu() or not is_of_pair:
        return
    HookRegistry.register(f"{_MANAGER}.__init__", _in_host_memory, HookType.BEFORE)


def _in_host_memory(*_args: Any, **_kwargs: Any) -> None:
    from nixl._api import nixl_agent

    made = nixl_agent.__init__

    def make(agent: Any, *args: Any, **kwargs: Any) -> None:
        made(agent, *args, **kwargs)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    nixl_agent.__init__ = make
    torch.cuda.Event = torch.cpu.Event
