"""Views of SGLang's host pools as pages of [kv_head][layer][K,V][token][dim], in every host layout.

A page is a strided view, so a single copy transfers it. Shapes alone do not prove that a view is correct.
Therefore `verify_layout` writes a pattern into the device pool with SGLang's own code, lets SGLang back up
the pattern, and compares the backup with the view.

A rank (`RankPosition`) holds a part of each page:

    tensor parallelism      a rank holds some heads of all layers      all ranks write a page together
    pipeline parallelism    a stage holds some layers of all heads     all stages write a page together
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common.model_identity import only_engine_of_latents
from cornplug.errors import LayoutError
from cornplug.kv_page import PageGeometry, count_layer_runs, tensor_parallel_heads

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig


_FP8: Final[Mapping[torch.dtype, str]] = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
"""dtypes with one byte per value, and their names in `PageGeometry.quantised`. AMD's first fp8 format, which
represents other values, is not included."""
_MHA_DIMENSIONS: Final = {
    # Indices of (plane, head, layer, token) among a page's dimensions. dim is the last dimension.
    "layer_first": (0, 3, 1, 2),
    "page_first": (0, 3, 2, 1),
    "page_first_direct": (0, 3, 1, 2),
    "page_head": (0, 1, 3, 2),
}
_MLA_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")
_verified: Final[weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], str]]] = weakref.WeakKeyDictionary()
"""Device pool and I/O backend with which `verify_layout` accepted a host pool, by host pool."""


class RankPosition(NamedTuple):
    """Position of one rank in tensor and pipeline parallelism."""

    tp_rank: int
    tp_size: int
    stage: int
    layers_of_stages: tuple[range, ...]

    @property
    def layers(self) -> range:
        """Layers that this rank holds."""
        return self.layers_of_stages[self.stage]

    @property
    def ranks(self) -> int:
        """Number of ranks that compute a request together."""
        return self.tp_size * len(self.layers_of_stages)

    @property
    def first_layers(self) -> list[int]:
        """First layer of each stage."""
        return [layers.start for layers in self.layers_of_stages]


def rank_position(config: HiCacheStorageConfig, layers: int) -> RankPosition:
    """Return the position of this process's rank in a model with `layers` layers, from the storage's config.

    Raises LayoutError("parallelism") if KV of this rank cannot be shared.
    """
    if why := _parallelism_exclusion(config):
        raise LayoutError(why, reason="parallelism")
    return RankPosition(
        config.tp_rank, config.tp_size, config.pp_rank, layers_of_stages(layers, config.pp_size)
    )


def layers_of_stages(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage of a model with `layers` layers, as SGLang divides them."""
    from sglang.srt.distributed.utils import get_pp_indices

    return tuple(range(*get_pp_indices(layers, stage, stages)) for stage in range(stages))


def check_first_layer(position: RankPosition, device_pool: Any) -> None:
    """Raise LayoutError("layout") unless SGLang's device pool begins with the stage's first layer.

    `layout.page_geometry` checks the number of layers.
    """
    if device_pool.start_layer != position.layers.start:
        raise LayoutError(
            f"the KV pool of stage {position.stage} begins with layer {device_pool.start_layer}, expected "
            f"{position.layers.start}",
            reason="layout",
        )


def all_ranks_agree(cache: Any, local_vote: bool) -> bool:
    """Return whether `local_vote` is True on all ranks that compute this rank's requests, in all stages.

    Call this only at startup, when all ranks call it. While SGLang handles requests, its pipeline stages do
    not run in lockstep, and SGLang passes the first stage's decisions to later stages
    (`UnifiedRadixCache._all_reduce`).
    """
    vote = torch.tensor([local_vote], dtype=torch.int32)
    smallest = torch.distributed.ReduceOp.MIN
    cache._all_reduce_attn_groups(vote, smallest)
    if cache.pp_size > 1:
        torch.distributed.all_reduce(vote, op=smallest, group=cache.pp_group)
    return bool(vote.item())


