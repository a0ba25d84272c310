"""Attention backends for models with latent attention (MLA), by GPU generation.

The backends are the engines' own preferences, in `vllm/platforms/cuda.py` (0.32) and
`sglang/srt/arg_groups/overrides.py` (0.5.23). For all other models, the engine chooses the backend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from cornplug.planner.plan import ReplicaGroup

Generation = Literal["ampere", "ada", "hopper", "blackwell", "cpu"]

_GENERATIONS: Final[tuple[tuple[str, Generation], ...]] = (
    (r"\bG?B[123]0\d", "blackwell"),
    (r"\bG?H(20|100|200|800)", "hopper"),
    (r"\bL(4|20|40)", "ada"),
    (r"\bA(10|30|40|100|800)", "ampere"),
    (r"^cpu", "cpu"),
)
_MLA: Final[dict[Generation, dict[str, str]]] = {
    "hopper": {"vllm": "FLASHMLA", "sglang": "flashmla"},
    "blackwell": {"vllm": "FLASHINFER_MLA", "sglang": "trtllm_mla"},
    "ada": {"vllm": "TRITON_MLA", "sglang": "triton"},
    "ampere": {"vllm": "TRITON_MLA", "sglang": "triton"},
}


def generation_of(gpu: str) -> Generation | None:
    """Return the generation of a GPU type ("H100", "NVIDIA-L40S", "A100-80"), or None if it is not known."""
    for pattern, generation in _GENERATIONS:
        if re.search(pattern, gpu, re.IGNORECASE):
            return generation
    return None


def backend_of(group: ReplicaGroup, pair_gpus: Iterable[str] = ()) -> str | None:
    """Return the name of the attention backend for a group's engine, or None if the engine chooses it.

    `pair_gpus` are the device types with which the group exchanges KV. NIXL's handshake in vLLM rejects
    different backends, so a prefill-decode pair on two GPU generations gets a backend that runs on both.
    """
    if group.settings is not None and group.settings.attention_backend is not None:
        return group.settings.attention_backend
    mla = group.kv is not None and group.kv.mla
    generations = {generation_of(gpu) for gpu in {group.gpu, *pair_gpus}}
    if group.engine == "vllm" and len(generations) > 1:
        if mla:
            return "TRITON_MLA"
        return "FLASH_ATTN" if "blackwell" in generations else None
    generation = generation_of(group.gpu)
    return _MLA.get(generation, {}).get(group.engine) if mla and generation else None
