"""SGLang 0.5.23's hierarchical cache on a machine without a GPU, for tests only.

HiCache copies KV between the engine's pool and a host pool with CUDA kernels, and pins the host
pool. Where there is no CUDA the copies here take their place: the same slots, plain indexing.
Storage backends, prefetch and write-back above them are SGLang's own.

Host layouts, with the I/O backend that SGLang accepts for each: `layer_first` (direct or
kernel), `page_first_direct` (direct), `page_first` and `page_head` (kernel). Multi-head and
multi-head latent attention (MLA). Does nothing where CUDA is available.

MLA needs one thing more. For a prompt without a cached prefix SGLang computes plain K and V and
hands them to the attention backend; `torch_native` ignores them and reads the latent cache in
their stead, which is wrong, and silently so where the widths agree. So that backend is told to
attend to the latents always, as it does rightly with a cached prefix and in decoding.

Sliding windows in a pool beside full attention: `torch_native` writes there at the pool's own slots, and
reads at those of full attention. It is told to read where it has written.

LoRA: with `--lora-backend torch_native` SGLang computes it without a GPU's kernels, but pins host
memory, which raises where there is no accelerator. That memory is left as it is.

Speculative decoding: `torch_native` has no pass that verifies a tree of drafts; here is one. A draft
model (`--speculative-num-steps 1`: SGLang has no backend of several steps for it) extends with the backend
that it has. Pair it with `sgl_kernel` of dev/sgl-kernel-cpu.

`--kv-cache-dtype fp8_e4m3`: SGLang's CPU backend keeps it with scales, under AMX only. Here it is as on a
GPU: values are cast, one byte each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_POOLS = "sglang.srt.mem_cache.pool_host"
_MLA = "sglang.srt.models.deepseek_common.attention_backend_handler"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_POOL_CONFIG = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def register() -> None:
    """SGLang's plugin entry point: runs in each of its processes, before anything is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    if torch.cuda.is_available() or not is_cpu():
        return
    # Pools of tests are small, and several engines share the machine: 10 GiB are not always free.
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    before, replace = HookType.BEFORE, HookType.REPLACE
    HookRegistry.register(f"{_MLA}.AttentionBackendRegistry.get_handler", _latent_handler, HookType.AROUND)
    HookRegistry.register(f"{_POOLS}.base.HostKVCache.__init__", _unpinned, before)
    HookRegistry.register(f"{_POOLS}.mha.MHATokenToKVPoolHost.load_to_device_per_layer", _load_mha, replace)
    HookRegistry.register(
        f"{_POOLS}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer", _save_mha, replace
    )
    HookRegistry.register(f"{_POOLS}.mla.MLATokenToKVPoolHost.load_to_device_per_layer", _load_mla, replace)
    HookRegistry.register(
        f"{_POOLS}.mla.MLATokenToKVPoolHost.backup_from_device_all_layer", _save_mla, replace
    )
    for run in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        HookRegistry.register(f"{_ATTENTION}.{run}", _windows_where_written, HookType.AROUND)
    # A hook imports what it is around, and few servers have adapters. Children inherit the arguments.
    if any(arg.startswith(("--enable-lora", "--lora-paths")) for arg in sys.argv):
        HookRegistry.register(f"{_LORA}.__init__", _unpinned_lora, before)
    if any(arg.startswith("--speculative-algorithm") for arg in sys.argv):
        HookRegistry.register(f"{_ATTENTION}.forward_extend", _verify_drafts, HookType.AROUND)
        HookRegistry.register(f"{_DRAFTS}.create_draft_extend_backend", _own_backend, HookType.AROUND)
    if any(arg.startswith("--kv-cache-dtype") for arg in sys.argv):
        HookRegistry.register(f"{_POOL_CONFIG}.configure", _plain_fp8, HookType.AROUND)


def _latent_handler(original: Callable[..., Any], *args: Any) -> Any:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    return handlers._dispatch_mla_subtype if args[-1] == "torch_native" else original(*args)