def _parallelism_exclusion(config: HiCacheStorageConfig) -> str:
    """Return the kind of parallelism that excludes sharing, or "" if there is none."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    for name, size in (("context", config.attn_cp_size), ("decode context", config.dcp_size)):
        if size > 1:
            return f"{name} parallelism with {size} ranks"
    if is_dp_attention_enabled():
        return "data parallel attention"
    ranks = config.tp_size * config.pp_size
    if ranks > 1 and torch.distributed.get_world_size() != ranks:
        return f"{torch.distributed.get_world_size()} ranks, but only {ranks} compute this rank's requests"
    return ""


@dataclass(frozen=True, slots=True)
class HostPages:
    """Pages of one of SGLang's host pools (`MHATokenToKVPoolHost` or `MLATokenToKVPoolHost`)."""

    pool: Any
    latent: bool
    """Whether the pool holds MLA latents, which have one plane and no heads."""

    @property
    def page_size(self) -> int:
        """Number of tokens per page."""
        return int(self.pool.page_size)

    def page(self, slot: int) -> torch.Tensor:
        """Return a view of the page that begins at `slot`.

        The view has shape (heads of this rank, layers, planes, tokens, dim).
        """
        size, layout, buffer = self.page_size, self.pool.layout, self.pool.kv_buffer
        if self.latent:
            # Every layout has a dimension of size 1 between tokens and dim. Replace it by the planes.
            match layout:
                case "layer_first":
                    found = buffer[:, slot : slot + size]
                case "page_first":
                    found = buffer[slot : slot + size].transpose(0, 1)
                case _:
                    found = buffer[slot // size]
            return found.permute(2, 0, 1, 3).unsqueeze(2)
        match layout:
            case "layer_first":
                found = buffer[:, :, slot : slot + size]
            case "page_first":
                found = buffer[:, slot : slot + size]
            case _:
                found = buffer[:, slot // size]
        plane, head, layer, token = _MHA_DIMENSIONS[layout]
        return found.permute(head, layer, plane, token, 4)


def quantised_format(dtype: torch.dtype) -> str:
    """Return the format of a device pool with one byte per value, as in `PageGeometry.quantised`.

    Returns "" for other pools.
    """
    return _FP8.get(dtype, "")


def attention_backends() -> str:
    """Return the names of this process's attention backends, for `page_geometry`."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    return " ".join(map(str, attention_backends_of(resolved_view(get_server_args()))))


def host_pages(pool: Any) -> HostPages:
    """Return the pages of one of SGLang's host pools. Raises LayoutError for a pool that cannot be shared."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    # Subclasses have other contents, such as asymmetric heads, block scales or sparse slots.
    kind = type(pool)
    if kind is not MHATokenToKVPoolHost and kind is not MLATokenToKVPoolHost:
        raise LayoutError(f"host pool {kind.__name__} has no pages", reason="attention_kind")
    latent = kind is MLATokenToKVPoolHost
    if pool.layout not in (_MLA_LAYOUTS if latent else _MHA_DIMENSIONS):
        raise LayoutError(f"{kind.__name__} with layout {pool.layout!r} has no pages", reason="layout")
    if not isinstance(pool.kv_buffer, torch.Tensor) or pool.kv_buffer.device.type != "cpu":
        raise LayoutError("the host pool is not a single tensor in host memory", reason="layout")
    if pool.layer_num != pool.target_layer_num:
        raise LayoutError("the host pool also holds a draft model's layers", reason="speculative")
    return HostPages(pool, latent=latent)


class ModelKV(NamedTuple):
    """Dimensions of KV: of a complete model, or of a group of its layers."""

    heads: int
    layers: int
    config: Mapping[str, Any]
    """The model's config. It shows whether the model has sliding windows."""


def page_geometry(
    pages: HostPages,
    model: ModelKV,
    *,
    page_tokens: int,
    quantised: str = "",
    attention: str = "",
    position: RankPosition | None = None,
) -> PageGeometry:
    """Return the model's page geometry. Raises LayoutError if the pool's KV cannot be shared.

    Args:
        quantised: `quantised_format` of the device pool.
        attention: names of SGLang's attention backends. With quantised KV, each backend rounds queries
            differently, which affects the KV of all later layers.
        position: position of this rank, or None for a rank that holds all layers.
    """
    pool = pages.pool
    if quantised and (pages.latent or pool.dtype != torch.uint8):
        raise LayoutError(
            f"KV of dtype {quantised} in a host pool of dtype {dtype_name(pool.dtype)}", reason="kv_dtype"
        )
    heads, layers, config = model
    held = layers if position is None else len(position.layers)
    if pool.layer_num != held:
        raise LayoutError(
            f"the host pool has {pool.layer_num} of {held} layers: the model has shared, windowed or state "
            "layers",
            reason="attention_kind",
        )
    return PageGeometry(
        page_tokens=page_tokens,
        heads=1 if pages.latent else heads,
        layers=layers,
        dim=pool.kv_cache_dim if pages.latent else pool.head_dim,
        dtype=dtype_name(pool.dtype),
        planes=1 if pages.latent else 2,
        layer_runs=1 if position is None else count_layer_runs(layers, position.first_layers),
        engine=_engine_name(pages, config, attention if quantised else ""),
        quantised=quantised,
    )


def _engine_name(pages: HostPages, config: Mapping[str, Any], attention: str) -> str:
    if pages.latent:
        return only_engine_of_latents("sglang", config)
    if attention:
        # No test has compared SGLang's fp8 KV with vLLM's fp8 KV.
        return f"sglang {attention}"
    return "sglang" if _declares_windows(config) else ""


def _declares_windows(config: Mapping[str, Any]) -> bool:
    """Return whether a model's config declares sliding windows that are in use.

    Which layers apply the windows depends on each engine's code. In SGLang, no layer of Qwen3 or Mistral
    applies them.
    """
    text = config.get("text_config") or config
    if text.get("use_sliding_window") is False:
        return False
    return any(bool(value) and "sliding_window" in name for name, value in text.items())


def rank_heads(pages: HostPages, page: PageGeometry, tp_size: int, tp_rank: int) -> tuple[range, bool]:
    """Return (KV heads of this rank, whether this rank saves them). Raises LayoutError for an unexpected
    division of heads."""
    if pages.latent:
        return range(1), tp_rank == 0
    heads, writes = tensor_parallel_heads(page.heads, tp_size, tp_rank)
    if len(heads) != pages.pool.head_num:
        raise LayoutError(
            f"rank {tp_rank} of {tp_size} holds {pages.pool.head_num} of {page.heads} KV heads, expected "
            f"{len(heads)}",
            reason="layout",
        )
    return heads, writes


def verify_layout(pages: HostPages, controller: Any, device: Any = None) -> None:
    """Verify that SGLang backs up values of the device pool to `pages`, and loads them back from `pages`.

    `device` is the device pool of `pages`. It is required if the controller has several device pools. The
    check uses one free host page and the device's padding page, and restores both. A pool that has passed is
    not checked again, because the tree of a running server may fill the host pool.

    Raises LayoutError("layout") if a value is lost or moved, or if no host page is free.
    """
    host, size = pages.pool, pages.page_size
    device = controller.mem_pool_device if device is None else device
    passed = _verified.get(host)
    if passed is not None and passed[0]() is device and passed[1] == controller.io_backend:
        return
    slots = host.alloc(size)
    if slots is None:
        raise LayoutError(
            "the host pool has no free page to verify the layout: flush the cache (POST /flush_cache), and "
            "attach the storage again",
            reason="layout",
        )
    here = pages.page(int(slots[0]))
    before = here.clone()
    # The first page's slots hold the KV of padding tokens. No sequence uses these slots.
    padding = torch.arange(size, dtype=torch.int64, device=device.device)
    at = controller.move_indices(slots, padding)
    # As in SGLang's controller, the staged kernel reads the host's slots from host memory.
    staged = controller.io_backend == "kernel" and host.layout == "page_first" and host.can_use_write_back_jit
    to_host = (slots, padding) if staged else at
    try:
        _back_up(host, device, to_host, controller.io_backend)
        padded = here.clone()
        pattern = _pattern(here, seed=1)
        _write_device(device, padding, pattern, latent=pages.latent)
        _back_up(host, device, to_host, controller.io_backend)
        _check_equal(here, pattern, "does not back up")

        pattern = _pattern(here, seed=2)
        here.copy_(pattern)
        _load(host, device, at, controller.io_backend)
        here.zero_()
        _back_up(host, device, to_host, controller.io_backend)
        _check_equal(here, pattern, "does not load")

        here.copy_(padded)
        _load(host, device, at, controller.io_backend)
    finally:
        here.copy_(before)
        host.free(slots)
    _verified[host] = weakref.ref(device), controller.io_backend


def _pattern(like: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Return random values. Almost all values are different, so a wrong order is detected."""
    generator = torch.Generator().manual_seed(seed)
    if like.dtype == torch.uint8:
        return torch.randint(0, 256, like.shape, generator=generator, dtype=torch.uint8)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _write_device(device: Any, slots: torch.Tensor, pattern: torch.Tensor, *, latent: bool) -> None:
    """Write a pattern into the device pool with the same call as the engine's attention.

    The pattern's shape is (heads, layers, planes, tokens, dim).
    """
    values = pattern.to(device.device)
    if device.store_dtype != device.dtype:  # The pool stores fp8 values as bytes.
        values = values.view(device.dtype)
    for i in range(pattern.shape[1]):
        layer = device.start_layer + i
        planes = [plane.transpose(0, 1).contiguous() for plane in values[:, i].unbind(1)]
        if not latent:
            device.set_kv_buffer(None, slots, *planes, layer_id_override=layer)
        elif slots.device.type == "cpu":
            device.set_kv_buffer(None, slots, planes[0], planes[0], layer_id_override=layer)
        else:
            parts = [part.contiguous() for part in planes[0].split_with_sizes(_latent_widths(device), dim=-1)]
            device.set_mla_kv_buffer(None, slots, *parts, layer_id_override=layer)


def _latent_widths(device: Any) -> list[int]:
    return [device.kv_lora_rank, device.qk_rope_head_dim]


def _back_up(host: Any, device: Any, at: tuple[torch.Tensor, torch.Tensor], io_backend: str) -> None:
    host.backup_from_device_all_layer(device, *at, io_backend)
    _synchronize(device)


def _load(host: Any, device: Any, at: tuple[torch.Tensor, torch.Tensor], io_backend: str) -> None:
    for layer in range(host.layer_num):
        host.load_to_device_per_layer(device, *at, layer, io_backend)
    _synchronize(device)


def _synchronize(device: Any) -> None:
    if torch.device(device.device).type == "cuda":
        torch.cuda.synchronize()


def _check_equal(found: torch.Tensor, pattern: torch.Tensor, what: str) -> None:
    if not torch.equal(found, pattern):
        raise LayoutError(
            f"SGLang {what} KV in the layout that this release of cornplug expects", reason="layout"
        )
