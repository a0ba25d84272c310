"""Weights replaced under a running service: served at once under other names, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from expected_errors import expect_error
from safetensors.torch import load_file, save_file

from cornplug import identity
from cornplug.encoder_service.batcher import EncodeResult
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.executor import InProcessExecutor
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.formats.messages import EncodeRefusal, EncodeReply, EncodeRequest
from cornplug.encoder_service.model_loader import LoadedModel
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer, MediaSource, PreprocessedMediaItem
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.encoder_service.replica import ReplicaSettings, open_replicas
from cornplug.errors import CheckpointError, EncoderRefused
from devkit import checkpoints

from .conftest import SECRET, MakeEncoder, eventually, inputs_of, png, sample_image, waiting_for_batch
from .execution.test_encoder import Gate, hold
from .test_unix_socket import RealService


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def pair(tmp_path: Path, llava_pair: tuple[Path, Path]) -> tuple[Path, Path]:
    """Copies to write over."""
    one, other = (shutil.copytree(path, tmp_path / path.name) for path in llava_pair)
    return one, other


@pytest.fixture
def encoder(pair: tuple[Path, Path], make_encoder: MakeEncoder) -> EncoderCore:
    return make_encoder(registry=ModelRegistry.open([str(p) for p in pair], dtype="float32", device="cpu"))


def request_of(registry: ModelRegistry, path: Path, seed: int) -> EncodeRequest:
    loaded = registry.find_by_name(str(path))
    assert loaded is not None
    model = loaded.served.identity
    return EncodeRequest(
        id=1,
        identity=model,
        key=identity.embedding_key(SECRET, model, bytes([seed]) * 32, None),
        cache_salt=None,
        inputs=inputs_of(path, sample_image(seed)),
        app="test",
        deadline_s=60.0,
    )


def embedded(future: Future[EncodeResult]) -> bytes:
    answer = future.result(60)
    assert isinstance(answer, EncodeReply), answer
    assert answer.tensor is not None
    return answer.tensor.data


def rewrite(path: Path, prefix: str, by: float = 0.01) -> None:
    """Other weights in the same bytes of the same file, with the old time stamp: the hardest to notice."""
    (file,) = path.glob("*.safetensors")
    before = file.stat()
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.startswith(prefix) and tensor.is_floating_point():
            tensor += by
    beside = path / "new"
    save_file(tensors, beside, metadata={"format": "pt"})
    file.write_bytes(beside.read_bytes())
    beside.unlink()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size, before.st_mtime_ns, before.st_ino,
    )  # fmt: skip


def test_reload_new_weights_have_new_identities(encoder: EncoderCore, pair: tuple[Path, Path]) -> None:
    old = request_of(encoder.registry, pair[0], 1)
    before = embedded(encoder.submit(old))
    rewrite(pair[0], "vision_tower.")
    (row,) = encoder.reload()
    assert (row.name, row.epoch) == (str(pair[0]), 1)
    new = request_of(encoder.registry, pair[0], 1)
    assert new.identity == row.identity != old.identity
    assert new.key != old.key
    after = embedded(encoder.submit(new))
    assert after != before
    fresh = ModelRegistry.open([str(pair[0])], dtype="float32", device="cpu").loaded_models()[0]
    item = fresh.tower.prepare(new.inputs)
    (want,) = fresh.projector.project(fresh.tower.encode([item]), [item])
    assert after == bytes(want.numpy().tobytes())
    refused = encoder.submit(old).result(60)
    assert isinstance(refused, EncodeRefusal)
    assert refused.reason == "unknown_model"
    assert [m.epoch for m in encoder.registry.served_models()] == [1, 0]


def test_reload_unchanged_weights_load_no_model(encoder: EncoderCore, pair: tuple[Path, Path]) -> None:
    before = encoder.registry.loaded_models()
    assert encoder.reload() == ()
    assert encoder.registry.loaded_models() == before


def test_reload_loads_changed_halves_only(encoder: EncoderCore, pair: tuple[Path, Path]) -> None:
    one, other = encoder.registry.loaded_models()
    rewrite(pair[1], "multi_modal_projector.")
    assert encoder.reload(str(pair[0])) == ()
    assert len(encoder.reload(str(pair[1]))) == 1
    same, new = encoder.registry.loaded_models()
    assert same is one
    assert new.tower is one.tower
    assert new.projector is not other.projector
    with expect_error(EncoderRefused, reason="unknown_model"):
        encoder.reload("nobody")


def test_reload_running_request_ends_with_its_first_weights(
    encoder: EncoderCore, pair: tuple[Path, Path], gate: Gate, make_encoder: MakeEncoder
) -> None:
    old = request_of(encoder.registry, pair[0], 2)
    gate.open.set()
    want = embedded(make_encoder(registry=encoder.registry).submit(old))
    gate.open.clear()
    gate.entered.clear()
    running = hold(encoder, gate, request_of(encoder.registry, pair[0], 1))
    queued = encoder.submit(old)
    eventually(lambda: waiting_for_batch(encoder) == 1)
    rewrite(pair[0], "vision_tower.")
    assert len(encoder.reload()) == 1
    gate.open.set()
    embedded(running)
    answer = queued.result(60)
    assert isinstance(answer, EncodeReply)
    assert answer.key == old.key
    assert embedded(queued) == want


def damaged(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])


def other_family(path: Path) -> None:
    shutil.rmtree(path)
    checkpoints.qwen2_vl(path)


def other_shape(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["intermediate_size"] *= 2
    (path / "config.json").write_text(json.dumps(config))


def gone(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged, "bad_header"),
        (other_family, "other_family"),
        (other_shape, "bad_tensors"),
        (gone, "not_found"),
    ],
)
def test_reload_that_fails_serves_as_before(
    encoder: EncoderCore, pair: tuple[Path, Path], change: Any, reason: str
) -> None:
    request = request_of(encoder.registry, pair[0], 1)
    before, served = embedded(encoder.submit(request)), encoder.registry.served_models()
    # The one that is good is not taken either: a deployment changes as a whole.
    rewrite(pair[1], "vision_tower.")
    change(pair[0])
    with expect_error(CheckpointError, reason=reason):
        encoder.reload()
    assert encoder.registry.served_models() == served
    assert embedded(encoder.submit(request)) == before


def test_reload_other_preprocessing_is_another_model(encoder: EncoderCore, pair: tuple[Path, Path]) -> None:
    limits = MediaLimits(max_pixels=10**6, max_media_s=10.0)
    preparer = MediaPreparer(encoder.registry, secret=SECRET, limits=limits)

    def prepared() -> PreprocessedMediaItem:
        source = MediaSource(
            model=str(pair[0]), modality="image", contents=[png(sample_image(1))], salt=None, deadline_s=1.0
        )
        return preparer.prepare(source)

    before = prepared()
    file = pair[0] / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.1, 0.2, 0.3]}))
    assert prepared().request == before.request
    assert len(encoder.reload()) == 1
    after = prepared()
    assert after.request.identity != before.request.identity
    assert not torch.equal(after.inputs["pixel_values"], before.inputs["pixel_values"])
    file.write_text("{}")
    (pair[0] / "processor_config.json").write_text(
        json.dumps({"image_processor": {"image_processor_type": "NoSuch"}})
    )
    with pytest.raises(CheckpointError):
        encoder.reload()
    assert prepared().request == after.request


class Full(InProcessExecutor):
    """An executor without room for a second tower."""

    def load(self, models: Sequence[LoadedModel]) -> None:
        raise CheckpointError("no room", reason="replica")


class Watched(InProcessExecutor):
    dropped: Sequence[LoadedModel] = ()

    def unload(self, models: Sequence[LoadedModel]) -> None:
        self.dropped = models


def test_reload_reaches_all_executors_or_none(pair: tuple[Path, Path], make_encoder: MakeEncoder) -> None:
    registry = ModelRegistry.open([str(p) for p in pair], dtype="float32", device="cpu")
    cpu = torch.device("cpu")
    good = Watched(cpu)
    encoder = make_encoder(registry=registry, executors=[good, Full(cpu)])
    served = registry.served_models()
    rewrite(pair[0], "vision_tower.")
    with expect_error(CheckpointError, reason="replica"):
        encoder.reload()
    assert registry.served_models() == served
    assert [loaded.served.name for loaded in good.dropped] == [str(pair[0])]


@pytest.fixture
def beside(pair: tuple[Path, Path]) -> Iterator[EncoderCore]:
    """With a replica."""
    registry = ModelRegistry.open([str(pair[0])], dtype="float32", device="meta")
    replicas = open_replicas(["cpu"], ReplicaSettings(dtype="float32", threads=1), registry.loaded_models())
    encoder = EncoderCore(registry, ResultCache(None, deadline_s=1.0), secret=SECRET, executors=replicas)
    yield encoder
    encoder.close()
    for replica in replicas:
        replica.close()


@pytest.mark.more
def test_replica_reload_frees_old_and_restarts_with_new_weights(
    beside: EncoderCore, pair: tuple[Path, Path]
) -> None:
    (replica,) = beside._executors
    (old,) = beside.registry.loaded_models()
    before = embedded(beside.submit(request_of(beside.registry, pair[0], 1)))
    rewrite(pair[0], "vision_tower.")
    beside.reload()
    (new,) = beside.registry.loaded_models()
    assert embedded(beside.submit(request_of(beside.registry, pair[0], 1))) != before
    eventually(lambda: old.served.identity not in replica._models)  # type: ignore[attr-defined]
    damaged(pair[0])
    with pytest.raises(CheckpointError):
        beside.reload()
    assert beside.is_healthy()
    assert set(replica._models) == {new.served.identity}  # type: ignore[attr-defined]


@pytest.mark.more
def test_server_sighup_reloads_weights(short_path: Path, pair: tuple[Path, Path]) -> None:
    service = RealService(short_path, [pair[0]])
    try:
        with SocketEncoder(service.socket, service.secret) as client:
            (before,) = client.describe(5)
            rewrite(pair[0], "vision_tower.")
            service.process.send_signal(signal.SIGHUP)
            eventually(lambda: client.describe(5)[0].identity != before.identity)
            assert client.describe(5)[0].epoch == 1
            damaged(pair[0])
            service.process.send_signal(signal.SIGHUP)
            eventually(lambda: "previous weights stay in use" in service.log.read_text())
            assert client.describe(5)[0].epoch == 1
    finally:
        service.end()
