"""Hostile and odd input against one real service: refused with a reason, without harm to other requests."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.encoder_service.formats.engine_seal import EMBEDDING_MEDIA_TYPE as SAFETENSORS
from cornplug.encoder_service.formats.image import decode, to_engine_rgb
from cornplug.errors import MediaError
from devkit.processes import EncoderProcess

from . import hostile_images
from .conftest import eventually
from .hostile_images import sample_image, saved

pytestmark = pytest.mark.more

MAX_PIXELS: Final = 4_000_000
MAX_BODY: Final = 2_000_000
ANSWER_TIMEOUT_S: Final = 8.0
"""Longest that a refusal may take on a busy machine of two cores."""
GROWTH_BYTES: Final = 150 << 20
"""Eight bytes for each of two images at the limit, and the allocator's reserve."""

NOT_DECODED: Final = ("tiff", "16-bit tiff", "ppm", "qoi", "tga", "ico")
"""Beginnings of the names of files whose format the service does not accept."""
HOSTILE: Final = {
    name: (data, "unknown_format" if reason and name.startswith(NOT_DECODED) else reason)
    for name, (data, reason) in hostile_images.hostile().items()
}
ODD: Final = {name: found for name, found in hostile_images.odd().items() if not name.startswith(NOT_DECODED)}


class Living:
    """A real service, and another client that uses it all the time."""

    def __init__(self, process: EncoderProcess, model: str) -> None:
        self.process = process
        self.model = model
        self.http = httpx.Client(base_url=process.url, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        self.others = 0
        self._good = saved(sample_image(99), "PNG")
        self._want: str | None = None
        self.harm: list[str] = []
        self._stop = threading.Event()
        self._others = threading.Thread(target=self._use, daemon=True)
        self._others.start()

    def encode(self, data: bytes, **form: str) -> httpx.Response:
        return self.http.post("/v1/encode", data={"model": self.model, **form}, files={"image": ("a", data)})

    def well(self) -> None:
        """It lives, and answers a good request rightly."""
        assert self.http.get("/health").status_code == 200
        answer = self.encode(self._good)
        assert answer.status_code == 200, answer.text
        assert self._want in (None, answer.json()["data"])
        self._want = answer.json()["data"]
        assert not self.harm

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) << 10

    def close(self) -> None:
        self._stop.set()
        self._others.join()
        self.http.close()

    def _use(self) -> None:
        images = [saved(sample_image(seed), "PNG") for seed in range(100, 104)]
        want: dict[int, str] = {}
        with httpx.Client(base_url=self.process.url, timeout=30, trust_env=False) as http:
            while not self._stop.wait(0.05):
                seed = self.others % len(images)
                # Another tenant each time: every one goes through the tower.
                form = {"model": self.model, "cache_salt": str(self.others)}
                try:
                    answer = http.post("/v1/encode", data=form, files={"image": images[seed]})
                except httpx.HTTPError as e:
                    self.harm.append(repr(e))
                    return
                if (
                    answer.status_code != 200
                    or want.setdefault(seed, answer.json()["data"]) != (answer.json()["data"])
                ):
                    self.harm.append(answer.text[:500])
                self.others += 1


