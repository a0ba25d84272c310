"""The encoder-cache worker, and what the service is sent: bytes in, bytes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from collaborators import recorded
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm, IdentityInputNorm
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from cornplug.checkpoints.model_family import PIXEL_NORM
from cornplug.codec import PayloadKind
from cornplug.encoder_service.towers.qwen2_vl import normalise
from cornplug.engine_common import embeddings
from cornplug.engine_common.embeddings import EmbeddingPublisher
from cornplug.errors import EncoderRefused
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import get_payload
from cornplug.testing import FaultyStore
from cornplug.vllm_connector import ec_connector
from cornplug.vllm_connector.ec_connector import CornplugECConnector
from cornplug.vllm_connector.media import encoder_requests
from cornplug.vllm_connector.media import worker as ec_worker
from cornplug.vllm_connector.media.encoder_requests import MediaInputs
from cornplug.vllm_connector.media.metadata import ArrivedEmbedding, CornplugECMetadata
from cornplug.vllm_connector.media.worker import ECWorker

from ..rig import runtime

NAME, KEY = "cp1-" + "ab" * 32, b"\xab" * 32


_publishers: list[EmbeddingPublisher] = []


@pytest.fixture(autouse=True)
def publishers() -> Iterator[None]:
    """Record the publishers of this test's workers."""
    with recorded(ec_worker, "EmbeddingPublisher") as made, mock.patch(f"{__name__}._publishers", made):
        yield


def published(worker: ECWorker) -> list[tuple[str, int]]:
    """Outcomes, once the publishers have nothing to do."""
    for publisher in _publishers:
        publisher.flush(60)
    acks = worker.take_acks()
    return acks.saves if acks is not None else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ec_worker_published_embedding_loads_in_another(store: MemoryStore, dtype: torch.dtype) -> None:
    worker = ECWorker(runtime(store.connect()), publishes=True, device="cpu")
    value = torch.randn(9, 8).to(dtype)[::3]  # not contiguous
    worker.save(NAME, value, CornplugECMetadata())
    assert published(worker) == [("stored", 3 * 8 * value.element_size())]
    found = get_payload(store.connect(), KEY, deadline_s=1)
    assert found is not None
    header, payload = found
    assert (header.kind, header.shape) == (PayloadKind.EMBEDDING, (3, 8))
    cache: dict[str, torch.Tensor] = {}
    worker.load(cache, CornplugECMetadata([ArrivedEmbedding(NAME, header.dtype, header.shape, payload)]))
    assert cache[NAME].dtype == dtype
    assert torch.equal(cache[NAME], value)
    worker.save(NAME, value, CornplugECMetadata())
    assert published(worker) == [("present", 3 * 8 * value.element_size())]
    assert worker.take_acks() is None
    worker.close()


@pytest.mark.parametrize(
    ("name", "value", "moves", "publishes"),
    [
        ("uuid", torch.ones(2, 2), CornplugECMetadata(), True),
        ("local-" + "ab" * 32, torch.ones(2, 2), CornplugECMetadata(), True),
        ("3:" + NAME, torch.ones(2, 2), CornplugECMetadata(), True),
        (NAME, torch.ones(2, 2), CornplugECMetadata(publish=False), True),
        (NAME, torch.ones(2, 2), CornplugECMetadata(epoch=2), True),
        (NAME + "-2", torch.ones(2, 2), CornplugECMetadata(epoch=4), True),
        (NAME, torch.ones(2, 2), CornplugECMetadata(), False),
        (NAME, torch.ones(2, 2, 2), CornplugECMetadata(), True),
    ],
)
def test_ec_worker_foreign_or_disabled_is_not_published(
    store: MemoryStore, name: str, value: torch.Tensor, moves: CornplugECMetadata, publishes: bool
) -> None:
    worker = ECWorker(runtime(store.connect()), publishes=publishes, device="cpu")
    worker.save(name, value, moves)
    assert published(worker) == []
    assert store.connect().stat(deadline_s=1).entries == 0


