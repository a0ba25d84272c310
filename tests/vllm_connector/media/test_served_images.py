"""A chat request's images in an API process without a tower, through vLLM's own parser."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expected_errors import expect_error
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker, MultiModalItemTracker

from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.config import load
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.encoder_service.formats.messages import (
    MediaReply,
    MediaRequest,
    ServedModality,
    ServedModel,
    WireTensor,
)
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.errors import ConfigError, EncoderError, EncoderRefused, EncoderUnavailable
from cornplug.identity import embedding_key
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media import served_images
from cornplug.vllm_connector.media.embedding_handles import HANDLE_PREFIX, ReceivedHandles
from cornplug.vllm_connector.media.served_images import ServedImages, ServiceUnavailable

SECRET = b"s" * 32
IDENTITY = b"i" * 32
MEDIA = b"m" * 32
PNG = b"\x89PNG, which only the service reads"
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
TOWER = TowerIdentity(IDENTITY, IDENTITY)


class Service:
    """What a RemoteEncoder brings: this answer, or this error, and the requests that it was given."""

    def __init__(self) -> None:
        self.asked: list[MediaRequest] = []
        self.error: EncoderError | None = None
        self.changes: dict[str, Any] = {}
        self.models: tuple[ServedModel, ...] = (served("m", IDENTITY),)

    def __call__(self, urls: Any, secret: bytes) -> Service:
        return self

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def describe(self, deadline_s: float) -> tuple[ServedModel, ...]:
        if self.error is not None:
            raise self.error
        return self.models

    def submit_media(self, request: MediaRequest) -> Future[MediaReply]:
        self.asked.append(request)
        future: Future[MediaReply] = Future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        rows = np.random.default_rng(1).standard_normal((6, 8)).astype("<f4")
        claims: dict[str, Any] = {
            "family": "qwen2_vl",
            "modality": "image",
            "identity": IDENTITY,
            "media": MEDIA,
            "key": embedding_key(SECRET, IDENTITY, MEDIA, request.cache_salt),
            "dtype": "float32",
            "grid": (1, 4, 6),
            "expires": time.time() + 60,
        }
        secret = self.changes.get("secret", SECRET)
        told = {name: value for name, value in self.changes.items() if name in claims}
        handle = EmbeddingHandle(**{**claims, **told}).to_signed_text(secret)
        tensor = WireTensor("float32", (6, 8), rows.tobytes()[: self.changes.get("size", 192)])
        # A service of an older release sends no `decoding`.
        named = {} if self.changes.get("decoding", "?") is None else {"decoding": request.decoding}
        future.set_result(MediaReply(handle=handle, tensor=tensor, **named))
        return future


def served(name: str, identity: bytes) -> ServedModel:
    return ServedModel(
        name=name, family="qwen2_vl", identity=identity, tower_fp=b"", projector_fp=b"", spec_fp=b"",
        dtype="float32", hidden_size=8, modalities=(ServedModality("image", identity, b""),),
    )  # fmt: skip


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(served_images, "RemoteEncoder", made)
    return made


Make = Callable[..., ServedImages]


@pytest.fixture
def make(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """This process's images are the service's, for the length of the test."""
    for owner, name in (
        (MultiModalItemTracker, "create_parser"),
        (AsyncMultiModalItemTracker, "create_parser"),
        (BaseRenderer, "render_chat_async"),
        (BaseRenderer, "render_chat"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for module, target, wrapper in served_images.WRAPS:
        compat.wrap(module, target, wrapper)

    def make(
        family: str = "qwen2_vl",
        tower: TowerIdentity | None = TOWER,
        max_images: int | None = None,
        **settings: Any,
    ) -> ServedImages:
        config = load(
            {
                "encoder.engine_urls": "http://a:8750",
                "store.secret_file": str(tmp_path / "secret"),
                "engine.app": "chat",
                **settings,
            }
        )
        handles = ReceivedHandles(config, SECRET, lambda: IDENTITY, dtype="float32")
        made = ServedImages(
            config, SECRET, lambda: tower, handles, family=family, dtype="float32", max_images=max_images
        )
        monkeypatch.setattr(served_images, "_active", made)
        return made

    yield make
    served_images.deactivate()


def tracker(kind: type = AsyncMultiModalItemTracker, **fields: Any) -> Any:
    """vLLM's own tracker of a request's items, of a model that takes no image and any embedding."""
    mm_config = SimpleNamespace(
        enable_mm_embeds=True, get_limit_per_prompt=lambda modality: 0, media_io_kwargs=None
    )
    model = {
        "hf_config": SimpleNamespace(),
        "multimodal_config": mm_config,
        "allowed_local_media_path": "",
        "allowed_media_domains": None,
        **fields,
    }
    made = kind(SimpleNamespace(**model), media_io_kwargs=model.pop("media_io_kwargs", None))
    made.__dict__["model_cls"] = SimpleNamespace(get_placeholder_str=lambda modality, i: f"<image {i}>")
    return made


def parsed(made: Any, url: str | None = DATA_URL, uuid: str | None = None) -> Any:
    """The item that the parser made of an image."""
    parser = made.create_parser()
    parser.parse_image(url, uuid)
    (item,) = made._items_by_modality["image_embeds"]
    assert parser.mm_placeholder_storage() == {"<##IMAGE##>": ["<image 1>"]}
    return item if isinstance(item, tuple) else asyncio.run(item())


def test_parse_image_gives_the_services_rows_and_the_name_of_its_content(
    make: Make, service: Service
) -> None:
    for kind in (AsyncMultiModalItemTracker, MultiModalItemTracker):
        images = make()
        item, uuid = parsed(tracker(kind), uuid="mine")
        assert uuid == "mine"
        assert (item["image_embeds"].shape, item["image_grid_thw"]) == ((6, 8), [1, 4, 6])
        (asked,) = service.asked
        assert (asked.data, asked.url, asked.identity, asked.app) == (PNG, "", IDENTITY, "chat")
        key = embedding_key(SECRET, IDENTITY, MEDIA, None)
        named = images._handles.mm_hash_for({**item, "image_grid_thw": torch.tensor([1, 4, 6])}, "image", {})
        assert named == f"{HANDLE_PREFIX}{MEDIA.hex()}-{key.hex()}"
        service.asked.clear()
    rows, _ = (make("llava"), parsed(tracker()))[1]
    assert isinstance(rows, torch.Tensor)


def test_parse_image_is_decoded_as_this_vllm_does(
    make: Make, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    for version, rule in (("0.32.0+cpu", "vllm-0.32"), ("0.33.0+cpu", "vllm-0.33")):
        monkeypatch.setattr(VersionRange, "installed_version", lambda self, version=version: version)
        parsed(tracker())
        assert service.asked[-1].decoding == rule
    # A service of an older release decodes as vLLM 0.32, whatever it is asked for.
    service.changes["decoding"] = None
    with pytest.raises(
        ServiceUnavailable, match=r"with vllm-0.32, but this server needs vllm-0.33; update cornplug"
    ):
        parsed(tracker())
    monkeypatch.setattr(VersionRange, "installed_version", lambda self: "0.32.0")
    parsed(tracker())


def test_parse_image_of_a_web_address_leaves_fetching_to_the_service(make: Make, service: Service) -> None:
    make()
    parsed(tracker(), "https://images.example.org/a.png")
    (asked,) = service.asked
    assert (asked.data, asked.url) == (b"", "https://images.example.org/a.png")
    with pytest.raises(ValueError, match="domain"):
        parsed(tracker(allowed_media_domains=["b.org"]), "https://images.example.org/a.png")


def test_parse_image_of_a_file_follows_vllms_rule_for_local_media(
    make: Make, service: Service, tmp_path: Path
) -> None:
    make()
    (tmp_path / "a.png").write_bytes(PNG)
    url = f"file://{tmp_path}/a.png"
    parsed(tracker(allowed_local_media_path=str(tmp_path)), url)
    assert service.asked[0].data == PNG
    with pytest.raises((RuntimeError, ValueError), match="allowed-local-media-path"):
        parsed(tracker(), url)


def test_render_chat_async_hands_the_requests_salt_to_its_images(make: Make, service: Service) -> None:
    make()

    class Renderer(BaseRenderer):  # type: ignore[type-arg]
        def __init__(self) -> None:
            pass

        async def render_messages_async(self, messages: Any, params: Any) -> Any:
            made = tracker()
            made.create_parser().parse_image(DATA_URL)
            await made._items_by_modality["image_embeds"][0]()
            raise InterruptedError

    Renderer.__abstractmethods__ = frozenset()

    async def render(**extras: Any) -> None:
        with pytest.raises(InterruptedError):
            await Renderer().render_chat_async([[]], None, SimpleNamespace(), **extras)

    async def both() -> None:
        await asyncio.gather(render(prompt_extras={"cache_salt": "a"}), render(), render(prompt_extras={}))

    asyncio.run(both())
    assert sorted(asked.cache_salt or "" for asked in service.asked) == ["", "", "a"]


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (EncoderUnavailable("no service answers at http://a:8750", reason="encoder_down"), "2 s"),
        (EncoderUnavailable("no answer from http://a:8750 in time", reason="encoder_timeout"), "2 s"),
        (EncoderRefused("http://a:8750: full", reason="overloaded", retry_after_s=7.2), "8 s"),
        (EncoderRefused("http://a:8750: share", reason="over_share", retry_after_s=0.1), "1 s"),
        (EncoderRefused("http://a:8750: URLs wait", reason="fetches_full", retry_after_s=2.5), "3 s"),
        (EncoderRefused("http://a:8750: no tower", reason="unknown_model"), "2 s"),
    ],
)
def test_service_that_does_not_answer_is_a_503_that_names_it(
    make: Make, service: Service, error: EncoderError, pause: str
) -> None:
    make()
    service.error = error
    with pytest.raises(ServiceUnavailable, match=f"http://a:8750.*try again in {pause}") as e:
        parsed(tracker())
    assert e.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE
    service.error = None
    parsed(tracker())


def test_served_images_medium_that_cannot_be_read_is_the_clients_error(make: Make, service: Service) -> None:
    make()
    service.error = EncoderRefused("image_url: not an image", reason="unknown_format")
    with pytest.raises(VLLMValidationError, match="not an image"):
        parsed(tracker())


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": b"t" * 32},
        {"identity": b"j" * 32},
        {"key": embedding_key(SECRET, IDENTITY, MEDIA, "another")},
        {"modality": "video"},
        {"dtype": "bfloat16"},
        {"expires": 1.0},
        {"size": 100},
    ],
)
def test_rows_that_are_not_proved_to_be_the_engines_are_never_used(
    make: Make, service: Service, changes: dict[str, Any]
) -> None:
    images = make()
    service.changes = changes
    with pytest.raises(ServiceUnavailable):
        parsed(tracker())
    assert not images._handles._claims


def test_parse_image_refuses_what_only_an_engine_with_a_tower_does(make: Make) -> None:
    make(max_images=1)
    with pytest.raises(VLLMValidationError, match="send the image together"):
        parsed(tracker(), None, uuid="known")
    with pytest.raises(VLLMValidationError, match="with vLLM's defaults"):
        parsed(tracker(media_io_kwargs={"image": {"image_mode": "L"}}))
    two = tracker()
    two.create_parser().parse_image(DATA_URL)
    with pytest.raises(VLLMValidationError, match="At most 1 image"):
        two.create_parser().parse_image(DATA_URL)


def test_check_of_another_tower_ends_the_start_and_of_no_service_does_not(
    make: Make, service: Service
) -> None:
    images = make()
    images.check(TOWER, "m")
    service.models = (served("other", b"o" * 32),)
    with expect_error(ConfigError, field="--cornplug-encoder", match="http://a:8750.*--model m"):
        images.check(TOWER, "m")
    with expect_error(ConfigError, field="--cornplug-tower service", match="mm-processor-kwargs"):
        images.check(TowerIdentity(IDENTITY, None), "m")
    service.error = EncoderUnavailable("down", reason="encoder_down")
    images.check(TOWER, "m")


def test_parse_image_of_an_unidentified_checkpoint_asks_no_service(make: Make, service: Service) -> None:
    make(tower=None)
    with pytest.raises(ServiceUnavailable, match="not identified"):
        parsed(tracker())
    assert not service.asked
