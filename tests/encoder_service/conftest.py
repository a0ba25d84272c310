"""Tiny checkpoints made once, inputs from their own processors, and running services."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collaborators import kept
from PIL import Image
from transformers import AutoImageProcessor

from cornplug import identity
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.config import Config, load
from cornplug.encoder_service.batcher import EncodeJob
from cornplug.encoder_service.execution.encoder import EncoderCore, EncoderLimits
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.formats.messages import EncodeRequest, WireTensor
from cornplug.encoder_service.formats.tensors import to_wire
from cornplug.encoder_service.http.models import ModelsRoute
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.prepared_media import ImagePreprocessor
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.encoder_service.preprocess.whole_processor import WholeProcessor
from cornplug.store.memory import MemoryStore
from devkit import checkpoints

SECRET = b"s" * 32
torch.set_num_threads(1)


def sample_image(seed: int, width: int = 70, height: int = 60) -> Image.Image:
    """An image of coarse random patches: it survives resizing, unlike noise."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height))


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def inputs_of(path: Path, image: Image.Image) -> dict[str, WireTensor]:
    """One image's processor outputs, as an engine has them."""
    family = Checkpoint.open(str(path)).family
    asked = family.processor_defaults.get("image", {})
    made = AutoImageProcessor.from_pretrained(path)(images=image, return_tensors="pt", **asked)
    return {name: to_wire(made[name]) for name in family.inputs["image"]}


@pytest.fixture(scope="session", autouse=True)
def processors_tried_once() -> Iterator[None]:
    """Run each image processor on blank images once, not for each application of a test.

    These runs take half of the CPU time of making an application. Their results depend on these keys only.
    """
    alike, probed = ModelsRoute._has_fixed_rows, ImagePreprocessor._measure_probes
    rows: dict[tuple[bytes, MediaLimits], bool] = {}
    sizes: dict[tuple[str, str], tuple[int, int]] = {}

    def known_alike(route: ModelsRoute, model: str) -> bool:
        loaded = route._registry.find_by_name(model)
        assert loaded is not None
        key = loaded.served.identity, route._preparer._limits
        if key not in rows:
            rows[key] = alike(route, model)
        return rows[key]

    def known_probed(images: ImagePreprocessor) -> tuple[int, int]:
        if isinstance(images._processor, WholeProcessor):
            return probed(images)
        key = images._processor.to_json_string(), repr(images._processor_kwargs)
        if key not in sizes:
            sizes[key] = probed(images)
        return sizes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelsRoute, "_has_fixed_rows", known_alike)
        patch.setattr(ImagePreprocessor, "_measure_probes", known_probed)
        yield


@pytest.fixture(scope="session")
def llava_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two LLaVAs of different width with one CLIP tower."""
    root = tmp_path_factory.mktemp("llava")
    return (
        checkpoints.llava(root / "a", hidden_size=64, llm_seed=1),
        checkpoints.llava(root / "b", hidden_size=96, heads=3, llm_seed=2),
    )


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("qwen") / "q")


@pytest.fixture(scope="session")
def registry(llava_pair: tuple[Path, Path], qwen: Path) -> ModelRegistry:
    return ModelRegistry.open([str(p) for p in (*llava_pair, qwen)], dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def qwen_registry(qwen: Path) -> ModelRegistry:
    """One model only."""
    return ModelRegistry.open([str(qwen)], dtype="float32", device="cpu")


class Requests:
    """Makes `EncodeRequest`s as an engine would."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self._made: dict[tuple[Path, int], dict[str, WireTensor]] = {}

    def __call__(self, path: Path, seed: int, **changes: Any) -> EncodeRequest:
        loaded = self.registry.find_by_name(str(path))
        assert loaded is not None
        if (path, seed) not in self._made:
            self._made[path, seed] = inputs_of(path, sample_image(seed))
        salt = changes.get("cache_salt")
        fields: dict[str, Any] = {
            "id": 1,
            "identity": loaded.served.identity,
            "key": identity.embedding_key(SECRET, loaded.served.identity, bytes([seed]) * 32, salt),
            "cache_salt": salt,
            "inputs": self._made[path, seed],
            "app": "test",
            "deadline_s": 30.0,
            **changes,
        }
        return EncodeRequest(**fields)


@pytest.fixture(scope="session")
def request_for(registry: ModelRegistry) -> Requests:
    return Requests(registry)


MakeEncoder = Callable[..., EncoderCore]


def waiting_for_batch(encoder: EncoderCore) -> int:
    """Requests in its queue, as its metrics say."""
    return sum(requests for requests, _ in encoder.metrics.gauges.queue_by_class().values())


def joined(encoder: EncoderCore, requests: int) -> bool:
    """Whether so many requests wait for one job."""
    return any(len(job.requests) == requests for job in kept(encoder, EncodeJob))


@contextlib.contextmanager
def encoders(registry: ModelRegistry) -> Iterator[MakeEncoder]:
    """A factory of encoders, which are closed at the end. `store` None: no store."""
    made: list[EncoderCore] = []

    def make(store: Any = None, **options: Any) -> EncoderCore:
        cache = ResultCache(store, deadline_s=1.0, max_feature_bytes=options.pop("kept_bytes", 1 << 24))
        names = {field.name for field in fields(EncoderLimits)}
        limits = EncoderLimits(**{name: options.pop(name) for name in names & options.keys()})
        served = options.pop("registry", registry)
        encoder = EncoderCore(served, cache, secret=SECRET, limits=limits, **options)
        made.append(encoder)
        return encoder

    yield make
    for encoder in made:
        encoder.close()


@pytest.fixture
def make_encoder(registry: ModelRegistry) -> Iterator[MakeEncoder]:
    """Encoders that are closed at the end of the test."""
    with encoders(registry) as make:
        yield make


@pytest.fixture(scope="module")
def make_module_encoder(registry: ModelRegistry) -> Iterator[MakeEncoder]:
    """Encoders that the tests of a module share."""
    with encoders(registry) as make:
        yield make


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore(capacity_bytes=16 << 20)


def service_config(folder: Path) -> Config:
    """Settings of a service behind a gateway that may name tenants, as tests do."""
    said = {"socket": str(folder / "e.sock"), "port": 0, "names": "e", "trust_salts": True}
    return load({f"encoder.{name}": value for name, value in said.items()}, environ={})


@pytest.fixture
def config(short_path: Path) -> Config:
    return service_config(short_path)


@pytest.fixture(scope="module")
def module_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings for an application that the tests of a module share. Its path is too long for a socket."""
    return service_config(tmp_path_factory.mktemp("service"))


def eventually(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    """Wait until it holds; fails the test when it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def plant_modules(folder: Path, *names: str) -> None:
    """Modules in a working directory that leave a file there, and fail, when something imports them."""
    for name in names:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        trace = str(folder / f"imported-{name.replace('/', '-')}")
        file.write_text(f"open({trace!r}, 'w').close()\nraise SystemExit(9)\n")
