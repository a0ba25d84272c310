"""Bodies that cost their sender little and a parser much are refused by their shape."""

from __future__ import annotations

import base64
import functools
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import msgspec
import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.config import Config, load
from cornplug.encoder_service.formats.engine_seal import ENGINE_PATH, MEDIA_TYPE, EngineSeal
from cornplug.encoder_service.formats.messages import MediaRefusal, Reply
from cornplug.encoder_service.http import requests
from cornplug.qos import QosClasses
from devkit.processes import EncoderProcess

from .conftest import SECRET, MakeEncoder, png, sample_image
from .http_service import Service

JSON: Final = {"content-type": "application/json"}


def many(head: bytes, value: bytes, tail: bytes, size: int) -> bytes:
    """A JSON text of about `size` bytes with one value again and again."""
    return head + b",".join([value] * (size // (len(value) + 1))) + tail


@functools.cache
def hostile(size: int) -> dict[str, bytes]:
    """Name -> JSON text of at most `size` bytes."""
    fields = b",".join(b'"%d":0' % i for i in range(size // 12))
    return {
        "items of numbers": many(b'{"model":"x","items":[', b"0", b"]}", size),
        "items without content": many(b'{"model":"x","items":[', b'{"image":""}', b"]}", size),
        "items of lists": many(b'{"model":"x","items":[', b"[]", b"]}", size),
        "nested": b'{"model":"x","items":' + b"[" * (size // 2),
        "nested objects": b'{"a":' * (size // 5),
        "unknown fields": b'{"model":"x",' + fields + b"}",
        "one field again": many(b"{", b'"model":"x"', b"}", size),
        "strings": many(b'{"model":"x","image":[', b'""', b"]}", size),
        "of a part": many(b'{"req_id":"r","modality":"IMAGE","mm_items":[', b'""', b"]}", size),
        "bare list": many(b"[", b"0", b"]", size),
    }


@pytest.fixture(scope="module")
def shared(make_module_encoder: MakeEncoder, module_config: Config) -> Service:
    """One service for all tests that need no settings of their own."""
    sglang = module_config.encoder.model_copy(update={"sglang": True})
    return Service(make_module_encoder(), module_config.model_copy(update={"encoder": sglang}))


@pytest.mark.parametrize("name", hostile(0))
@pytest.mark.parametrize("path", ["/v1/encode", "/encode", "/scheduler_receive_url", "/v1/reload"])
def test_http_json_of_too_many_values_is_refused_by_shape(shared: Service, path: str, name: str) -> None:
    """Nothing was parsed: a parser would say what is wrong with it."""
    answer = shared.call("POST", path, content=hostile(3 << 20)[name], headers=JSON)
    assert answer.status_code == 413, answer.text
    said = answer.json()  # SGLang's servers expect another form
    assert said.get("error", said)["reason"] == "too_large"


def test_http_json_with_many_frames_is_taken(shared: Service, llava_pair: tuple[Path, Path]) -> None:
    """Its shape is accepted, and the medium is then refused, because the model takes no videos."""
    image = base64.b64encode(png(sample_image(1))).decode()
    url = "data:video/jpeg;base64," + ",".join([image] * 3000)
    answer = shared.post(json={"model": str(llava_pair[0]), "video": url})
    assert answer.json()["error"]["reason"] == "modality", answer.text


@pytest.mark.parametrize("size", [1, 2, 3, (3 << 18) - 1, 3 << 18, (3 << 18) + 1, (3 << 19) + 2])
def test_medium_base64_of_any_length_is_decoded(size: int) -> None:
    from cornplug.encoder_service.preprocess.preparer import media_bytes
    from cornplug.errors import EncoderRefused

    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    text = base64.b64encode(data).decode()
    assert media_bytes("image", text) == data
    for damaged in (text[:-1], "=" + text[1:], text + "A", text[:4] + "====" + text[4:]):
        with expect_error(EncoderRefused, reason="bad_input", match="base64"):
            media_bytes("image", damaged)


def test_body_guard_classes_have_a_part_of_the_bytes_each(
    make_encoder: MakeEncoder,
    config: Config,
    llava_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: bodies of anyone that do not end kept everyone out for `BODY_DEADLINE_S`."""
    monkeypatch.setattr(requests, "_MAX_BODIES_BYTES", 1)
    qos = QosClasses(load({"qos.classes": {"premium": {"share": 0.5, "api_keys": ["k"]}}}, environ={}).qos)
    limits = config.encoder.model_copy(update={"max_body_bytes": 100_000})
    service = Service(make_encoder(classes=qos), config.model_copy(update={"encoder": limits}))
    image = png(sample_image(1))
    key = {"authorization": "Bearer k"}

    async def scenario() -> tuple[list[int], list[int]]:
        go = asyncio_event()
        held: list[int] = []

        async def slow() -> Any:
            for _ in range(16):
                yield b"x" * 10_000
                held.append(10_000)
            await go.wait()

        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:

            async def post(**options: Any) -> None:
                answers.append((await client.post("/v1/encode", **options)).status_code)

            answers: list[int] = []
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(lambda: post(content=slow(), headers=JSON))
                with anyio.move_on_after(30):
                    while not answers:
                        await anyio.sleep(0.01)
                form: dict[str, Any] = {"data": {"model": str(llava_pair[0])}, "files": {"image": image}}
                mine = [(await client.post("/v1/encode", headers=key, **form)).status_code]
                go.set()
            return answers, mine

    def asyncio_event() -> Any:
        import asyncio

        return asyncio.Event()

    theirs, mine = anyio.run(scenario)
    assert 503 in theirs
    assert mine == [200]


def sealed(service: Service, message: bytes) -> Any:
    """The opened answer of /v1/engine to any message of an engine that has the secret."""
    seal = EngineSeal.new(SECRET)
    answer = service.call(
        "POST",
        ENGINE_PATH,
        content=seal.seal_request(message),
        headers={"authorization": seal.authorization, "content-type": MEDIA_TYPE},
    )
    assert answer.status_code == 200, answer.text
    return msgspec.msgpack.decode(seal.open_reply(answer.content), type=Reply | MediaRefusal)


def encode_with(name: bytes, value: bytes) -> bytes:
    """An encode request with one more or other field, as msgpack."""
    fields = {
        b"id": b"\x01", b"identity": b"\xc4\x00", b"key": b"\xc4\x00", b"cache_salt": b"\xc0",
        b"inputs": b"\x80", b"app": b"\xa1a", b"deadline_s": b"\xcb" + struct.pack(">d", 1.0),
    }  # fmt: skip
    fields[name] = value
    body = b"".join(bytes([0xA0 + len(k)]) + k + v for k, v in fields.items())
    return bytes([0x80 + len(fields) + 1]) + b"\xa4type\xa6encode" + body


@functools.cache
def messages(size: int) -> dict[str, bytes]:
    """Name -> msgpack of at most `size` bytes that no engine sends."""
    tensor = b"\x93\xa1f\x90\xc4\x00"
    count = struct.pack(">I", size // 10)
    named = b"".join(b"\xa3%03d" % (i % 1000) + tensor for i in range(size // 10))
    numbers = b"\xdd" + struct.pack(">I", size) + bytes(size)
    return {
        "many inputs": encode_with(b"inputs", b"\xdf" + count + named),
        "long shape": encode_with(b"inputs", b"\x81\xa1a\x93\xa1f" + numbers + b"\xc4\x00"),
        "long tensor": encode_with(b"inputs", b"\x81\xa1a" + numbers),
        "long trace": encode_with(b"trace", b"\xdf" + count + named),
        "unknown field": encode_with(b"other", numbers),
        "nested": encode_with(b"other", b"\x91" * size),
        "nested inputs": encode_with(b"inputs", b"\x81\xa1a" + b"\x91" * size),
        "list": numbers,
    }


@pytest.mark.parametrize("name", messages(0))
def test_engine_message_of_too_many_values_is_bad_input(shared: Service, name: str) -> None:
    pytest.importorskip("cryptography")
    answer = sealed(shared, messages(1 << 20)[name])
    assert answer.reason == "bad_input"
    assert answer.message.startswith("body: ")


@pytest.fixture
def service(llava_pair: tuple[Path, Path], short_path: Path) -> Iterator[EncoderProcess]:
    options = ("--no-store", "--threads", "1", "--sglang")
    with EncoderProcess([str(llava_pair[0])], *options, socket=short_path / "e.sock") as process:
        yield process


def memory_bytes(pid: int) -> int:
    """Most memory that the process ever had."""
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.more
def test_server_answers_health_whatever_bodies_come(service: EncoderProcess, within: TimeLimits) -> None:
    """Before: 26 MB of `{"items":[0,0,...]}` silenced it for 104 s, and up to 4.3 GB were kept."""
    before = memory_bytes(service.pid)
    done = threading.Event()
    slowest: list[float] = []

    def probe() -> None:
        with httpx.Client(base_url=service.url, timeout=120, trust_env=False) as http:
            while not done.is_set():
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                slowest.append(time.monotonic() - began)
                done.wait(0.02)

    def send(asked: tuple[str, bytes]) -> int:
        path, body = asked
        with httpx.Client(base_url=service.url, timeout=120, trust_env=False) as http:
            try:
                return http.post(path, content=body, headers=JSON).status_code
            except httpx.WriteError:
                return 0  # refused before the body was sent in full

    bodies = hostile(26 << 20)
    asked = [(path, body) for path in ("/v1/encode", "/encode") for body in bodies.values()]
    asked.append(("/v1/encode", b'{"model":"x","image":"' + b"A" * (60 << 20) + b'"}'))
    asked.append(("/v1/encode", b'{"model":"x","image":"' + b"\\u00e9" * (10 << 20) + b'"}'))
    with ThreadPoolExecutor(5) as threads:
        probing = threads.submit(probe)
        statuses = list(threads.map(send, asked))
        done.set()
        probing.result()
    assert set(statuses) <= {0, 404, 413, 422, 503}, statuses
    within.check(max(slowest), 1.0, "a body that is being read or parsed delays no other request")
    assert memory_bytes(service.pid) - before < 1 << 30
