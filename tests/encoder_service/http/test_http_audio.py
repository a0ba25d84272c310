"""Audio over HTTP, valid and hostile."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from cornplug.config import Config
from cornplug.encoder_service.model_registry import ModelRegistry
from devkit import checkpoints

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service
from ..recordings import encoded, tone, wav, wav_header

SPOKEN = tone(1.3)


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_audio(tmp_path_factory.mktemp("audio") / "q", seconds=4)


@pytest.fixture(scope="module")
def hearing(heard: Path) -> ModelRegistry:
    return ModelRegistry.open([str(heard)], dtype="float32", device="cpu")


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config, hearing: ModelRegistry) -> Service:
    small = config.encoder.model_copy(update={"max_media_s": 10.0})
    return Service(make_encoder(registry=hearing), config.model_copy(update={"encoder": small}))


def test_http_audio_by_form_json_and_containers_agree(service: Service, heard: Path) -> None:
    form = service.post(data={"model": str(heard)}, files={"audio": wav(SPOKEN)})
    assert form.status_code == 200, form.text
    flac = base64.b64encode(encoded(SPOKEN, "flac", "flac")).decode()
    by_json = service.post(json={"model": str(heard), "audio": flac}).json()
    assert (by_json["key"], by_json["data"]) == (form.json()["key"], form.json()["data"])
    image = base64.b64encode(png(sample_image(1))).decode()
    answer = service.post(json={"model": str(heard), "image": image})
    assert answer.json()["error"]["reason"] == "modality"


HOSTILE = {
    "nothing": (b"", "empty"),
    "0 s": (wav(tone(0.0)), "empty"),
    "ten hours": (wav_header(36_000 * 32_000), "damaged"),
    "over the limit": (wav(tone(11.0)), "too_long"),
    "cut short": (wav(SPOKEN)[:5000], "damaged"),
    "flac cut short": (encoded(SPOKEN, "flac", "flac")[:3000], ""),
    "an image": (png(sample_image(1)), ""),
    "a text": (b"hello" * 100, "unknown_format"),
    "a playlist": (b"#EXTM3U\nfile:///etc/passwd\n", ""),
    "a list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", ""),
    "a rate of 4 GHz": (wav_header(100, rate=4_000_000_000) + b"\0" * 100, ""),
    "32,000 channels": (wav_header(100, channels=32_000) + b"\0" * 100, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_http_audio_hostile_file_is_refused(service: Service, heard: Path, name: str) -> None:
    data, reason = HOSTILE[name]
    answer = service.post(data={"model": str(heard)}, files={"audio": data})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["reason"] == reason or not reason
    assert "passwd" not in answer.text


def test_http_audio_model_refuses_images(service: Service, heard: Path) -> None:
    answer = service.post(data={"model": str(heard)}, files={"image": png(sample_image(1))})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "modality")
    assert "audio" in answer.json()["error"]["message"]
    (row,) = service.call("GET", "/v1/models").json()["models"]
    assert row["modalities"] == ["audio"]
