"""Layers of a tower on a CPU, as quick as those of vLLM's own towers there.

vLLM packs each weight matrix once for oneDNN and has fused activations. PyTorch's `nn.Linear` packs a matrix
anew at each call in half precision, and calls a slower library in float32.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers.activations import QuickGELUActivation

from cornplug.encoder_service.models.torch_compile import layers_of
from cornplug.encoder_service.towers.base import Tower

log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """`nn.Linear` with its weights packed for oneDNN, in place of the weights themselves."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.contiguous(), self._packed, self._bias, "none", [], ""
        )
        return out


class QuickGelu(nn.Module):
    """transformers' `QuickGELUActivation`, with one temporary tensor in place of three."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (1.702 * rows).sigmoid_().mul_(rows)


@torch.inference_mode()
def speed_up(tower: Tower) -> None:
    """Replace linear layers and activations inside the repeated layers of a tower on a CPU.

    Layers that this PyTorch cannot pack stay as they are.
    """
    for layer in layers_of(tower):
        try:
            _replace_parts(layer)
        except (AttributeError, NotImplementedError, RuntimeError) as e:
            log.info("%s keeps PyTorch's own linear layers: %s", type(layer).__name__, e)
            return


def _replace_parts(module: nn.Module) -> None:
    for name, part in list(module.named_children()):
        # Subclasses may be read in other ways than by a call.
        if type(part) is nn.Linear:
            setattr(module, name, PackedLinear(part))
        elif type(part) is QuickGELUActivation:
            setattr(module, name, QuickGelu())
        else:
            _replace_parts(part)
