"""The HTTP clients against real services and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from expected_errors import expect_error
from safetensors.torch import save
from time_limits import TimeLimits

from cornplug.config import Config, load
from cornplug.encoder_service.client import endpoints
from cornplug.encoder_service.client.async_client import MediaPayload
from cornplug.encoder_service.client.sync_client import AsyncEncoderClient, EmbeddingRef, EncoderClient
from cornplug.encoder_service.formats.engine_seal import EMBEDDING_MEDIA_TYPE as SAFETENSORS
from cornplug.encoder_service.http.app import create_app
from cornplug.errors import EncoderRefused, EncoderUnavailable, MediaError
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import get_payload
from cornplug.testing.store import contains, fill
from devkit.processes import EncoderProcess

from ..conftest import SECRET, MakeEncoder, png, sample_image
from ..services import (
    Misbehaving,
    Served,
    drips,
    drips_body,
    half,
    raves,
    resets,
    says,
    says_nothing,
)

OVERLOADED = b'{"error": {"reason": "overloaded", "message": "256 wait", "retry_after_s": 0.3}}'


def asgi(app: Any) -> httpx.ASGITransport:
    return httpx.ASGITransport(app)


@pytest.fixture(scope="module")
def app(make_module_encoder: MakeEncoder, module_config: Config) -> Any:
    """An application that the tests of this module share, with its cache: a new image needs a new seed."""
    return create_app(make_module_encoder(), module_config.encoder, secret=SECRET)


@pytest.fixture(scope="module")
def served(make_module_encoder: MakeEncoder, module_config: Config) -> Iterator[list[Served]]:
    """Two services at ports, which the tests of this module share too. Each has a cache of its own."""
    encoder = module_config.encoder
    with (
        Served(create_app(make_module_encoder(), encoder, secret=SECRET)) as one,
        Served(create_app(make_module_encoder(), encoder, secret=SECRET)) as other,
    ):
        yield [one, other]


@pytest.fixture(scope="module")
def good(served: list[Served]) -> Served:
    """A service that works, beside one that does not."""
    return served[0]


@pytest.fixture(scope="module")
def llava(llava_pair: tuple[Path, Path]) -> str:
    return str(llava_pair[0])


@pytest.fixture
def client(app: Any) -> Iterator[EncoderClient]:
    with EncoderClient("http://e", transport=asgi(app), deadline_s=60) as client:
        yield client


@pytest.fixture
def two(make_encoder: MakeEncoder, config: Config) -> Iterator[list[Served]]:
    """Two services that a test may kill."""
    with (
        Served(create_app(make_encoder(), config.encoder, secret=SECRET)) as one,
        Served(create_app(make_encoder(), config.encoder, secret=SECRET)) as other,
    ):
        yield [one, other]


# -- one service ---------------------------------------------------------------------------------


def test_encoder_client_path_bytes_and_pil_give_same_key(
    client: EncoderClient, llava: str, tmp_path: Path
) -> None:
    file = tmp_path / "photo.png"
    photo = sample_image(99)
    photo.save(file)
    refs = [client.encode(image, model=llava) for image in (str(file), file, png(photo), photo)]
    assert len({ref.key for ref in refs}) == 1
    assert (refs[0].shape, refs[0].dtype) == ((16, 64), "float32")
    assert [ref.origin for ref in refs] == ["computed", "cached", "cached", "cached"]
    assert not refs[0].in_store
    assert refs[0].service_time_s > 0
    np.testing.assert_array_equal(refs[0].numpy(), refs[0].tensor().numpy())
    assert client.models()[0]["name"] == llava


def test_encoder_client_errors_name_cause(client: EncoderClient, llava: str, tmp_path: Path) -> None:
    with pytest.raises(EncoderRefused) as refused:
        client.encode(b"no image", model=llava)
    assert refused.value.reason == "unknown_format"
    with expect_error(EncoderRefused, reason="unknown_model", match="nobody"):
        client.encode(sample_image(1), model="nobody")
    with expect_error(MediaError, reason="not_found"):
        client.encode(tmp_path / "absent.png", model=llava)
    with expect_error(MediaError, reason="bad_input", match="one of"):
        client.encode(model=llava)
    with expect_error(MediaError, reason="bad_input", match="one of"):
        client.encode(sample_image(1), audio=b"RIFF", model=llava)
    with EncoderClient("http://127.0.0.1:9", deadline_s=1) as down, pytest.raises(EncoderUnavailable) as e:
        down.encode(sample_image(1), model=llava)
    assert e.value.reason == "encoder_down"


def test_encoder_client_default_uses_configured_urls(
    served: list[Served], llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORNPLUG_ENCODER_URLS", f"{served[0].url} , {served[1].url}")
    assert load().encoder.urls == (served[0].url, served[1].url)
    with EncoderClient() as client:
        assert client.encode(sample_image(1), model=llava).shape == (16, 64)


def test_encoder_client_rejects_unknown_option() -> None:
    with pytest.raises(TypeError, match="timeout_s"):
        EncoderClient("http://e", timeout_s=1)


def test_encoder_client_sends_key_app_class_and_trace(llava: str) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with Misbehaving(says(404, b'{"error": {"reason": "unknown_model", "message": "m"}}')) as server:

        async def ask() -> None:
            async with AsyncEncoderClient(
                server.url, api_key="k3y", app="search", service_class="vip"
            ) as client:
                with trace.use_span(trace.NonRecordingSpan(context)), pytest.raises(EncoderRefused):
                    await client.encode(b"x", model=llava)

        asyncio.run(ask())
        with (
            trace.use_span(trace.NonRecordingSpan(context)),
            EncoderClient(server.url) as client,
            pytest.raises(EncoderRefused),
        ):
            client.encode(b"x", model=llava)
    first, second = (request.lower() for request in server.requests)
    assert b"authorization: bearer k3y\r\n" in first
    assert b"x-cornplug-app: search\r\n" in first
    assert b"x-cornplug-class: vip\r\n" in first
    traceparent = b"traceparent: 00-00000000000000000000000000000abc-0000000000000def-01\r\n"
    assert traceparent in first
    assert traceparent in second
    assert b"authorization" not in second


# -- faults --------------------------------------------------------------------------------------


def file_of(*, shape: list[int]) -> bytes:
    """A reply with 16 x 64 numbers that says another `shape`."""
    fields = {"key": "00" * 32, "shape": shape, "dtype": "float32", "origin": "computed", "service_time_s": 1}
    return bytes(
        save({"embedding": torch.ones(16, 64)}, {"cornplug": json.dumps({**fields, "handle": None})})
    )


FAULTS = {
    "text": (says(200, b"hello"), "encoder_bad_response"),
    "another json": (says(200, b'{"x": 1}'), "encoder_bad_response"),
    "a list": (says(200, b"[1]"), "encoder_bad_response"),
    "a redirect": (says(302, b"", location="http://127.0.0.1:1/"), "encoder_bad_response"),
    "a proxy's error": (says(502, b"<html>bad gateway"), "encoder_bad_response"),
    "no safetensors file": (says(200, b"abc", content_type=SAFETENSORS), "encoder_bad_response"),
    "an endless header": (
        says(200, b"\xff" * 8 + b"{}", content_type=SAFETENSORS),
        "encoder_bad_response",
    ),
    "a file without fields": (
        says(200, save({"embedding": torch.ones(16, 64)}), content_type=SAFETENSORS),
        "encoder_bad_response",
    ),
    "too few bytes": (
        says(200, file_of(shape=[16, 64])[:-4], content_type=SAFETENSORS),
        "encoder_bad_response",
    ),
    "another shape": (
        says(200, file_of(shape=[16, 65]), content_type=SAFETENSORS),
        "encoder_bad_response",
    ),
    "no http": (raves, "encoder_down"),
    "half an answer": (half, "encoder_down"),
    "a reset": (resets, "encoder_down"),
    "silence": (says_nothing, "encoder_timeout"),
    "a dripping header": (drips, "encoder_timeout"),
    "a dripping body": (drips_body, "encoder_timeout"),
}


@pytest.mark.parametrize(
    "fault",
    # Those are late by half of the deadline. "silence" stands for them in script/test.
    [pytest.param(each, marks=[pytest.mark.more] * each.startswith("a dripping")) for each in FAULTS],
)
def test_encoder_client_faulty_service_fails_in_time_or_over(
    fault: str, good: Served, llava: str, within: TimeLimits
) -> None:
    behave, reason = FAULTS[fault]
    with Misbehaving(behave) as bad:
        deadline_s = 0.3 if reason == "encoder_timeout" else 6.0
        with (
            within(deadline_s + 5),
            EncoderClient(bad.url, deadline_s=deadline_s) as client,
            pytest.raises(EncoderUnavailable) as e,
        ):
            client.encode(sample_image(1), model=llava)
        assert e.value.reason == reason
        bad.requests.clear()
        content = MediaPayload.from_item(sample_image(1)).content
        # Weighted so that the bad one is first.
        urls = {bad.url: 1e6, good.url: 1.0}
        assert endpoints.rank_services(content, urls)[0] == bad.url
        with EncoderClient(urls, deadline_s=10 if reason == "encoder_timeout" else 30) as client:
            assert client.encode(sample_image(1), model=llava).shape == (16, 64)
            assert client.encode(sample_image(1), model=llava).origin == "cached"
        assert len(bad.requests) >= 1


def test_encoder_client_honours_retry_after(llava: str) -> None:
    """The only service is busy twice, for 0.3 s each, by the body's precise number."""
    busy = says(503, OVERLOADED, retry_after="60")

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (busy if len(server.requests) <= 2 else gone)(reader, writer)

    gone = says(422, b'{"error": {"reason": "damaged", "message": "m"}}')
    with Misbehaving(twice) as server, EncoderClient(server.url, deadline_s=30) as client:
        began = time.monotonic()
        with pytest.raises(EncoderRefused) as e:
            client.encode(sample_image(1), model=llava)
        assert time.monotonic() - began > 0.6
        assert e.value.reason == "damaged"
        assert len(server.requests) == 3


