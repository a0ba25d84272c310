"""Many media: each item gets its result, whatever a service does."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cornplug.config import Config
from cornplug.encoder_service.client.sync_client import AsyncEncoderClient, EmbeddingRef, EncoderClient
from cornplug.encoder_service.formats.engine_seal import EMBEDDING_MEDIA_TYPE as SAFETENSORS
from cornplug.encoder_service.http.app import create_app
from cornplug.errors import EncoderRefused, MediaError

from ..conftest import SECRET, MakeEncoder, png, sample_image
from ..services import Behaviour, Misbehaving, Served, half, resets, says, says_nothing


@pytest.fixture
def app(make_encoder: MakeEncoder, config: Config) -> Any:
    return create_app(make_encoder(), config.encoder, secret=SECRET)


@pytest.fixture(scope="module")
def good(make_module_encoder: MakeEncoder, module_config: Config) -> Iterator[Served]:
    """A service that works, beside faulty ones. The tests of this module share it, with its cache."""
    app = create_app(make_module_encoder(), module_config.encoder, secret=SECRET)
    with Served(app) as served:
        yield served


@pytest.fixture
def llava(llava_pair: tuple[Path, Path]) -> str:
    return str(llava_pair[0])


def test_encode_many_equals_encode(app: Any, llava: str) -> None:
    items = [png(sample_image(seed)) for seed in range(10)]
    with Served(app) as server, EncoderClient(server.url, deadline_s=60) as client:
        found = dict(client.encode_many(items, model=llava, cache_salt="s"))
        for index in (0, 9):
            one, alone = found[index], client.encode(items[index], model=llava, cache_salt="s")
            assert isinstance(one, EmbeddingRef)
            assert (one.key, one.shape, bytes(one.data)) == (alone.key, alone.shape, bytes(alone.data))
            assert alone.origin == "cached"
            assert one.handle is not None


def test_encode_many_bad_item_fails_alone(good: Served, llava: str) -> None:
    items = [png(sample_image(seed)) if seed % 5 else b"no image" for seed in range(20)]
    damaged = Image.open(io.BytesIO(png(sample_image(1))[:200]))
    bad: list[Any] = ["a\0path", 5, damaged]
    with EncoderClient(good.url, deadline_s=60) as client:
        found = dict(client.encode_many([*items, *bad], model=llava))
        assert {i for i, r in found.items() if isinstance(r, EncoderRefused)} == {0, 5, 10, 15}
        assert all(isinstance(found[len(items) + i], MediaError) for i in range(len(bad)))
        unknown = dict(client.encode_many(items, model="nobody"))
    assert {getattr(r, "reason", None) for r in unknown.values()} == {"unknown_model"}


BUSY = b'{"error": {"reason": "overloaded", "message": "m", "retry_after_s": 30}}'
FAULTS: dict[str, Behaviour] = {
    "reset": resets,
    "half": half,
    "silence": says_nothing,
    "busy": says(503, BUSY),
    "internal": says(500, b'{"error": {"reason": "internal", "message": "m"}}'),
    "not an embedding": says(200, b"x", content_type=SAFETENSORS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_encode_many_with_faulty_service_answers_all_items(fault: str, good: Served, llava: str) -> None:
    items = [png(sample_image(seed)) for seed in range(6)]
    with Misbehaving(FAULTS[fault]) as bad:
        urls = {bad.url: 1e6, good.url: 1.0}
        with EncoderClient(urls, deadline_s=3 if fault == "silence" else 20) as client:
            found = dict(client.encode_many(items, model=llava))
        assert bad.requests
    assert [r for r in found.values() if not isinstance(r, EmbeddingRef)] == []
    assert len(found) == 6


def test_encode_many_no_service_fails_all_items_in_time() -> None:
    with EncoderClient("http://127.0.0.1:9", deadline_s=5) as client:
        found = dict(client.encode_many([b"a", b"b", b"c"], model="m"))
    reasons = {getattr(r, "reason", None) for r in found.values()}
    assert len(found) == 3
    assert reasons <= {"encoder_down", "encoder_backoff"}


def test_async_encoder_client_closed_iterator_leaves_no_tasks(app: Any, llava: str) -> None:
    async def use() -> int:
        before = len(asyncio.all_tasks())
        async with AsyncEncoderClient(server.url, deadline_s=60) as client:
            results = client.encode_many(
                (png(sample_image(seed % 5)) for seed in itertools.count()), model=llava, concurrency=8
            )
            async for _index, _result in results:
                break
            await results.aclose()
        return len(asyncio.all_tasks()) - before

    with Served(app) as server:
        assert asyncio.run(use()) == 0
