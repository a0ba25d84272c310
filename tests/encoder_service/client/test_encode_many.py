"""Many media in one request: parts read off the wire, and what a failing service leaves undone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.config import Config
from cornplug.encoder_service.client.http_transport import MultipartReader
from cornplug.encoder_service.client.sync_client import AsyncEncoderClient, EmbeddingRef, EncoderClient
from cornplug.encoder_service.http.app import create_app
from cornplug.errors import EncoderRefused, EncoderUnavailable

from ..conftest import SECRET, MakeEncoder, png, sample_image
from ..services import Behaviour, Misbehaving, Served, half, resets, says, says_nothing

KIND = 'multipart/mixed; boundary="b0"'


def packed(*bodies: bytes) -> bytes:
    parts = [
        b"--b0\r\nContent-Length: %d\r\nx-n: %d\r\n\r\n%s\r\n" % (len(b), i, b) for i, b in enumerate(bodies)
    ]
    return b"".join(parts) + b"--b0--\r\n"


@given(
    st.lists(st.binary(max_size=50) | st.just(b"\r\n--b0--\r\n"), max_size=5), st.lists(st.integers(1, 40))
)
def test_multipart_reader_any_chunks_give_same_parts(bodies: list[bytes], cuts: list[int]) -> None:
    wire = packed(*bodies)
    parts, found, at = MultipartReader(KIND), [], 0
    for cut in [*cuts, len(wire)]:
        found += parts.feed(wire[at : at + cut])
        at += cut
    assert [body for _, body in found] == bodies
    assert [head["x-n"] for head, _ in found] == [str(i) for i in range(len(bodies))]
    assert parts.ended


@pytest.mark.parametrize(
    "wire",
    [
        b"--b1\r\n\r\n",
        b"hello\r\n\r\n",
        b"--b0\r\nx: y\r\n\r\n",
        b"--b0\r\ncontent-length: 99999999999\r\n\r\n",
        b"x" * 70_000,
    ],
)
def test_multipart_reader_invalid_bytes_raise(wire: bytes) -> None:
    with pytest.raises(EncoderUnavailable):
        MultipartReader(KIND).feed(wire)
    with pytest.raises(EncoderUnavailable):
        MultipartReader("application/json")


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


def counted(app: Any) -> tuple[Any, list[str]]:
    """The application, and the paths that were asked for."""
    asked: list[str] = []

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.append(scope["path"])
        await app(scope, receive, send)

    return counting, asked


@pytest.mark.more
def test_encode_many_shares_requests_and_equals_encode(app: Any, llava: str) -> None:
    counting, asked = counted(app)
    items = [png(sample_image(seed)) for seed in range(40)]
    with Served(counting) as server, EncoderClient(server.url, deadline_s=60) as client:
        found = dict(client.encode_many(items, model=llava, cache_salt="s"))
        assert len(asked) <= 8
        for index in (0, 17, 39):
            one, alone = found[index], client.encode(items[index], model=llava, cache_salt="s")
            assert isinstance(one, EmbeddingRef)
            assert (one.key, one.shape, bytes(one.data)) == (alone.key, alone.shape, bytes(alone.data))
            assert alone.origin == "cached"
            assert one.handle is not None


def test_encode_many_bad_item_fails_alone(good: Served, llava: str) -> None:
    items = [png(sample_image(seed)) if seed % 5 else b"no image" for seed in range(20)]
    with EncoderClient(good.url, deadline_s=60) as client:
        found = dict(client.encode_many(items, model=llava))
        assert {i for i, r in found.items() if isinstance(r, EncoderRefused)} == {0, 5, 10, 15}
        unknown = dict(client.encode_many(items, model="nobody"))
    assert {getattr(r, "reason", None) for r in unknown.values()} == {"unknown_model"}


BUSY = b'{"error": {"reason": "overloaded", "message": "m", "retry_after_s": 30}}'
ONE_PART = b"--b\r\ncontent-length: 3\r\nx-cornplug-index: 99\r\nx-cornplug-key: 00\r\n\r\nabc\r\n"
FAULTS: dict[str, Behaviour] = {
    "reset": resets,
    "half": half,
    "silence": says_nothing,
    "busy": says(503, BUSY),
    "internal": says(500, b'{"error": {"reason": "internal", "message": "m"}}'),
    "too large": says(413, b'{"error": {"reason": "too_many_items", "message": "m"}}'),
    "another index": says(200, ONE_PART, content_type="multipart/mixed; boundary=b"),
    "nothing in it": says(200, b"--b--\r\n", content_type="multipart/mixed; boundary=b"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_encode_many_with_faulty_service_answers_all_items(fault: str, good: Served, llava: str) -> None:
    if fault == "too large":
        # Its refusal of single items would be final: alone they are not too many.
        single, many = says(503, BUSY), FAULTS[fault]

        async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await (many if bad.requests[-1].count(b"filename=") > 1 else single)(reader, writer)
    else:
        behave = FAULTS[fault]  # type: ignore[assignment]
    items = [png(sample_image(seed)) for seed in range(6)]
    with Misbehaving(behave) as bad:
        urls = {bad.url: 1e6, good.url: 1.0}
        with EncoderClient(urls, deadline_s=3 if fault in ("silence", "dripping") else 20) as client:
            found = dict(client.encode_many(items, model=llava))
        assert bad.requests[0].count(b"filename=") == 6
    assert [r for r in found.values() if not isinstance(r, EmbeddingRef)] == []
    assert len(found) == 6


def test_encode_many_service_dying_midway_keeps_its_answers(good: Served, llava: str) -> None:
    """What came is not asked for again."""
    items = [png(sample_image(seed)) for seed in range(4)]
    with EncoderClient(good.url, deadline_s=60) as client:
        made = client.encode(items[0], model=llava)
        head = (
            f"--b\r\ncontent-length: {len(made.data)}\r\nx-cornplug-index: 0\r\n"
            f"x-cornplug-key: {made.key.hex()}\r\ncontent-type: application/octet-stream\r\n"
            f"x-cornplug-shape: 16,64\r\n"
            f"x-cornplug-dtype: float32\r\nx-cornplug-origin: coalesced\r\n"
            f"x-cornplug-service-time-s: 1\r\n\r\n"
        )

        async def some(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            kind = b"content-type: multipart/mixed; boundary=b\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n" + kind + b"\r\n")
            writer.write(head.encode() + bytes(made.data) + b"\r\n--b\r\n")
            await writer.drain()
            writer.close()

        with Misbehaving(some) as bad, EncoderClient({bad.url: 1e6, good.url: 1.0}, deadline_s=20) as both:
            found = dict(both.encode_many(items, model=llava))
    origins = {i: r.origin for i, r in found.items() if isinstance(r, EmbeddingRef)}
    assert origins[0] == "coalesced"
    assert sorted(origins) == [0, 1, 2, 3]


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