@pytest.mark.parametrize(("status", "reason"), [(429, "over_share"), (504, "too_late"), (503, "draining")])
def test_encoder_client_late_service_fails_over(status: int, reason: str, good: Served, llava: str) -> None:
    refusal = OVERLOADED.replace(b"overloaded", reason.encode()).replace(b"0.3", b"30")
    with Misbehaving(says(status, refusal)) as busy:
        with EncoderClient({busy.url: 1e6, good.url: 1.0}, deadline_s=10) as client:
            for _ in range(3):
                assert client.encode(sample_image(1), model=llava).shape == (16, 64)
        assert len(busy.requests) == 1


def test_encoder_client_pause_beyond_deadline_fails_at_once(llava: str, within: TimeLimits) -> None:
    busy = says(503, OVERLOADED.replace(b"0.3", b"60"))
    with Misbehaving(busy) as server, EncoderClient(server.url, deadline_s=30) as client:
        with within(15):
            with pytest.raises(EncoderRefused) as e:
                client.encode(sample_image(1), model=llava)
            assert e.value.reason == "overloaded"
            with pytest.raises(EncoderUnavailable) as again:
                client.encode(sample_image(1), model=llava)
            assert again.value.reason == "encoder_backoff"
        assert len(server.requests) == 1


def test_encoder_client_deadline_includes_reading_the_medium(
    client: EncoderClient, llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MediaPayload.from_item

    def slow(item: Any) -> MediaPayload:
        time.sleep(0.2)
        return read(item)

    monkeypatch.setattr(MediaPayload, "from_item", slow)
    with expect_error(EncoderUnavailable, reason="encoder_timeout"):
        client.encode(png(sample_image(1)), model=llava, deadline_s=0.1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_encoder_client_bad_request_is_not_retried(status: int, good: Served, llava: str) -> None:
    refusal = says(status, b'{"error": {"reason": "no", "message": "never"}}')
    with Misbehaving(refusal) as server:
        with (
            EncoderClient({server.url: 1e6, good.url: 1.0}, deadline_s=10) as client,
            expect_error(EncoderRefused, reason="no"),
        ):
            client.encode(sample_image(1), model=llava)
        assert len(server.requests) == 1


def test_encoder_client_failure_of_one_medium_opens_no_circuit(good: Served, llava: str) -> None:
    internal = says(500, b'{"error": {"reason": "internal", "message": "oops"}}')
    with Misbehaving(internal) as bad:
        with EncoderClient({bad.url: 1e6, good.url: 1.0}, deadline_s=10) as client:
            for _ in range(3):
                assert client.encode(sample_image(1), model=llava).shape == (16, 64)
        assert len(bad.requests) == 3


# -- several services ----------------------------------------------------------------------------


def test_encoder_client_repeats_go_to_cached_service(served: list[Served], llava: str) -> None:
    """Each image's tower runs once, wherever it is kept, and both services are used."""
    urls = [service.url for service in served]
    seeds = range(100, 112)
    firsts = Counter(
        endpoints.rank_services(
            MediaPayload.from_item(sample_image(seed)).content, endpoints.parse_services(urls)
        )[0]
        for seed in seeds
    )
    assert set(firsts) == set(urls)
    with EncoderClient(urls, deadline_s=60) as client, EncoderClient(urls[::-1], deadline_s=60) as another:
        first = [client.encode(sample_image(seed), model=llava) for seed in seeds]
        again = [another.encode(sample_image(seed), model=llava) for seed in seeds]
    assert {ref.origin for ref in first} == {"computed"}
    assert {ref.origin for ref in again} == {"cached"}


@pytest.mark.more
def test_encoder_client_many_with_killed_service_answers_all(two: list[Served], llava: str) -> None:
    items = [png(sample_image(seed)) for seed in range(60)]
    with EncoderClient([served.url for served in two], deadline_s=60) as client:
        found: dict[int, Any] = {}
        for index, result in client.encode_many(items, model=llava, concurrency=4):
            if len(found) == 10:
                two[0].kill()
            found[index] = result
    assert sorted(found) == list(range(60))
    assert [r for r in found.values() if not isinstance(r, EmbeddingRef)] == []


@pytest.mark.more
def test_encoder_client_killed_process_fails_over(short_path: Path, llava_pair: tuple[Path, Path]) -> None:
    model = str(llava_pair[0])
    items = [png(sample_image(seed)) for seed in range(80)]
    processes = [EncoderProcess([model], "--no-store", socket=short_path / f"{i}.sock") for i in range(2)]
    with processes[0] as a, processes[1] as b, EncoderClient([a.url, b.url], deadline_s=30) as client:
        found = {}
        for index, result in client.encode_many(items, model=model):
            if len(found) == 20:
                a.kill()
            found[index] = result
    assert len([r for r in found.values() if isinstance(r, EmbeddingRef)]) == 80


def test_encoder_client_many_items_come_with_their_errors(client: EncoderClient, llava: str) -> None:
    items = [sample_image(1), b"no image", {"image": png(sample_image(2))}, "absent.png"]
    found = dict(client.encode_many(items, model=llava))
    assert sorted(found) == [0, 1, 2, 3]
    assert isinstance(found[0], EmbeddingRef)
    assert isinstance(found[1], EncoderRefused)
    assert isinstance(found[2], EmbeddingRef)
    assert isinstance(found[3], MediaError)
    assert dict(client.encode_many([], model=llava)) == {}


def test_encoder_client_many_takes_items_lazily(client: EncoderClient, llava: str) -> None:
    """A generator is not read ahead, and may use the client itself."""
    taken = 0

    def items() -> Iterator[bytes]:
        nonlocal taken
        for seed in range(1000):
            taken += 1
            client.encode(sample_image(0), model=llava)
            yield png(sample_image(seed % 3))

    results = client.encode_many(items(), model=llava, concurrency=3)
    for _ in range(5):
        next(results)
    results.close()
    assert taken <= 8


def test_async_encoder_client_encode_and_many_equal_sync(app: Any, llava: str) -> None:
    async def use() -> None:
        async with AsyncEncoderClient("http://e", transport=asgi(app)) as client:
            ref = await client.encode(sample_image(1), model=llava)
            assert ref.shape == (16, 64)
            assert len(await client.models()) == 3
            with pytest.raises(EncoderRefused):
                await client.encode(b"", model=llava)
            found = {i: r async for i, r in client.encode_many([sample_image(1), b"x"], model=llava)}
            assert isinstance(found[0], EmbeddingRef)
            assert isinstance(found[1], EncoderRefused)

    asyncio.run(use())


# -- threads and processes -----------------------------------------------------------------------


def test_encoder_client_close_fails_calls_of_other_threads(llava: str) -> None:
    with Misbehaving(says_nothing) as server:
        client = EncoderClient(server.url, deadline_s=60)
        errors: list[EncoderUnavailable] = []

        def wait() -> None:
            with pytest.raises(EncoderUnavailable) as e:
                client.encode(sample_image(1), model=llava)
            errors.append(e.value)

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not server.requests:
            time.sleep(0.01)
        client.close()
        waiter.join(30)
        assert [e.reason for e in errors] == ["closed"]
        with pytest.raises(EncoderUnavailable):
            client.encode(sample_image(1), model=llava)
        client.close()


def test_encoder_client_after_fork_raises_closed(client: EncoderClient, llava: str) -> None:
    def child(out: Any) -> None:
        try:
            client.encode(b"x", model=llava)
        except EncoderUnavailable as e:
            out.send(e.reason)

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    assert here.poll(60)
    assert here.recv() == "closed"
    process.join(60)


# -- the store -----------------------------------------------------------------------------------


def test_encoder_client_store_read_keeps_no_lease(
    make_encoder: MakeEncoder, config: Config, llava: str, memory_store: MemoryStore
) -> None:
    app = create_app(make_encoder(memory_store.connect()), config.encoder, secret=SECRET)
    mine = memory_store.connect()
    with EncoderClient("http://e", transport=asgi(app), store=mine) as client:
        ref = client.encode(sample_image(1), model=llava)
        assert ref.in_store
        found = get_payload(mine, ref.key, deadline_s=1)
        assert found is not None
        assert ref.numpy().tobytes() == bytes(found[1])
        assert not ref.numpy().flags.writeable
        assert mine.stat(deadline_s=1).leases == 0


def test_encoder_client_refs_outlive_eviction(make_encoder: MakeEncoder, config: Config, llava: str) -> None:
    """README's example: the reference is a temporary, and others write until everything has gone."""
    store = MemoryStore(capacity_bytes=1 << 18)
    app = create_app(make_encoder(store.connect(), kept_bytes=0), config.encoder, secret=SECRET)
    mine, other = store.connect(), store.connect()
    with EncoderClient("http://e", transport=asgi(app), store=mine) as client:
        held = client.encode(sample_image(1), model=llava).tensor()
        want = held.clone()
        for i in range(200):
            fill(other, i, bytes(8192))
        assert not contains(other, 0)[0]
        assert torch.equal(held, want)


def test_encoder_client_without_entry_gets_inline_bytes(
    make_encoder: MakeEncoder, config: Config, llava: str, memory_store: MemoryStore
) -> None:
    """The client's store is another one, or the entry is damaged."""
    app = create_app(make_encoder(memory_store.connect()), config.encoder, secret=SECRET)
    elsewhere = MemoryStore(capacity_bytes=1 << 20).connect()
    with EncoderClient("http://e", transport=asgi(app), store=elsewhere) as client:
        want = client.encode(sample_image(1), model=llava)
    assert not want.in_store
    mine = memory_store.connect()
    lease = mine.lease([want.key], ttl_s=9, deadline_s=1)[0]
    assert lease is not None
    mine.raw(lease.location)[0] ^= 1
    mine.release([lease.token], deadline_s=1)
    with EncoderClient("http://e", transport=asgi(app), store=mine) as near:
        ref = near.encode(sample_image(1), model=llava)
    assert not ref.in_store
    assert ref.numpy().tobytes() == want.numpy().tobytes()
