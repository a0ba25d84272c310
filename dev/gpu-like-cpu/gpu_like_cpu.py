"""vLLM's CPU platform with a GPU's attention backend, KV layout and asynchronous scheduling.

A `vllm.general_plugins` entry point for tests of connectors. It needs TRITON_INTERPRET=1 and the Triton
backend of triton-interpreted-cpu. TRITON_ATTN's kernel that writes the cache runs in Triton's interpreter.
Attention reads the same cache with torch: the interpreted kernel is right, too, but takes 0.5 s a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_registered = False


def register() -> None:
    """Patches vLLM's CPU platform, once a process."""
    global _registered
    if _registered:
        return
    _registered = True
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plain = CpuPlatform.get_attn_backend_cls

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_mla:  # TRITON_ATTN keeps K and V, and Triton's MLA needs a GPU
            return plain(selected_backend, attn_selector_config, num_heads)
        return AttentionBackendEnum.TRITON_ATTN.get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.check_and_update_config = classmethod(_as_on_gpu(CpuPlatform.check_and_update_config))
    # The kernel that writes the cache picks its tile by the GPU's generation: that of an H200 here.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    triton_attn.unified_attention = _torch_attention(triton_attn.unified_attention)


def _as_on_gpu(original: Callable[[Any], None]) -> Callable[[type, Any], None]:
    """vLLM's check of a config on a CPU, but for the asynchronous scheduling that it takes away."""

    def check_and_update_config(cls: type, config: Any) -> None:
        async_scheduling = config.scheduler_config.async_scheduling
        original(config)
        config.scheduler_config.async_scheduling = async_scheduling

    return check_and_update_config


def _torch_attention(kernel: Callable[..., None]) -> Callable[..., None]:
    """Causal attention over a paged cache in torch; every other kind goes to the interpreted kernel."""
    import torch

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
        **rest: Any,
    ) -> None:
        absent = ("alibi_slopes", "sinks", "mm_prefix_range", "output_scale")
        plain = causal is True and tuple(window_size) == (-1, -1) and not rest.get("softcap")
        if not plain or any(rest.get(name) is not None for name in absent):
            return kernel(
                q=q,
                k=k,
                v=v,
                out=out,
                cu_seqlens_q=cu_seqlens_q,
                seqused_k=seqused_k,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                block_table=block_table,
                **rest,
            )
        block_size = k.shape[1]
        for i, length in enumerate(seqused_k.tolist()):
            first, last = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
            if last == first or length == 0:
                continue
            blocks = block_table[i, : -(-length // block_size)].long()
            keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k, v))
            positions = torch.arange(length - (last - first), length)
            found = torch.nn.functional.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=torch.arange(length)[None] <= positions[:, None],
                scale=softmax_scale,
                enable_gqa=True,
            )
            out[first:last] = found[0].transpose(0, 1)
        return None

    return attend
