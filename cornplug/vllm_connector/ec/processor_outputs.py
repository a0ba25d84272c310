"""Processor outputs of a medium, in the form that the tower receives, for the encoder service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from cornplug.checkpoints.families import FAMILIES, Modality
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.encoder_service.wire.tensors import to_wire
from cornplug.errors import EncoderRefused
from cornplug.vllm_connector import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


IN_WORKERS_ONLY: Final = (
    "with --mm-processor-cache-type shm, only vLLM's workers can read processed media. Remove the flag, or "
    "set it to lru"
)


def in_workers_only(config: VllmConfig) -> bool:
    """Return whether vLLM does not pass processed media to its engine core."""
    from vllm.multimodal.cache.factories import _get_cache_type

    return _get_cache_type(config) == "shm"


class MediaInputs:
    """Selects the tensors in vLLM's feature specs that the model's family names.

    For some families, vLLM 0.32 leaves rescaling and normalising to the device (`mm_device_do_normalize`),
    and processed pixels are raw uint8. vLLM's own module then normalises them here, so that the service gets
    the same inputs as the engine's tower.
    """

    def __init__(self, config: VllmConfig) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

        with set_current_vllm_config(config):
            self._norm: Any = build_mm_input_norm(config.model_config)
        self._in_workers_only = in_workers_only(config)
        if self._in_workers_only:
            compat.logger.warning("cornplug: the encoder service is not used: %s", IN_WORKERS_ONLY)
        family = FAMILIES.get(str(config.model_config.hf_config.model_type))
        self._wanted: Mapping[Modality, tuple[str, ...]] = family.inputs if family is not None else {}

    def of(self, feature: Any) -> dict[str, WireTensor]:
        """Name -> tensor of one item.

        Raises EncoderRefused: "no_inputs" if vLLM kept no inputs, "shm_cache" if only its workers have them.
        """
        if self._in_workers_only:
            raise EncoderRefused(IN_WORKERS_ONLY, reason="shm_cache")
        if feature.data is None:
            raise EncoderRefused(
                "the engine no longer holds the processed inputs of this medium", reason="no_inputs"
            )
        wanted = self._wanted.get(feature.modality, ())
        found = {}
        for name in wanted:
            element = feature.data.get(name)
            if element is not None and isinstance(element.data, torch.Tensor):
                found[name] = self._tensor(element.data)
        if not wanted or wanted[0] not in found:
            raise EncoderRefused(
                f"the engine's {feature.modality} inputs have no {wanted[0] if wanted else 'known tensors'}",
                reason="no_inputs",
            )
        return found

    def _tensor(self, value: torch.Tensor) -> WireTensor:
        if value.dtype == torch.uint8:
            native = getattr(self._norm, "forward_native", self._norm.forward)
            value = native(value, torch.float32)
        return to_wire(value)