def test_ec_worker_store_failure_is_save_outcome(faulty: FaultyStore) -> None:
    worker = ECWorker(runtime(faulty), publishes=True, device="cpu")
    faulty.unavailable = True
    worker.save(NAME, torch.ones(2, 2), CornplugECMetadata())
    assert published(worker) == [("store_down", 16)]
    faulty.unavailable, faulty.full = False, True
    worker.save(NAME, torch.ones(2, 2), CornplugECMetadata())
    assert published(worker) == [("full", 16)]


def test_ec_worker_publish_error_frees_queue_place(store: MemoryStore) -> None:
    worker = ECWorker(runtime(store.connect()), publishes=True, device="cpu")
    with (
        mock.patch.object(embeddings, "put_payload", side_effect=RuntimeError("device")),
        mock.patch.object(embeddings, "_MAX_QUEUED", 4),
    ):
        for _ in range(12):
            worker.save(NAME, torch.ones(2, 2), CornplugECMetadata())
            published(worker)
    worker.save(NAME, torch.ones(2, 2), CornplugECMetadata())
    assert published(worker) == [("stored", 16)]


def test_ec_worker_slow_store_bounds_publish_queue(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_MAX_QUEUED", 2)
    go = threading.Event()
    with mock.patch.object(embeddings, "put_payload", side_effect=lambda *a, **k: go.wait(60) and "stored"):
        worker = ECWorker(runtime(store.connect()), publishes=True, device="cpu")
        for _ in range(5):
            worker.save(NAME, torch.ones(2, 2), CornplugECMetadata())
        acks = worker.take_acks()
        assert acks is not None
        assert acks.saves == [("busy", 0)] * 3
        go.set()
        assert published(worker) == [("stored", 16)] * 2


def test_ec_connector_for_text_model_does_nothing() -> None:
    connector = facade(None, ECConnectorRole.SCHEDULER)
    request: Any = SimpleNamespace(mm_features=[])
    output: Any = SimpleNamespace(
        free_encoder_mm_hashes=[], total_num_scheduled_tokens=1, ec_connector_worker_meta=None
    )
    assert connector.ensure_cache_available(request, 0)
    assert not connector.has_cache_item(NAME)
    connector.update_state_after_alloc(request, 0)
    assert connector.build_connector_meta(output) == CornplugECMetadata(publish=False)
    connector.update_connector_output(output)
    assert connector.request_finished(request) == (False, None)
    assert connector.get_ec_connector_stats() is None
    connector.shutdown()


def test_ec_connector_worker_loads_and_saves(store: MemoryStore) -> None:
    connector = facade(store, ECConnectorRole.WORKER)
    cache = {NAME: torch.ones(2, 4)}
    # A profiling run encodes outside of a step.
    connector.save_caches(cache, NAME)
    assert connector.build_connector_worker_meta() is None
    connector.bind_connector_metadata(
        CornplugECMetadata([ArrivedEmbedding("cp1-x", "float32", (1, 1), bytearray(4))])
    )
    connector.start_load_caches(cache)
    assert torch.equal(cache["cp1-x"], torch.zeros(1, 1))
    connector.save_caches(cache, NAME)
    end_s = time.monotonic() + 30
    metas: list[Any] = []
    while not metas or not metas[-1].saves:
        assert time.monotonic() < end_s
        metas += [meta] if (meta := connector.build_connector_worker_meta()) is not None else []
    assert metas[-1].saves == [("stored", 32)]
    [(rows, encoded_s)] = metas[0].encode_times
    assert (rows, encoded_s > 0) == (2, True)
    [(size, copied_s)] = metas[0].load_times
    assert (size, copied_s > 0) == (4, True)
    connector.shutdown()


def facade(
    store: MemoryStore | None, role: ECConnectorRole, *, consumer: bool = True, half: Any = None
) -> CornplugECConnector:
    """A connector over a store, or with this scheduler half."""
    config: Any = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=True, is_ec_consumer=consumer, ec_connector_extra_config={}
        ),
        model_config=SimpleNamespace(multimodal_config=object() if store or half else None),
        parallel_config=SimpleNamespace(rank=0),
        device_config=SimpleNamespace(device="cpu"),
    )
    over = runtime((store or MemoryStore(capacity_bytes=1 << 16)).connect())
    early, scheduler = ec_connector.create_early_prefill, ec_connector.ECScheduler
    if half is not None:
        early, scheduler = (lambda config: None), (lambda *_, **__: half)  # type: ignore[assignment, misc]
    with (
        mock.patch.object(ec_connector, "get_runtime", side_effect=lambda extra: over),
        mock.patch.object(ec_connector, "create_early_prefill", early),
        mock.patch.object(ec_connector, "ECScheduler", scheduler),
    ):
        return CornplugECConnector(config, role)


