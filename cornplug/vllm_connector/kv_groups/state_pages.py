"""Page geometry of a group of recurrent states (Mamba, gated delta nets).

vLLM caches a state in the block with the state's last token (mamba cache mode "align"). A page contains that
block: the states of the group's layers after the page's last token. Pages are treated as bytes, so every kind
of state that vLLM describes by MambaSpec can be shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.errors import LayoutError
from cornplug.identity import LINK_TOKENS
from cornplug.kv_page import PageGeometry
from cornplug.vllm_connector.model.cache_specs import unlisted_field

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OF_STATES: Final[Mapping[str, str]] = {
    "shapes": "in the page",
    "dtypes": "in the page",
    "mamba_type": "in the page",
    "block_size": "the page's tokens",
    "mamba_cache_mode": "compared with align",
    "num_speculative_blocks": "compared with 0",
    "num_prefill_checkpoint_blocks": "only blocks that vLLM caches under the hash of their tokens are saved",
    "prefill_checkpoint_alignment": "only blocks that vLLM caches under the hash of their tokens are saved",
    "page_size_padded": "the worker reads the strides of the cache itself",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
}
"""Fields of vLLM's MambaSpec that may have any value, with the reason. All other fields must have their
defaults."""


def state_page(config: VllmConfig, spec: Any, layers: Sequence[int], page_tokens: int) -> PageGeometry:
    """Return the page geometry of a group with these layers' states, with `page_tokens` tokens per page.
    Raises LayoutError if the group cannot be shared."""
    from vllm.platforms import current_platform

    cache = config.cache_config
    if spec.mamba_cache_mode != "align":
        raise LayoutError(
            "vLLM keeps states only of running requests; set --enable-prefix-caching to keep more",
            reason="hybrid",
        )
    if spec.num_speculative_blocks:
        raise LayoutError("state layers with speculative decoding", reason="speculative")
    if cache.prefix_match_unit not in (None, spec.block_size):
        raise LayoutError("state checkpoints inside blocks (--prefix-match-unit)", reason="hybrid")
    if spec.block_size != page_tokens or page_tokens % LINK_TOKENS:
        raise LayoutError(
            f"states at the ends of blocks of {spec.block_size} tokens do not fit pages of {page_tokens} "
            "tokens",
            reason="layout",
        )
    if field := unlisted_field(spec, OF_STATES):
        raise LayoutError(f"state layers with {field} are not supported", reason="hybrid")
    shapes = " ".join(
        f"{dtype_name(of)}{list(shape)}" for shape, of in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return PageGeometry(
        page_tokens=page_tokens,
        # Each rank holds its heads' part, in an order that only its kernels know.
        heads=config.parallel_config.tensor_parallel_size,
        layers=len(layers),
        dim=spec.state_content_size_bytes,
        dtype="uint8",
        planes=1,
        engine="vllm",
        group=tuple(layers),
        # Kernels of another platform may order a state's values differently.
        state=f"{spec.mamba_type.name} {current_platform.device_type} {shapes}",
    )
