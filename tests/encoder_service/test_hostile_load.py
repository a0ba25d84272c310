"""Hostile and heavy media: they cost their sender, and no other client."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from time_limits import TimeLimits

from cornplug.config import Config, load
from cornplug.encoder_service.execution import encoder, media_intake
from cornplug.encoder_service.http import requests
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess import decode_lanes
from cornplug.encoder_service.preprocess.decode_lanes import ByteBudget, DecodeLimits
from cornplug.errors import EncoderRefused
from cornplug.qos import QosClasses, ServiceClass
from devkit import checkpoints
from devkit.processes import EncoderProcess

from .conftest import SECRET, MakeEncoder, Requests, eventually, png, sample_image
from .hostile_images import many_scans, saved
from .services import Served

HEAVY = 64_000_000
"""Pixels: some limit above 7900 x 7900."""


@pytest.fixture(scope="module")
def slow() -> bytes:
    """Seconds of decoding that no rule refuses."""
    return many_scans(7900, 7900, 95)


@pytest.fixture
def llava(llava_pair: tuple[Path, Path]) -> str:
    return str(llava_pair[0])


Serve = Callable[..., Served]


@pytest.fixture
def serve(make_encoder: MakeEncoder, config: Config) -> Iterator[Serve]:
    running: list[Served] = []

    def go(
        *, classes: dict[str, Any] | None = None, encoder: dict[str, Any] | None = None, **made: Any
    ) -> Served:
        limits = config.encoder.model_copy(update={"prepare_threads": 2, **(encoder or {})})
        qos = (
            QosClasses(load({"qos.classes": classes, "qos.default": "nightly"}, environ={}).qos)
            if classes
            else None
        )
        one = Served(create_app(make_encoder(classes=qos, **made), limits, secret=SECRET))
        running.append(one)
        return one

    yield go
    for one in running:
        one.__exit__()


def ask(url: str, model: str, data: bytes, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    with httpx.Client(timeout=60, trust_env=False) as http:
        return http.post(
            f"{url}/v1/encode",
            data={"model": model, **{k: str(v) for k, v in fields.items()}},
            files={"image": data},
            headers=headers,
        )


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_http_jpeg_of_9000_scans_is_refused_422(serve: Serve, llava: str) -> None:
    """Before: 504 after the deadline, the thread went on for minutes, and two of them stopped the service."""
    served = serve()
    answer = ask(served.url, llava, many_scans(7900, 7900, 9000))
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "too_many_scans")
    assert ask(served.url, llava, png(sample_image(1))).status_code == 200


def test_http_slow_decoders_are_killed_others_are_served(
    serve: Serve, llava: str, slow: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: once every thread was held, no request was answered, and `/ready` said ok."""
    monkeypatch.setattr(encoder, "DecodeLimits", partial(DecodeLimits, decode_s=1.5))
    served = serve()
    monkeypatch.setattr(decode_lanes, "STUCK_S", 0.1)  # `/ready` has to be asked between the two
    seen = threading.Event()

    def attack(_: int) -> list[httpx.Response]:
        """Again, where the machine kept this test from looking in between."""
        answers = [ask(served.url, llava, slow)]
        while not seen.is_set() and len(answers) < 20:
            answers.append(ask(served.url, llava, slow))
        return answers

    with ThreadPoolExecutor(2) as attackers:
        attacks = attackers.map(attack, range(2))
        eventually(lambda: httpx.get(f"{served.url}/ready", trust_env=False).status_code == 503, 30)
        seen.set()
        answers = [answer for each in attacks for answer in each]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "too_slow")
    assert ask(served.url, llava, png(sample_image(1))).status_code == 200
    eventually(lambda: httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200)
    killed = metric(served.url, 'cornplug_encoder_decoders_killed_total{reason="too_slow"}')
    assert killed == len(answers)


@pytest.mark.more
def test_http_client_gone_stops_its_decoding(serve: Serve, llava: str, slow: bytes) -> None:
    served = serve()
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.5, trust_env=False) as http:
        http.post(f"{served.url}/v1/encode", data={"model": llava}, files={"image": slow})
    name = 'cornplug_encoder_decoders_killed_total{reason="gone"}'
    eventually(lambda: metric(served.url, name) == 1, 30)