# -- what the service is sent -----------------------------------------------------------------


def inputs(norm: Any, model_type: str = "qwen2_vl") -> MediaInputs:
    model: Any = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
    with (
        mock.patch("vllm.config.set_current_vllm_config"),
        mock.patch("vllm.model_executor.layers.fusion.mm_input_norm.build_mm_input_norm", return_value=norm),
        mock.patch.object(encoder_requests, "is_media_in_workers_only", return_value=False),
    ):
        return MediaInputs(SimpleNamespace(model_config=model))  # type: ignore[arg-type]


def item(**tensors: Any) -> MultiModalFeatureSpec:
    data = MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=t, field=MultiModalBatchedField()) for name, t in tensors.items()}
    )
    return MultiModalFeatureSpec(data, "image", NAME, PlaceholderRange(0, 4))


def test_media_inputs_keep_values_dtype_and_shape() -> None:
    pixels = torch.randn(3, 4, 4, dtype=torch.bfloat16)
    grid = torch.tensor([1, 2, 2])
    sent = inputs(IdentityInputNorm()).tower_inputs(
        item(pixel_values=pixels.transpose(1, 2), image_grid_thw=grid, other=torch.ones(1))
    )
    assert set(sent) == {"pixel_values", "image_grid_thw"}
    assert (sent["pixel_values"].dtype, sent["pixel_values"].shape) == ("bfloat16", (3, 4, 4))
    read = torch.frombuffer(bytearray(sent["pixel_values"].data), dtype=torch.bfloat16).view(3, 4, 4)
    assert torch.equal(read, pixels.transpose(1, 2))
    assert (sent["image_grid_thw"].dtype, sent["image_grid_thw"].shape) == ("int64", (3,))


def test_media_inputs_scalar_keeps_shape_and_value() -> None:
    sent = inputs(IdentityInputNorm()).tower_inputs(
        item(pixel_values=torch.ones(1), image_grid_thw=torch.tensor(7))
    )
    assert sent["image_grid_thw"].shape == ()
    assert int.from_bytes(sent["image_grid_thw"].data, "little") == 7


@pytest.mark.parametrize(
    ("model_type", "sent"),
    [
        ("llava", {"pixel_values"}),
        ("llava_next", {"pixel_values", "image_sizes"}),
        ("internvl", {"pixel_values"}),
        ("gemma3", {"pixel_values"}),
        ("qwen2_vl", {"pixel_values", "image_grid_thw"}),
    ],
)
def test_media_inputs_hold_only_fields_of_family(model_type: str, sent: set[str]) -> None:
    """Not what else a processor counts: the service refuses what its tower does not take."""
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(model_type=model_type),
        multimodal_config=None,
        supports_multimodal_inputs=False,
    )
    made = MediaInputs(config)
    fields = ("pixel_values", "image_grid_thw", "image_sizes", "num_patches", "pixel_attention_mask")
    assert set(made.tower_inputs(item(**dict.fromkeys(fields, torch.ones(2))))) == sent


CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constants", [CLIP, ([0.5] * 3, [0.5] * 3), None])
def test_media_inputs_raw_pixels_are_normalised_by_the_tower_as_by_vllm(
    dtype: torch.dtype, constants: tuple[list[float], list[float]] | None
) -> None:
    """Every value of a pixel in every channel, bit for bit. `None`: vLLM only casts pixels."""
    own = IdentityInputNorm() if constants is None else norm(*constants)
    values = torch.arange(256, dtype=torch.uint8)
    pixels = torch.stack([values.repeat(3), values.flip(0).repeat(3)])
    sent = inputs(own).tower_inputs(item(pixel_values=pixels))
    assert sent["pixel_values"].dtype == "uint8"
    assert bytes(sent["pixel_values"].data) == pixels.numpy().tobytes()
    constant = sent[PIXEL_NORM]
    read = torch.frombuffer(bytearray(constant.data), dtype=torch.float32).view(constant.shape)
    native = getattr(own, "forward_native", own.forward)
    assert torch.equal(normalise(pixels, read, dtype), native(pixels, dtype))
    # So were they computed before a tower normalised them: in float32, then cast by the service.
    assert torch.equal(normalise(pixels, read, dtype), native(pixels, torch.float32).to(dtype))


def test_media_inputs_raw_pixels_of_other_towers_are_normalised() -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    pixels = torch.randint(0, 256, (5, 12), dtype=torch.uint8)
    found = inputs(norm(mean, std), "llava").tower_inputs(item(pixel_values=pixels))["pixel_values"]
    wanted = (pixels.view(5, 3, 4) / 255 - torch.tensor(mean)[:, None]) / torch.tensor(std)[:, None]
    read = torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(found.shape)
    assert found.dtype == "float32"
    torch.testing.assert_close(read, wanted.view(5, 12))
    raw = inputs(IdentityInputNorm(), "llava").tower_inputs(item(pixel_values=pixels))["pixel_values"]
    assert torch.equal(torch.frombuffer(bytearray(raw.data), dtype=torch.float32).view(5, 12), pixels.float())


def norm(mean: list[float], std: list[float]) -> FusedMMInputNorm:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return FusedMMInputNorm(mean, std, 1 / 255)


@pytest.mark.parametrize(("kind", "reason"), [("lru", "no_inputs"), ("shm", "shm_cache")])
def test_media_inputs_in_workers_only_are_refused(
    kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import VllmConfig

    cache = SimpleNamespace(mm_processor_cache_type=kind, mm_processor_cache_gb=4)
    config = VllmConfig()
    config.model_config = SimpleNamespace(  # type: ignore[assignment]
        hf_config=SimpleNamespace(model_type="llava"),
        multimodal_config=None,
        supports_multimodal_inputs=True,
        get_multimodal_config=lambda: cache,
    )
    with pytest.raises(EncoderRefused) as error:
        MediaInputs(config).tower_inputs(item(address=torch.ones(1), monotonic_id=torch.ones(1)))
    assert error.value.reason == reason
    assert ("--mm-processor-cache-type" in caplog.text) is (kind == "shm")


@pytest.mark.parametrize(
    "feature",
    [
        MultiModalFeatureSpec(None, "image", NAME, PlaceholderRange(0, 4)),
        item(image_grid_thw=torch.ones(3)),
        item(pixel_values=[torch.ones(3), torch.ones(4)]),
        MultiModalFeatureSpec(item(pixel_values=torch.ones(3)).data, "video", NAME, PlaceholderRange(0, 4)),
    ],
)
def test_media_inputs_without_pixels_are_refused(feature: MultiModalFeatureSpec) -> None:
    with pytest.raises(EncoderRefused) as error:
        inputs(IdentityInputNorm()).tower_inputs(feature)
    assert error.value.reason == "no_inputs"
