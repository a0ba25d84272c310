"""Replacement of a transformers model's decoder, which ends the forward pass and captures the decoder's
input.

    whole model's forward ──> token embeddings ──medium's rows put in──> decoder
                                   (a mark)                                 └─ raises DecoderReached(rows)

The rows of a medium are captured where the decoder would read them, whatever the family's code does before.
Token embeddings are a mark value that no tower produces, so positions without the mark are the medium's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from cornplug.errors import CheckpointError

LEVELS: Final = "deepstack_visual_embeds"
"""Argument of decoders that add several tower layers' outputs to those of their own first layers."""


_PLACES: Final = frozenset({"attention_mask", "position_ids"})
"""Arguments with positions of rows, not their contents."""


class DecoderReached(Exception):
    """Raised at the decoder's start to end the model's forward pass."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__("the decoder was reached")
        self.rows = rows
        """(rows, width) of the medium in the prompt's order, with the deepstack levels concatenated to each
        row."""


class TokenMark(nn.Module):
    """Token embeddings in which every value is the smallest finite value of the dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width = width
        self.dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """Weight of an embedding with any number of tokens. It takes no memory."""
        return self._made(1).expand(1 << 24, self._width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mark for each token, shape (*ids.shape, width)."""
        return self._made(*ids.shape, self._width, device=ids.device)

    def _made(self, *shape: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.full(shape, torch.finfo(self.dtype).min, dtype=self.dtype, device=device)


class DecoderRecorder(nn.Module):
    """Replacement of a decoder that raises `DecoderReached` when it is called.

    Raises CheckpointError("unknown_family") if the decoder uses more of a medium than rows in the prompt and
    deepstack levels at the same positions.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = TokenMark(width, dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_decoder(self) -> nn.Module:
        return self

    def get_per_layer_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Return None. A decoder computes these inputs from its tokens."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> None:
        if inputs_embeds is None or inputs_embeds.shape[0] != 1:
            raise CheckpointError("the decoder does not accept embeddings", reason="unknown_family")
        levels, places = kwargs.pop(LEVELS, None) or (), kwargs.pop("visual_pos_masks", None)
        more = [name for name, value in kwargs.items() if name not in _PLACES and any(_numbers(value))]
        if more:
            raise CheckpointError(
                f"the decoder also needs {', '.join(more)} of a medium, not only its rows",
                reason="unknown_family",
            )
        marked = (inputs_embeds[0] == torch.finfo(inputs_embeds.dtype).min).all(-1)
        if not bool(marked.any()) or bool(marked.all()):
            raise CheckpointError(
                "rows of media cannot be distinguished from embeddings of tokens", reason="unknown_family"
            )
        rows = inputs_embeds[0, ~marked]
        if levels and not (
            all(level.shape == rows.shape for level in levels)
            and isinstance(places, torch.Tensor)
            and torch.equal(places.reshape(-1), ~marked)
        ):
            raise CheckpointError("the deepstack levels do not match the rows", reason="unknown_family")
        raise DecoderReached(torch.cat([rows, *(level.to(rows.dtype) for level in levels)], dim=-1))


class RemovedPart(nn.Module):
    """Replacement of a part that this tower does not need. Calling it is an error."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise CheckpointError("this tower needs a part of another modality", reason="unknown_family")


def _numbers(value: Any) -> Iterator[bool]:
    """Yield whether each tensor in a value is floating point."""
    if isinstance(value, torch.Tensor):
        yield value.is_floating_point()
    elif isinstance(value, Mapping):
        yield from (found for part in value.values() for found in _numbers(part))
    elif isinstance(value, list | tuple):
        yield from (found for part in value for found in _numbers(part))