@pytest.mark.more
def test_http_better_class_overtakes_decoded_worse_ones(serve: Serve, llava: str) -> None:
    """All lanes hold nightly's work, and more of it waits."""
    classes = {
        "premium": {"share": 0.5, "priority": 10, "api_keys": ["k"], "deadline_s": 20},
        "nightly": {"priority": -1},
    }
    served = serve(classes=classes)
    key = {"authorization": "Bearer k"}
    assert ask(served.url, llava, png(sample_image(0)), headers=key).status_code == 200
    heavy = many_scans(2000, 2000, 95)
    with ThreadPoolExecutor(12) as nightly:
        asked = [nightly.submit(ask, served.url, llava, heavy, deadline_s=60) for _ in range(12)]
        eventually(lambda: metric(served.url, "cornplug_encoder_preparing_requests") >= 4, 20)
        for i in range(2):
            answer = ask(served.url, llava, png(sample_image(i + 1)), headers=key)
            assert answer.status_code == 200, answer.text
        assert sum(not each.done() for each in asked) >= 2, "they went first"
        assert {each.result().status_code for each in asked} == {200}


@pytest.mark.more
def test_http_prepared_media_stay_within_budget(
    serve: Serve, qwen: Path, qwen_registry: ModelRegistry
) -> None:
    """Before: 60 PNGs of 7 KiB and 64 Mpx held 8.5 GiB, and no limit counted them."""
    budget = 150 << 20
    served = serve(registry=qwen_registry, max_prepared_bytes=budget)
    bomb = saved(Image.new("1", (3000, 3000)), "PNG")
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(metric(served.url, "cornplug_encoder_prepared_bytes"))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: ask(served.url, str(qwen), bomb, deadline_s=60), range(8)))
    done.set()
    watching.join()
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert any(answer.status_code == 200 for answer in answers)
    assert 0 < max(seen) <= budget
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    eventually(lambda: metric(served.url, "cornplug_encoder_prepared_bytes") == 0)


def test_http_medium_over_budget_is_refused_by_header(serve: Serve, llava: str) -> None:
    served = serve(max_prepared_bytes=1 << 20)
    answer = ask(served.url, llava, saved(Image.new("1", (3000, 3000)), "PNG"))
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "too_large_prepared")
    assert ask(served.url, llava, png(sample_image(1))).status_code == 200


def test_prepared_budget_class_keeps_its_reserved_part() -> None:
    premium, nightly = ServiceClass(name="premium", share=0.5), ServiceClass(name="nightly", share=0.02)
    budget = ByteBudget({premium: 0.5, nightly: 0.02}, 1000, purpose="to prepare it")
    shares = [budget.open_share(nightly) for _ in range(5)]
    for share in shares[:4]:
        share.resize(120)
    with pytest.raises(EncoderRefused) as full:
        shares[4].resize(120)
    assert full.value.reason == "overloaded"
    with pytest.raises(EncoderRefused) as never:
        shares[4].resize(501)
    assert never.value.reason == "too_large_prepared"
    own = budget.open_share(premium)
    own.resize(500)
    own.resize(100)
    assert budget.count_used_bytes() == 580
    for share in (*shares, own):
        share.close()
        share.close()
    assert budget.count_used_bytes() == 0
    with pytest.raises(EncoderRefused):
        own.resize(1)


