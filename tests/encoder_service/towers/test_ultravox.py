"""Ultravox: a tower in a separate checkpoint, and audio of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from expected_errors import expect_error
from safetensors.torch import load_file, save_file

from cornplug import identity
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.towers.log_mel import ChunkedLogMel
from cornplug.errors import CheckpointError, EncoderRefused
from devkit import checkpoints
from devkit.checkpoints.audio import mel_json

from ..recordings import tone
from ..tower_rig import Halves, edit_config, nudged, wire

SPOKEN = tone(1.0)[:, 0].astype(np.float32) / 32768
MADE = ChunkedLogMel(mel_json(80, 4)).extract(SPOKEN)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two LLMs of different width over one Whisper."""
    root = tmp_path_factory.mktemp("ultravox")
    common = {"seconds": 4, "base": root / "whisper"}
    return (
        checkpoints.ultravox(root / "a", **common),
        checkpoints.ultravox(root / "b", hidden_size=96, heads=3, llm_seed=2, **common),
    )


def test_ultravox_whisper_under_two_llms_is_one_tower(pair: tuple[Path, Path]) -> None:
    one, other = ModelRegistry.open([str(p) for p in pair], dtype="float32", device="cpu").loaded_models()
    assert one.tower is other.tower
    assert one.served.identity != other.served.identity
    assert (one.projector.hidden_size, other.projector.hidden_size) == (64, 96)
    item = one.tower.prepare(wire(MADE))
    keys = {
        identity.feature_key(b"s" * 32, m.served.tower_fp, m.tower_spec_fp, item.digests, None)
        for m in (one, other)
    }
    assert len(keys) == 1


def test_ultravox_tower_of_equal_weights_is_shared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    own = checkpoints.ultravox(tmp_path / "own", seconds=4)
    ids, theirs = (Checkpoint.open(str(p)).identity("float32") for p in (own, pair[0]))
    assert ids == theirs
    assert torch.equal(Halves.load(own).embed([MADE])[0], Halves.load(pair[0]).embed([MADE])[0])


def test_ultravox_changed_whisper_is_another_tower(pair: tuple[Path, Path], tmp_path: Path) -> None:
    own = nudged(checkpoints.ultravox(tmp_path / "own", seconds=4), tmp_path / "nudged", "tower")
    base = tmp_path / "whisper"
    checkpoints.ultravox(tmp_path / "a", seconds=4, base=base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.decoder.layer_norm.weight"] += 1  # not the tower's
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    fps = [Checkpoint.open(str(p)).fingerprint("tower") for p in (pair[0], tmp_path / "a", own)]
    assert fps[0] == fps[1] != fps[2]


def test_ultravox_tower_in_both_checkpoints_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """vLLM lets the base count, Ultravox's own code the checkpoint: neither would be always right."""
    own = edit_config(
        checkpoints.ultravox(tmp_path / "own", seconds=4), audio_model_id=str(pair[0].parent / "whisper")
    )
    with expect_error(CheckpointError, reason="duplicate_tensor"):
        Checkpoint.open(str(own)).fingerprint("tower")


def test_ultravox_missing_base_checkpoint_is_named(tmp_path: Path) -> None:
    lost = edit_config(checkpoints.ultravox(tmp_path / "u", seconds=4), audio_model_id="nobody/whisper-lost")
    with expect_error(CheckpointError, reason="not_found", match="nobody/whisper-lost"):
        Checkpoint.open(str(lost))


def test_ultravox_transformer_projector_is_refused(tmp_path: Path) -> None:
    path = edit_config(checkpoints.ultravox(tmp_path / "u", seconds=4), num_projector_layers=2)
    with expect_error(CheckpointError, reason="unknown_family", match="num_projector_layers"):
        Checkpoint.open(str(path)).identity("float32")


@pytest.mark.parametrize(
    ("seconds", "lens", "tokens"),
    [(1, [100], 7), (10, [1000], 63), (35, [3000, 500], 188 + 32), (0.001, [2], 1), (30, [3000], 188)],
)
def test_chunked_log_mel_chunks_as_ultravox_processor(seconds: float, lens: list[int], tokens: int) -> None:
    made = ChunkedLogMel(mel_json(80)).extract(np.zeros(int(seconds * 16_000), np.float32))
    assert made["audio_lens"].tolist() == lens
    assert made["audio_features"].shape[0] == len(lens)
    assert sum(-(-length // 16) for length in lens) == tokens


def test_ultravox_padding_of_engine_changes_no_features(pair: tuple[Path, Path]) -> None:
    halves = Halves.load(pair[0])
    padded = {**MADE, "audio_features": torch.nn.functional.pad(MADE["audio_features"], (0, 77), value=0.3)}
    assert torch.equal(halves.embed([padded])[0], halves.embed([MADE])[0])
    assert halves.items([padded])[0].digests == halves.items([MADE])[0].digests


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"audio_features": MADE["audio_features"][0]}, "audio_features: shape"),
        ({"audio_features": MADE["audio_features"][:, :40]}, "audio_features: shape"),
        ({"audio_features": torch.zeros(1, 80, 401)}, "limit of 400"),
        ({"audio_lens": torch.tensor([101])}, "1 to 100 frames"),
        ({"audio_lens": torch.tensor([0])}, "1 to 100 frames"),
        ({"audio_lens": torch.tensor([50, 50])}, "must have 1 lengths"),
        ({"audio_features": torch.full((1, 80, 100), torch.nan)}, "NaN"),
    ],
)
def test_ultravox_bad_inputs_are_refused_by_field(
    changes: dict[str, torch.Tensor], says: str, pair: tuple[Path, Path]
) -> None:
    with expect_error(EncoderRefused, reason="bad_input", match=says):
        Halves.load(pair[0]).tower.prepare(wire({**MADE, **changes}))