def _windows_where_written(
    original: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`slots` are full attention's, a row for each request; `rows` are those of the batch."""
    if backend.use_sliding_window_kv_pool and any(
        keys.data_ptr() == own.data_ptr() for own in backend.token_to_kv_pool.swa_kv_pool.k_buffer
    ):
        slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(slots[rows].long())
        rows = torch.arange(len(rows))
    return original(backend, query, output, keys, values, slots, rows, *args, **kwargs)


def _unpinned(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "pin_memory": False}


class UnpinnedTorch:
    """`torch` for a module that asks for pinned memory."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "ones", "tensor", "zeros"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


def _unpinned_lora(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = UnpinnedTorch()
    # Where there is no accelerator it raises, whoever calls it.
    torch.Tensor.pin_memory = _as_it_is


def _as_it_is(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor


def _verify_drafts(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of drafts: to all tokens before them, and in their tree to themselves and their ancestors."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    pool = backend.token_to_kv_pool
    pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
    drafts = forward_batch.spec_info.draft_token_num
    trees = forward_batch.spec_info.custom_mask.view(-1, drafts, drafts).bool()
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    found = []
    queries = q.view(-1, drafts, layer.tp_q_head_num, layer.qk_head_dim)
    for query, tree, row, before in zip(
        queries,
        trees,
        forward_batch.req_pool_indices.tolist(),
        forward_batch.seq_lens.tolist(),
        strict=True,
    ):
        slots = backend.req_to_token_pool.req_to_token[row, : before + drafts]
        mask = torch.cat([torch.ones(drafts, before, dtype=torch.bool), tree], dim=1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            keys[slots].to(query.dtype).transpose(0, 1),
            values[slots].to(query.dtype).transpose(0, 1),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        found.append(attended.transpose(0, 1).reshape(drafts, -1))
    return torch.cat(found)


def _own_backend(original: Callable[..., Any], factory: Any) -> Any:
    from sglang.srt.runtime_context import attention_backends

    # None: the draft's runner keeps the backend that it was made with, whose extend pass is torch_native's.
    return None if attention_backends()[0] == "torch_native" else original(factory)


class _NoCpu:
    """SGLang's platform, which says that it is no CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False


def _plain_fp8(original: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.mem_cache import kv_cache_configurator

    if configurator.kv_cache_dtype != torch.float8_e4m3fn:
        return original(configurator, *args, **kwargs)
    platform = kv_cache_configurator.current_platform
    kv_cache_configurator.current_platform = _NoCpu(platform)
    try:
        return original(configurator, *args, **kwargs)
    finally:
        kv_cache_configurator.current_platform = platform


def _load_mha(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if not is_draft and not 0 <= layer_id < pool.target_layer_num:
        return
    for host, device in ((pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)):
        slots = _slots(host, pool.layout, layer_id)
        device[layer_id][device_indices] = slots[_at(slots, host_indices)]


def _save_mha(
    pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    for host, device in ((pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)):
        for layer in range(pool.layer_num):
            slots = _slots(host, pool.layout, layer)
            slots[_at(slots, host_indices)] = device[layer][device_indices]


def _load_mla(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if not is_draft and layer_id not in pool._target_layer_indices:
        return
    slots = _slots(pool.kv_buffer, pool.layout, pool._host_layer_by_controller[layer_id])
    device = pool.device_kv_buffers[pool._buffer_index_by_layer[layer_id]]
    device[device_indices] = slots[_at(slots, host_indices)]


def _save_mla(
    pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    for layer, device in enumerate(pool.device_kv_buffers):
        slots = _slots(pool.kv_buffer, pool.layout, layer)
        slots[_at(slots, host_indices)] = device[device_indices]


def _slots(buffer: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """One layer of a host buffer: a view of (slots, heads, dim) or (pages, page_size, heads, dim)."""
    match layout:
        case "layer_first":  # layer, slot, head, dim
            return buffer[layer]
        case "page_first" | "page_first_direct":  # slot, layer, head, dim | page, layer, slot, head, dim
            return buffer[:, layer]
        case "page_head":  # page, head, slot, layer, dim
            return buffer[:, :, :, layer].transpose(1, 2)
    raise ValueError(f"no copies for the host layout {layout} without CUDA")


def _at(slots: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if slots.dim() == 3:
        return (indices,)
    page_size = slots.shape[1]
    return indices // page_size, indices % page_size