@pytest.fixture(scope="module")
def living(llava_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    model = str(llava_pair[0])
    folder = tmp_path_factory.mktemp("e")
    env = {
        "CORNPLUG_ENCODER_MAX_PIXELS": str(MAX_PIXELS),
        "CORNPLUG_ENCODER_MAX_BODY_BYTES": str(MAX_BODY),
        "OMP_NUM_THREADS": "1",
    }
    with EncoderProcess(
        [model], "--no-store", "--threads", "1", socket=folder / "e.sock", env=env
    ) as process:
        living = Living(process, model)
        try:
            eventually(lambda: living.others > 5, 30)
            yield living
            assert not living.harm
            assert living.others > 20
            assert "Traceback" not in process.log.read_text()
        finally:
            living.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_http_hostile_image_is_refused_within_bounds(living: Living, name: str) -> None:
    data, reason = HOSTILE[name]
    before, began = living.peak_bytes(), time.monotonic()
    answer = living.encode(data)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["reason"] == reason or (not reason and error["reason"])
    assert error["message"]
    assert len(answer.content) < 2000
    assert time.monotonic() - began < ANSWER_TIMEOUT_S
    assert living.peak_bytes() - before < GROWTH_BYTES
    living.well()


@pytest.mark.parametrize("name", ODD)
def test_http_odd_image_is_decoded_by_the_rule(living: Living, name: str) -> None:
    data, stands_for = ODD[name]
    answer, plain = living.encode(data), living.encode(saved(stands_for, "PNG"))
    assert answer.status_code == plain.status_code == 200, answer.text
    assert answer.json()["key"] == plain.json()["key"]
    assert answer.json()["data"] == plain.json()["data"]


@pytest.mark.parametrize("kind", ["text/html", "image/svg+xml", "application/x-msdownload", "x" * 500])
def test_http_file_name_and_type_of_client_are_ignored(living: Living, kind: str) -> None:
    data = saved(sample_image(1), "PNG")
    files = {"image": ("../../etc/passwd\x00.svg", data, kind)}
    answer = living.http.post("/v1/encode", data={"model": living.model}, files=files)
    assert answer.json()["key"] == living.encode(data).json()["key"]


def short(value: object) -> str:
    """A test's name out of a body that may be megabytes."""
    text = ascii(value)
    return text if len(text) < 50 else f"{text[:25]}..{text[-25:]}"


GOOD: Final = base64.b64encode(saved(sample_image(1), "PNG")).decode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"null", 422),
        (b"[" * 100_000, 413),
        (b'{"a":' * 100_000, 413),
        (b'{"model": "M", "image": "' + b"A" * 1_900_000, 422),
        (b'{"model": "M", "image": "\\ud800"}', 422),
        (b'{"model": "\xff\xfe", "image": ""}', 422),
        (b'{"model": "M", "image": "data:image/png;base64"}', 422),
        (b'{"model": "M", "image": "data:image/png;base64,%41"}', 422),
        (b'{"model": "M", "image": "data:' + b";" * 100_000 + b'"}', 422),
        (b'{"model": "M", "image": 1e999}', 422),
        (b'{"model": "M", "image": "G", "deadline_s": NaN}', 422),
        (b'{"model": "M", "image": "G", "deadline_s": 1e308}', 422),
        (b'{"model": "M", "image": "G", "deadline_s": "1"}', 422),
        (b'{"model": "M", "image": "G", "dtype": "float64"}', 422),
        (b'{"model": "M", "image": "G", "key": "00"}', 422),
        (b'{"model": "M", "image": "G", "cache_salt": 1}', 422),
        (b'{"model": "M", "image": "G", "cache_salt": "' + b"s" * 257 + b'"}', 422),
        (b'{"model": "M", "image": "G", "' + b"k" * 100_000 + b'": 1}', 422),
        (b'{"model": ["M"], "image": "G"}', 422),
        (b'{"model": "", "image": "G"}', 422),
        (b'{"model": "../../etc", "image": "G"}', 404),
        (b'{"model": "M\\u0000", "image": "G"}', 404),
        (b'{"model": "\\r\\nx-evil: 1", "image": "G"}', 404),
        (b'{"model": "' + b"m" * 1025 + b'", "image": "G"}', 422),
        (b'{"model": "M", "items": ' + b"[" * 1000 + b"]" * 1000 + b"}", 422),
        (b'{"model": "M", "audio": "' + b"AAAA" + b'"}', 422),
        (b'{"model": "M", "video": "AAAA"}', 422),
        (b" " * (MAX_BODY + 100_000), 413),
    ],
    ids=short,
)
def test_http_hostile_json_body_is_refused(living: Living, body: bytes, status: int) -> None:
    body = body.replace(b'"M', b'"' + living.model.encode()).replace(b'"G"', f'"{GOOD}"'.encode())
    answer = living.http.post("/v1/encode", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["reason"]
    assert len(answer.content) < 3000
    assert "x-evil" not in answer.headers
    living.well()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b--\r\n",
        b'--b\r\ncontent-disposition: form-data; name="image"\r\n\r\nno file\r\n--b--\r\n',
        b'--b\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n' + b"x" * 1000,
        b"--b\r\n" + b"x: y\r\n" * 10_000 + b"\r\n--b--",
        b"--b\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n--b--",
        b"--b\r\n\r\nno disposition\r\n--b--\r\n",
        b"".join(b'--b\r\ncontent-disposition: form-data; name="f%d"\r\n\r\n1\r\n' % i for i in range(500))
        + b"--b--\r\n",
        b'--b\r\ncontent-disposition: form-data; name="cache_salt"\r\n\r\n'
        + b"s" * 1_000_000
        + b"\r\n--b--\r\n",
        b"\0" * 100_000,
    ],
    ids=short,
)
def test_http_hostile_form_is_refused(living: Living, body: bytes) -> None:
    kind = {"content-type": "multipart/form-data; boundary=b"}
    answer = living.http.post("/v1/encode", content=body, headers=kind)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["reason"] == "bad_input"
    living.well()


