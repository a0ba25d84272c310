"""Audio and videos through the whole service: decoded, prepared, encoded, answered."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cornplug.config import Config
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.towers.log_mel import ChunkedLogMel
from devkit import checkpoints
from devkit.checkpoints.audio import mel_json

from ..conftest import MakeEncoder, sample_image
from ..http_service import Service
from ..recordings import encoded, moving, tone, video, wav
from ..tower_rig import Halves

SPOKEN = tone(4.6)


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two Ultravox of different width over one Whisper."""
    root = tmp_path_factory.mktemp("listening")
    common = {"seconds": 4, "base": root / "whisper"}
    return (
        checkpoints.ultravox(root / "a", **common),
        checkpoints.ultravox(root / "b", hidden_size=96, heads=3, llm_seed=2, **common),
    )


def rows(answer: dict[str, Any]) -> torch.Tensor:
    data = np.frombuffer(base64.b64decode(answer["data"]), np.float32)
    return torch.from_numpy(data.reshape(answer["shape"]).copy())


def test_http_audio_is_encoded_once_for_two_llms(
    listening: tuple[Path, Path], make_encoder: MakeEncoder, config: Config
) -> None:
    registry = ModelRegistry.open([str(p) for p in listening], dtype="float32", device="cpu")
    service = Service(make_encoder(registry=registry), config)
    one = service.post(data={"model": str(listening[0])}, files={"audio": wav(SPOKEN)})
    other = service.post(data={"model": str(listening[1])}, files={"audio": encoded(SPOKEN, "flac", "flac")})
    assert (one.status_code, other.status_code) == (200, 200), one.text + other.text
    assert (one.json()["origin"], other.json()["origin"]) == ("computed", "cached")
    # 4.6 s in chunks of 4: 25 and 4 stacks of 0.16 s.
    assert (one.json()["shape"], other.json()["shape"]) == ([29, 64], [29, 96])
    made = ChunkedLogMel(mel_json(80, 4)).extract(SPOKEN[:, 0] / np.float32(32768))
    torch.testing.assert_close(
        rows(one.json()), Halves.load(listening[0]).embed([made])[0], atol=1e-6, rtol=0
    )


def test_http_video_by_file_and_by_images_agree(
    qwen: Path, qwen_registry: ModelRegistry, make_encoder: MakeEncoder, config: Config
) -> None:
    service = Service(make_encoder(registry=qwen_registry), config)
    shown = moving(31)
    file = video(shown, "matroska", "libx264rgb", pix_fmt="rgb24", crf="0")
    dense = service.post(data={"model": str(qwen), "fps": "5"}, files={"video": file})
    sparse = service.post(data={"model": str(qwen), "num_frames": "4"}, files={"video": file})
    plain = service.post(data={"model": str(qwen)}, files={"video": file})
    answers = [a.json() for a in (dense, sparse, plain)]
    assert [a.status_code for a in (dense, sparse, plain)] == [200] * 3, dense.text
    assert len({a["key"] for a in answers}) == 3
    assert answers[0]["shape"][0] > answers[2]["shape"][0] > answers[1]["shape"][0]

    def jpeg(array: np.ndarray) -> str:
        out = io.BytesIO()
        Image.fromarray(array).save(out, "PNG")  # the name in the URL is vLLM's; what counts is the image
        return base64.b64encode(out.getvalue()).decode()

    url = "data:video/jpeg;base64," + ",".join(jpeg(shown[i]) for i in (0, 5, 10, 15, 20, 25))
    by_images = service.post(json={"model": str(qwen), "video": url, "fps": 2})
    assert by_images.status_code == 200, by_images.text
    assert by_images.json()["key"] == answers[2]["key"]


@pytest.mark.parametrize(
    ("fields", "files", "reason"),
    [
        ({"fps": "2"}, {"image": b"x"}, "bad_input"),
        ({"fps": "2", "num_frames": "2"}, {"video": b"x"}, "bad_input"),
        ({"fps": "-1"}, {"video": b"x"}, "bad_input"),
        ({}, {"video": b"x"}, "unknown_format"),
        ({}, {"audio": b"x"}, "modality"),
        ({}, {"video": b""}, "empty"),
    ],
)
def test_http_video_errors_name_cause(
    fields: dict[str, str],
    files: dict[str, bytes],
    reason: str,
    qwen: Path,
    qwen_registry: ModelRegistry,
    make_encoder: MakeEncoder,
    config: Config,
) -> None:
    service = Service(make_encoder(registry=qwen_registry), config)
    answer = service.post(data={"model": str(qwen), **fields}, files=files)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, reason)


def test_http_video_images_of_other_size_are_refused(
    qwen: Path, qwen_registry: ModelRegistry, make_encoder: MakeEncoder, config: Config
) -> None:
    def jpeg(image: Image.Image) -> str:
        out = io.BytesIO()
        image.save(out, "JPEG")
        return base64.b64encode(out.getvalue()).decode()

    service = Service(make_encoder(registry=qwen_registry), config)
    url = f"data:video/jpeg;base64,{jpeg(sample_image(1))},{jpeg(sample_image(1, 40, 40))}"
    answer = service.post(json={"model": str(qwen), "video": url})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "frame_size")