def test_encoder_engine_inputs_count_until_item_is_made(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    request = request_for(llava_pair[0], 1)
    size = sum(len(tensor.data) for tensor in request.inputs.values())
    encoder = make_encoder(max_prepared_bytes=2 * size)
    assert encoder.submit(request).result(60).key == request.key  # type: ignore[union-attr]
    eventually(lambda: encoder.budget.count_used_bytes() == 0)
    small = make_encoder(max_prepared_bytes=size - 1)
    refused: Any = small.submit(request).result(60)
    assert refused.reason == "overloaded"
    assert small.count_waiting() == 0


def test_http_deadline_of_a_request_is_limited(
    serve: Serve, llava: str, slow: bytes, within: TimeLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: 600 s for every request."""
    monkeypatch.setattr(media_intake, "MAX_DEADLINE_S", 0.5)
    served = serve()
    with within(10):
        answer = ask(served.url, llava, slow, deadline_s=600)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "too_late")


def test_http_body_that_never_comes_is_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_DEADLINE_S", 0.5)
    port = serve().listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
        s.sendall(
            b"POST /v1/encode HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
        answer = b"".join(iter(lambda: s.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"slow_body"' in answer


def test_sglang_images_share_the_decoding_budget(
    serve: Serve, qwen: Path, qwen_registry: ModelRegistry
) -> None:
    """Before: all of a part at once, of no class, in no budget."""
    served = serve(registry=qwen_registry, max_prepared_bytes=1 << 20, encoder={"sglang": True})
    url = "data:image/png;base64," + base64.b64encode(saved(Image.new("1", (3000, 3000)), "PNG")).decode()
    part = {"mm_items": [url] * 4, "req_id": "r", "num_parts": 1, "part_idx": 0, "modality": "IMAGE"}
    answer = httpx.post(f"{served.url}/encode", json=part, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["reason"]) == (413, "too_large_prepared")
    assert metric(served.url, "cornplug_encoder_prepared_bytes") == 0


HUGE_PIXELS = 28 * 28 * 8192
"""Of one image: 32,768 patches, whose attention takes a tiny tower seconds on one core."""


@pytest.fixture
def long_service(tmp_path: Path, short_path: Path) -> Iterator[EncoderProcess]:
    """A service whose pass over a huge image is long, with a class that has half of it."""
    model = checkpoints.qwen2_vl(tmp_path / "q", max_pixels=HUGE_PIXELS)
    settings = tmp_path / "cornplug.toml"
    settings.write_text('[qos.classes.premium]\nshare = 0.5\npriority = 10\napi_keys = ["k"]\n')
    with EncoderProcess(
        [model],
        "--no-store",
        "--threads",
        "1",
        socket=short_path / "e.sock",
        env={"CORNPLUG_CONFIG": str(settings), "CORNPLUG_ENCODER_PREPARE_THREADS": "2"},
    ) as process:
        process.model = str(model)  # type: ignore[attr-defined]
        yield process


class Flood:
    """60 anonymous requests for huge images, whose replies are read until `close` or their end."""

    def __init__(self, url: str, model: str) -> None:
        images = [saved(Image.new("RGB", (2548, 2520), (i, 0, 0)), "PNG") for i in range(60)]
        self._url, self._model = url, model
        self._http = httpx.Client(timeout=300, trust_env=False)
        self._threads = [threading.Thread(target=self._run, args=(image,)) for image in images]
        for thread in self._threads:
            thread.start()

    def _run(self, image: bytes) -> None:
        data = {"model": self._model, "deadline_s": "120"}
        with (
            contextlib.suppress(httpx.HTTPError, OSError),
            self._http.stream("POST", f"{self._url}/v1/encode", data=data, files={"image": image}) as answer,
        ):
            answer.read()

    def close(self) -> None:
        """Hang up."""
        for connection in self._http._transport._pool.connections:  # type: ignore[attr-defined]
            stream = connection._connection._network_stream
            with contextlib.suppress(OSError):
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        self._http.close()


def is_computing(url: str) -> bool:
    """Whether a medium is prepared or in a tower."""
    return metric(url, "cornplug_encoder_prepared_bytes") > 0


@pytest.mark.more
def test_server_class_with_a_share_is_in_time_beside_huge_images(
    long_service: EncoderProcess, within: TimeLimits
) -> None:
    """Its requests are answered in time, and the work ends when the sender of the images hangs up.

    `execution/test_tower_turn.py` shows the two for a pass that would not end by itself.
    """
    url, model = long_service.url, long_service.model  # type: ignore[attr-defined]
    key = {"authorization": "Bearer k"}
    assert ask(url, model, png(sample_image(0)), headers=key).status_code == 200
    flood = Flood(url, model)
    try:
        eventually(lambda: is_computing(url), 60)
        for seed in range(1, 10):
            answer = ask(url, model, png(sample_image(seed)), headers=key, deadline_s=10)
            assert answer.status_code == 200, answer.text
        assert is_computing(url), "all was done before: the test saw no load"
    finally:
        flood.close()
    with within(10, "a pass ends between two layers once nobody waits for it"):
        eventually(lambda: not is_computing(url), 60)


@pytest.mark.more
def test_server_sigterm_beside_huge_images_ends_in_time(
    long_service: EncoderProcess, within: TimeLimits
) -> None:
    """Before: 51 s, as it computed its queue to the end."""
    url, model = long_service.url, long_service.model  # type: ignore[attr-defined]
    flood = Flood(url, model)
    try:
        eventually(lambda: is_computing(url), 60)
        with within(30, "encoder.drain_s is 25 s, and 30 s are usual between SIGTERM and SIGKILL"):
            os.kill(long_service.pid, signal.SIGTERM)
            assert long_service.stop(grace_s=120) == 0
    finally:
        flood.close()