def test_http_salt_cannot_write_headers(living: Living) -> None:
    answer = living.http.post(
        "/v1/encode",
        json={"model": living.model, "image": GOOD, "cache_salt": "a\r\nx-evil: 1\r\n\r\n"},
        headers={"accept": SAFETENSORS},
    )
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert safetensors.torch.load(answer.content)["embedding"].shape == (16, 64)


@contextlib.contextmanager
def raw(living: Living, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", living.process.port), timeout=ANSWER_TIMEOUT_S) as s:
        s.sendall(data)
        yield s


HEAD: Final = b"POST /v1/encode HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\0\1\2\3\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 9\r\n\r\n",
    ],
    ids=short,
)
def test_http_garbage_connection_is_closed(living: Living, data: bytes) -> None:
    with raw(living, data) as s:
        s.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: s.recv(65536), b""))
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]
    living.well()


def test_http_many_open_connections_delay_no_request(living: Living) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(raw(living, HEAD + b"content-length: 1000\r\n\r\n{"))
            stack.enter_context(raw(living, HEAD))
        living.well()


def test_http_hostile_images_beside_good_ones_are_answered(living: Living) -> None:
    """All at once."""
    data = [data for data, _ in HOSTILE.values() if len(data) < 25_000]
    data = [*data[:60], saved(sample_image(7), "PNG")]

    def ask(image: bytes) -> httpx.Response:
        body = {"model": living.model, "image": base64.b64encode(image).decode()}
        return living.http.post("/v1/encode", json=body)

    with ThreadPoolExecutor(16) as threads:
        *bad, good = threads.map(ask, data)
    assert all("error" in answer.json() for answer in bad)
    array = np.frombuffer(base64.b64decode(good.json()["data"]), np.float32)
    assert array.size == 16 * 64
    assert np.isfinite(array).all()


_FILES: Final = [
    saved(sample_image(1), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "ICO")
]


@st.composite
def damaged(draw: Any) -> bytes:
    data = bytearray(draw(st.sampled_from(_FILES)))
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=8)
    ):
        data[at] = value
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(max_examples=300)
@given(st.binary(max_size=400) | damaged())
def test_decode_any_bytes_are_an_image_or_a_media_error(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            rgb = to_engine_rgb(decode(data, MAX_PIXELS))
        except MediaError:
            return
    assert rgb.mode == "RGB"
    assert rgb.width * rgb.height <= MAX_PIXELS
