"""A medium's processor outputs as the encoder service wants them: what the tower really gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cornplug.encoder_service.protocol import Tensor
from cornplug.engine_side.tensors import to_wire
from cornplug.errors import EncoderRefused

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FIELDS = ("pixel_values", "image_grid_thw")


class MediaInputs:
    """Takes inputs from vLLM's feature specs.

    For some families vLLM 0.32 leaves rescaling and normalising to the device
    (`mm_device_do_normalize`): the processed pixels are then raw uint8. We apply vLLM's own
    module to them, so that the service sees what the engine's tower would.
    """

    def __init__(self, config: VllmConfig) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

        with set_current_vllm_config(config):
            self._norm: Any = build_mm_input_norm(config.model_config)

    def of(self, feature: Any) -> dict[str, Tensor]:
        """Name -> tensor of one item. Raises EncoderRefused("no_inputs") where vLLM kept none."""
        if feature.data is None:
            raise EncoderRefused("the engine holds no processed inputs for this medium", reason="no_inputs")
        found = {}
        for name in _FIELDS:
            element = feature.data.get(name)
            if element is not None and isinstance(element.data, torch.Tensor):
                found[name] = self._tensor(name, element.data)
        if "pixel_values" not in found:
            raise EncoderRefused("the medium has no pixel_values", reason="no_inputs")
        return found

    def _tensor(self, name: str, value: torch.Tensor) -> Tensor:
        if value.dtype == torch.uint8:
            native = getattr(self._norm, "forward_native", self._norm.forward)
            value = native(value, torch.float32)
        return to_wire(value)
