"""What a decoder's input tells of a medium."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expected_errors import expect_error

from cornplug.encoder_service.towers.decoderless import (
    DEEPSTACK_ARGUMENT,
    DecoderReached,
    DecoderRecorder,
    RemovedModule,
)
from cornplug.errors import CheckpointError

WIDTH = 4
PLACES = torch.tensor([[False, True, True, False]])


def merged(dtype: torch.dtype = torch.float32) -> tuple[DecoderRecorder, torch.Tensor]:
    """A recorder, and a prompt's embeddings: rows 1 and 2 are the medium's."""
    recorder = DecoderRecorder(WIDTH, dtype)
    embeds = recorder.get_input_embeddings()(torch.tensor([[5, 9, 9, 6]]))
    return recorder, embeds.masked_scatter(PLACES[..., None], torch.arange(2 * WIDTH).to(dtype))


def reached(recorder: DecoderRecorder, **inputs: Any) -> torch.Tensor:
    with pytest.raises(DecoderReached) as caught:
        recorder(**inputs)
    return caught.value.rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoder_recorder_rows_are_those_put_between_tokens(dtype: torch.dtype) -> None:
    recorder, embeds = merged(dtype)
    rows = reached(
        recorder,
        inputs_embeds=embeds,
        attention_mask={"full": torch.zeros(1, 4)},
        position_ids=PLACES.float(),
    )
    assert rows.dtype == dtype
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_decoder_recorder_row_of_nan_is_a_row() -> None:
    """A tower that overflows is told apart from a token."""
    recorder, embeds = merged()
    embeds[0, 2] = float("nan")
    assert reached(recorder, inputs_embeds=embeds).shape == (2, WIDTH)


def test_decoder_recorder_levels_lie_beside_their_rows() -> None:
    recorder, embeds = merged()
    levels = [torch.full((2, WIDTH), 8.0), torch.full((2, WIDTH), 9.0)]
    rows = reached(recorder, inputs_embeds=embeds, visual_pos_masks=PLACES, **{DEEPSTACK_ARGUMENT: levels})
    assert rows[1].tolist() == [4, 5, 6, 7] + [8] * WIDTH + [9] * WIDTH


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"cross_attention_states": torch.zeros(1, 3)}, "also needs cross_attention_states"),
        ({"per_layer_inputs": [{"a": torch.zeros(1)}]}, "also needs per_layer_inputs"),
        ({DEEPSTACK_ARGUMENT: [torch.zeros(3, WIDTH)], "visual_pos_masks": PLACES}, "levels"),
        ({DEEPSTACK_ARGUMENT: [torch.zeros(2, WIDTH)], "visual_pos_masks": ~PLACES}, "levels"),
        ({DEEPSTACK_ARGUMENT: [torch.zeros(2, WIDTH)]}, "levels"),
    ],
)
def test_decoder_recorder_decoder_that_takes_more_is_refused(more: dict[str, Any], problem: str) -> None:
    recorder, embeds = merged()
    with expect_error(CheckpointError, reason="unknown_family", match=problem):
        recorder(inputs_embeds=embeds, **more)


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_decoder_recorder_scaled_embeddings_are_refused_not_taken_for_rows(scale: float) -> None:
    """Every position would look like the medium's."""
    recorder, embeds = merged()
    with expect_error(CheckpointError, reason="unknown_family", match="cannot be distinguished"):
        recorder(inputs_embeds=embeds * scale)


def test_decoder_recorder_prompt_without_a_medium_is_refused() -> None:
    recorder = DecoderRecorder(WIDTH, torch.float32)
    with expect_error(CheckpointError, reason="unknown_family", match="cannot be distinguished"):
        recorder(inputs_embeds=recorder.embed_tokens(torch.zeros(1, 3, dtype=torch.int64)))
    with expect_error(CheckpointError, reason="unknown_family", match="does not accept embeddings"):
        recorder(input_ids=torch.zeros(1, 3, dtype=torch.int64))


def test_removed_part_that_is_called_is_an_error() -> None:
    with expect_error(CheckpointError, reason="unknown_family", match="another modality"):
        RemovedModule()(torch.zeros(1))


def test_decoder_recorder_token_weights_take_no_memory() -> None:
    weight = DecoderRecorder(WIDTH, torch.bfloat16).embed_tokens.weight
    assert weight.shape[1] == WIDTH
    assert weight.untyped_storage().nbytes() <= 2 * WIDTH
    assert not list(DecoderRecorder(WIDTH, torch.bfloat16).state_dict())
