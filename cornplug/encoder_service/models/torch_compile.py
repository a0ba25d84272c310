"""torch.compile for a tower's layers. A tower that cannot be compiled runs uncompiled, with one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from cornplug.encoder_service.towers.base import Tower, TowerInput, TowerItem
from cornplug.encoder_service.towers.tower_turn import between_layers

log = logging.getLogger(__name__)


class CompiledTower:
    """Tower whose layers are compiled when they first run, for inputs of any length.

    Each layer is compiled separately. The layers are alike, so they all use the code that is compiled for the
    first of them. Compiling adds about ten seconds to the first batch.
    """

    failures = 0
    """Number of towers in this process that could not be compiled."""

    def __init__(self, tower: Tower) -> None:
        self.inner = tower
        """Uncompiled tower."""
        self.layers = list(layers_of(tower))
        """Compiled layers, or an empty list if compiling has failed."""
        for layer in self.layers:
            layer.compile(dynamic=True)
            # Wrap the compiled call, because a hook would be compiled into the layer.
            layer._compiled_call_impl = _after_pause(layer._compiled_call_impl)

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one medium's inputs, like `Tower.prepare`."""
        return self.inner.prepare(inputs)

    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return each item's features, like `Tower.encode`."""
        try:
            return self.inner.encode(items)
        except TorchDynamoException as e:
            if not self.layers:
                raise
            log.warning("%s cannot be compiled and runs uncompiled: %s", type(self.inner).__name__, e)
            CompiledTower.failures += 1
            for layer in self.layers:
                layer._compiled_call_impl = None
                layer.register_forward_pre_hook(between_layers)
            self.layers = []
            return self.inner.encode(items)


def let_pause(tower: Tower) -> None:
    """Allow passes of an uncompiled tower to be paused or ended between its layers."""
    for layer in layers_of(tower):
        layer.register_forward_pre_hook(between_layers)


def _after_pause(layer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        between_layers()
        return layer(*args, **kwargs)

    return call


def layers_of(tower: Tower) -> Iterator[nn.Module]:
    """Yield the repeated layers of a tower."""
    for value in vars(tower).values():
        if isinstance(value, nn.Module):
            for part in value.modules():
                if isinstance(part, nn.ModuleList):
                    yield from part.children()
