"""Cached media cost no preprocessing, and repeated files no decoding: counted at the real calls."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cornplug.config import Config
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.encoder_service.http import app
from cornplug.encoder_service.preprocess.decoder_process import DecoderProcess
from cornplug.encoder_service.preprocess.prepared_media import VideoPreprocessor
from cornplug.encoder_service.preprocess.preparer import MediaPreparer
from cornplug.store.memory import MemoryStore

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service
from ..recordings import moving, video

JPEG = "JPEG"


class Counts:
    """Calls of image processors, of video processors, and jobs of decoding processes."""

    processed = 0
    decoded = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    from transformers.image_processing_utils import BaseImageProcessor

    counted = Counts()
    process, begin, clip = (
        BaseImageProcessor.__call__,
        DecoderProcess.assign_job,
        VideoPreprocessor._preprocess,
    )

    def call(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        # An image on "meta" has no pixels: a processor is only asked for its grid.
        counted.processed += getattr(images, "device", None) is None or images.device.type != "meta"
        return process(self, images, *args, **options)

    def start(self: DecoderProcess, *args: Any, **options: Any) -> Any:
        counted.decoded += 1
        return begin(self, *args, **options)

    def frames(self: VideoPreprocessor, *args: Any) -> Any:
        counted.processed += 1
        return clip(self, *args)

    monkeypatch.setattr(BaseImageProcessor, "__call__", call)
    monkeypatch.setattr(DecoderProcess, "assign_job", start)
    monkeypatch.setattr(VideoPreprocessor, "_preprocess", frames)
    return counted


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=64 << 20)


@pytest.fixture
def encoder(make_encoder: MakeEncoder, store: MemoryStore) -> EncoderCore:
    return make_encoder(store.connect())


@pytest.fixture
def service(encoder: EncoderCore, config: Config) -> Service:
    return Service(encoder, config)


def changed(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"encoder": config.encoder.model_copy(update=fields)})


def jpeg(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, JPEG, quality=100, subsampling=0, **options)
    return out.getvalue()


def ask(service: Service, model: Path, data: bytes, *, modality: str = "image", **fields: str) -> Any:
    # Decoders may start beside other work.
    fields = {"model": str(model), "deadline_s": "100", **fields}
    answer = service.post(data=fields, files={modality: data})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_repeated_file_is_neither_decoded_nor_processed(
    service: Service, llava_pair: tuple[Path, Path], qwen: Path, counts: Counts
) -> None:
    data = jpeg(sample_image(3, 640, 480))
    for model in (llava_pair[0], qwen):
        first = ask(service, model, data)
        before = (counts.processed, counts.decoded)
        assert min(before) >= 1
        again = ask(service, model, data)
        assert (first["origin"], again["origin"]) == ("computed", "cached")
        assert {**again, "origin": ""} | {"service_time_s": 0, "handle": ""} == {**first, "origin": ""} | {
            "service_time_s": 0,
            "handle": "",
        }
        assert (counts.processed, counts.decoded) == before
        mine, theirs = (EmbeddingHandle.parse(a["handle"]) for a in (again, first))
        assert mine.grid == theirs.grid
        assert bool(mine.grid) == (model == qwen)


def test_repeated_pixels_of_another_file_are_decoded_and_not_processed(
    service: Service, llava_pair: tuple[Path, Path], qwen: Path, counts: Counts
) -> None:
    for seed, model in ((41, llava_pair[0]), (42, qwen)):
        data = jpeg(sample_image(seed, 320, 200))
        first = ask(service, model, data)
        processed, decoded = counts.processed, counts.decoded
        again = ask(service, model, png(Image.open(io.BytesIO(data))))
        assert (again["origin"], again["key"], again["data"]) == ("cached", first["key"], first["data"])
        assert (counts.processed, counts.decoded) == (processed, decoded + 1)


def test_repeated_file_with_another_models_key_is_computed(
    service: Service, llava_pair: tuple[Path, Path], counts: Counts
) -> None:
    data = png(sample_image(5))
    one, other = (ask(service, model, data) for model in llava_pair)
    assert one["key"] != other["key"]
    assert other["origin"] == "cached"  # its tower's features
    assert counts.decoded == 2  # its embedding was not in the store: the file was decoded again


def test_repeated_file_of_another_tenant_is_decoded(service: Service, qwen: Path, counts: Counts) -> None:
    data = png(sample_image(6))
    mine, theirs = (ask(service, qwen, data, cache_salt=salt) for salt in ("a", "b"))
    assert mine["key"] != theirs["key"]
    assert counts.decoded == 2


def test_repeated_file_whose_entry_was_evicted_is_computed_again(
    service: Service, store: MemoryStore, qwen: Path, counts: Counts
) -> None:
    data = png(sample_image(8))
    first = ask(service, qwen, data)
    processed = counts.processed
    assert store.connect().delete([bytes.fromhex(first["key"])], deadline_s=1.0) == 1
    again = ask(service, qwen, data)
    assert (again["origin"], again["data"]) == ("computed", first["data"])
    assert (counts.processed, counts.decoded) == (processed + 1, 2)


def test_repeated_file_with_memo_off_is_decoded_and_not_processed(
    encoder: EncoderCore, config: Config, qwen: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MediaPreparer", partial(MediaPreparer, max_cached_files=0))
    service = Service(encoder, config)
    assert ask(service, qwen, png(sample_image(9)))["origin"] == "computed"
    processed = counts.processed
    assert ask(service, qwen, png(sample_image(9)))["origin"] == "cached"
    assert (counts.processed, counts.decoded) == (processed, 2)


def test_repeated_refused_file_is_refused_again(service: Service, qwen: Path, counts: Counts) -> None:
    broken = png(sample_image(10))[:-40]
    for _ in range(2):
        refused = service.post(data={"model": str(qwen)}, files={"image": broken})
        assert (refused.status_code, refused.json()["error"]["reason"]) == (422, "damaged")
    assert counts.decoded == 2


def test_repeated_video_is_decoded_once_for_each_sampling(
    service: Service, qwen: Path, counts: Counts
) -> None:
    data = video(moving(31), "matroska", "libx264rgb", pix_fmt="rgb24", crf="0")
    answers = [ask(service, qwen, data, modality="video", fps=fps) for fps in ("2", "5", "2", "5")]
    assert [a["origin"] for a in answers] == ["computed", "computed", "cached", "cached"]
    assert answers[0]["key"] == answers[2]["key"] != answers[1]["key"] == answers[3]["key"]
    assert (
        EmbeddingHandle.parse(answers[2]["handle"]).grid == EmbeddingHandle.parse(answers[0]["handle"]).grid
    )
    assert (counts.processed, counts.decoded) == (2, 2)


def test_repeated_file_counts_as_cached_request(service: Service, qwen: Path) -> None:
    for _ in range(3):
        ask(service, qwen, png(sample_image(11)))
    text = service.call("GET", "/metrics").text
    found = [line for line in text.splitlines() if 'origin="cached"' in line and "_total" in line]
    assert [line.rpartition(" ")[2] for line in found] == ["2.0"], found
