"""SGLang's protocol over ASGI and ZMQ: an engine's receivers are played by PULL sockets."""

from __future__ import annotations

import asyncio
import base64
import pickletools
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
import zmq.asyncio
from expected_errors import expect_error
from PIL import Image
from time_limits import TimeLimits

from cornplug import identity
from cornplug.config import Config, load
from cornplug.encoder_service import sglang_server
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.engine_seal import SignedClaim, prove_salt
from cornplug.encoder_service.formats.image import digest_image
from cornplug.encoder_service.formats.messages import ServedModel
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.sglang_delivery import ReceiverGuard, ReceiverRendezvous, ZmqSender
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.store.memory import MemoryStore

from ..conftest import SECRET, MakeEncoder, png, sample_image

RECEIVERS = {"encoder.receivers": "10.1.0.0/16"}


class Service:
    """A service, an HTTP client of an address, and a PULL socket that receives."""

    def __init__(self, encoder: EncoderCore, config: Config, address: str = "127.0.0.1") -> None:
        self.encoder = encoder
        self.app = create_app(encoder, config.encoder, secret=SECRET)
        transport = httpx.ASGITransport(self.app, client=(address, 1))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)
        self.context = zmq.asyncio.Context()
        self.pull = self.context.socket(zmq.PULL)
        self.port = self.pull.bind_to_random_port("tcp://127.0.0.1")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        async with self.app.router.lifespan_context(self.app), self.client:
            try:
                yield self
            finally:
                # Also those that a failed test has left: a context with an open one never ends.
                self.context.destroy(linger=0)

    async def encode(self, images: list[Any], path: str = "/encode", **changes: Any) -> httpx.Response:
        ask = {
            "mm_items": images,
            "req_id": "r_local_part_0",
            "num_parts": 1,
            "part_idx": 0,
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": self.port,
        }
        return await self.client.post(path, json={**ask, **changes})

    async def received(self) -> list[bytes]:
        frames: list[bytes] = await asyncio.wait_for(self.pull.recv_multipart(), 20)
        return frames

    async def silence(self) -> None:
        assert not await self.pull.poll(100), "something was sent"


def url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


Scenario = Callable[[Service], Awaitable[None]]
Run = Callable[..., None]


@pytest.fixture
def run(make_encoder: MakeEncoder, qwen_registry: Any, config: Config) -> Run:
    def go(scenario: Scenario, *, store: Any = None, address: str = "127.0.0.1", **changes: Any) -> None:
        async def whole() -> None:
            encoder = make_encoder(store, registry=changes.pop("registry", qwen_registry))
            small = config.encoder.model_copy(update={"sglang": True, **changes})
            service = Service(encoder, config.model_copy(update={"encoder": small}), address)
            async with service.running():
                await scenario(service)

        asyncio.run(whole())

    return go


def rows(frames: list[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(frames[1], dtype=np.float32)


def sent_grid(header: bytes) -> list[list[int]]:
    values = [argument for _, argument, _ in pickletools.genops(header)]
    at = values.index("grid_dim")
    sizes = [n for n in values[at : values.index("modality")] if isinstance(n, int)]
    return [sizes[i : i + 3] for i in range(0, len(sizes), 3)]


def test_epd_server_two_images_arrive_as_one_part(run: Run) -> None:
    async def scenario(service: Service) -> None:
        images = [sample_image(1), sample_image(2, 90, 40)]
        answer = await service.encode([url(p) for p in images])
        assert (answer.status_code, answer.json()) == (200, None), answer.text
        frames = await service.received()
        (loaded,) = service.encoder.registry.loaded_models()
        alone = []
        for one in images:
            body = {"model": loaded.served.name, "image": url(one)}
            made = (await service.client.post("/v1/encode", json=body)).json()
            alone.append(np.frombuffer(base64.b64decode(made["data"]), dtype=np.float32))
        np.testing.assert_allclose(rows(frames), np.concatenate(alone), atol=1e-5)
        width = loaded.served.hidden_size
        said = SignedClaim.sign(
            SECRET,
            identity=loaded.served.identity,
            media=[digest_image(p) for p in images],
            dtype="float32",
            shape=(rows(frames).size // width, width),
            grid=sent_grid(frames[0]),
            payload=frames[1],
        )
        assert all(text.encode() in frames[0] for text in said.to_fields().values())
        assert b"r_local_part_0" in frames[0]

    run(scenario)


@pytest.mark.parametrize("registers_first", [True, False])
def test_epd_server_receivers_register_before_or_after(run: Run, registers_first: bool) -> None:
    async def scenario(service: Service) -> None:
        async def register() -> None:
            for port in (service.port, second_port):
                ask = {"req_id": "r_local_part_0", "receive_count": 2, "receive_url": f"127.0.0.1:{port}"}
                answer = await service.client.post("/scheduler_receive_url", json=ask)
                assert answer.status_code == 200, answer.text

        second = service.context.socket(zmq.PULL)
        second_port = second.bind_to_random_port("tcp://127.0.0.1")
        if registers_first:
            await register()
        encoding = asyncio.create_task(service.encode([url(sample_image(1))], embedding_port=None))
        if not registers_first:
            await asyncio.sleep(0.2)
            await register()
        assert (await encoding).status_code == 200
        assert await service.received() == await asyncio.wait_for(second.recv_multipart(), 20)
        second.close(linger=0)

    run(scenario)


def test_epd_server_stored_image_costs_no_tower_pass(run: Run) -> None:
    async def scenario(service: Service) -> None:
        same = {"url": url(sample_image(3)), "detail": "low"}
        proof = prove_salt(SECRET, "tenant")
        salted = {"url": url(sample_image(3)), "cornplug_salt": "tenant", "cornplug_salt_proof": proof}
        answers = [await service.encode([item]) for item in (url(sample_image(3)), same, salted)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        sent = [await service.received() for _ in range(3)]
        assert sent[0][1] == sent[1][1]
        assert b"cornplug_encoder_tower_passes_total 2.0" in service.encoder.metrics.render_text()
        (loaded,) = service.encoder.registry.loaded_models()
        digest = digest_image(sample_image(3))
        for salt in (None, "tenant"):
            key = identity.embedding_key(SECRET, loaded.served.identity, digest, salt)
            assert store.contains([key], deadline_s=1) == b"\x01"

    store = MemoryStore(capacity_bytes=16 << 20).connect()
    run(scenario, store=store)


def test_epd_server_refusal_has_status_and_sends_nothing(run: Run) -> None:
    async def scenario(service: Service) -> None:
        good = url(sample_image(1))
        for items, status, reason in (
            (["http://example.org/a.png"], 422, "remote_url"),
            (["file:///etc/passwd"], 422, "remote_url"),
            (["/etc/passwd"], 422, None),
            ([good, "data:image/png;base64,AAAA"], 422, "unknown_format"),
            (["data:image/png,AAAA"], 422, "bad_input"),
            ([good[:400]], 422, None),
            ([url(sample_image(1, 500, 400))], 413, "too_many_pixels"),
        ):
            answer = await service.encode(items)
            assert answer.status_code == status, answer.text
            assert answer.json()["message"]
            assert reason is None or answer.json()["reason"] == reason
        huge = await service.encode(["A" * 300_000])
        assert huge.status_code == 413
        json = {"content-type": "application/json"}
        pickled = await service.client.post("/encode", content=b"\x80\x04N.", headers=json)
        assert pickled.status_code == 422
        for path in ("/send", "/scheduler_receive_meta_data"):
            assert (await service.client.post(path, json={"req_id": "r"})).status_code == 501
        await service.silence()
        assert (await service.encode([good])).status_code == 200
        await service.received()

    run(scenario, max_body_bytes=200_000, max_pixels=100_000)


def test_epd_server_default_has_no_sglang_routes(run: Run) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.encode([url(sample_image(1))])).status_code == 404
        for path in ("/scheduler_receive_url", "/send", "/scheduler_receive_meta_data"):
            assert (await service.client.post(path, json={"req_id": "r"})).status_code == 404
        await service.silence()

    run(scenario, sglang=False)


def test_epd_server_foreign_receiver_is_refused(run: Run) -> None:
    async def scenario(service: Service) -> None:
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "no-such-host.invalid"):
            answer = await service.encode([url(sample_image(1))], prefill_host=host)
            assert (answer.status_code, answer.json()["reason"]) == (403, "forbidden_receiver")
        ask = {"req_id": "r", "receive_count": 1, "receive_url": f"127.0.0.1:{service.port}"}
        assert (await service.client.post("/scheduler_receive_url", json=ask)).status_code == 403
        await service.silence()

    run(scenario, address="203.0.113.9")


def test_epd_server_receiver_in_network_is_accepted(run: Run) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.encode([url(sample_image(1))])).status_code == 200
        await service.received()

    run(scenario, address="203.0.113.9", receivers="10.0.0.0/8, 127.0.0.0/8")
    with expect_error(ConfigError, field="encoder.receivers"):
        load({"encoder.receivers": "everywhere"}, environ={})


def test_epd_server_no_receiver_in_time_is_504(run: Run) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.encode([url(sample_image(1))], embedding_port=None)
        assert (answer.status_code, answer.json()["reason"]) == (504, "no_receiver")
        service.pull.close(linger=0)
        answer = await service.encode([url(sample_image(1))])
        assert (answer.status_code, answer.json()["reason"]) == (502, "undeliverable")

    run(scenario, language_only_timeout_s=1.0)


def test_epd_server_url_names_one_of_several_models(
    run: Run, registry: Any, qwen: Path, llava_pair: Any
) -> None:
    async def scenario(service: Service) -> None:
        unnamed = await service.encode([url(sample_image(1))])
        assert unnamed.status_code == 404
        assert "/sglang/NAME" in unnamed.json()["message"]
        for name in (qwen.name, str(qwen)):
            assert (await service.encode([url(sample_image(1))], f"/sglang/{name}/encode")).status_code == 200
            await service.received()
        assert (await service.encode([url(sample_image(1))], "/sglang/other/encode")).status_code == 404
        llava = await service.encode([url(sample_image(1))], f"/sglang/{llava_pair[0]}/encode")
        assert llava.status_code == 422
        assert "llava" in llava.json()["message"]
        assert (await service.client.get(f"/sglang/{qwen.name}/health")).status_code == 200

    run(scenario, registry=registry)


def test_epd_server_pixels_equal_sglang(run: Run) -> None:
    async def scenario(service: Service) -> None:
        glass = sample_image(4).convert("RGBA")
        glass.putalpha(90)
        assert (await service.encode([url(glass)])).status_code == 200
        frames = await service.received()
        assert digest_image(glass.convert("RGB")).hex().encode() in frames[0]

    run(scenario)


@pytest.mark.parametrize(
    "proof", [None, "", "00" * 32, prove_salt(SECRET, "other"), prove_salt(b"o" * 32, "t")]
)
def test_epd_server_salt_without_proof_is_refused(run: Run, proof: str | None) -> None:
    async def scenario(service: Service) -> None:
        item = {"url": url(sample_image(3)), "cornplug_salt": "t", "cornplug_salt_proof": proof}
        answer = await service.encode([item])
        assert (answer.status_code, answer.json()["reason"]) == (403, "forbidden_salt")
        await service.silence()

    run(scenario, trust_salts=False)


def test_receiver_rendezvous_forgets_and_needs_one_count() -> None:
    async def scenario() -> None:
        meeting = ReceiverRendezvous(ttl_s=0.5)
        meeting.register("a", "here", 2, "tcp://h:1")
        with expect_error(EncoderRefused, reason="bad_input", match="receive_count"):
            meeting.register("a", "here", 3, "tcp://h:2")
        await asyncio.sleep(0.6)
        meeting.register("b", "here", 1, "tcp://h:3")
        with expect_error(EncoderRefused, reason="no_receiver"):
            await meeting.wait_receivers("a", "here", deadline_s=0.01)
        assert await meeting.wait_receivers("b", "here", deadline_s=0.01) == ["tcp://h:3"]

    asyncio.run(scenario())


def test_receiver_rendezvous_other_group_gets_no_rows() -> None:
    async def scenario() -> None:
        meeting, guard = (
            ReceiverRendezvous(ttl_s=60),
            ReceiverGuard(load(RECEIVERS, environ={}).encoder.receiver_networks()),
        )
        stranger, mine = guard.group_of("203.0.113.9"), guard.group_of("127.0.0.1")
        meeting.register("r", stranger, 7, "tcp://203.0.113.9:1")
        meeting.register("r", mine, 1, "tcp://127.0.0.1:2")
        assert await meeting.wait_receivers("r", guard.group_of("::ffff:127.0.0.1"), deadline_s=1) == [
            "tcp://127.0.0.1:2"
        ]
        # Ranks of one server on several hosts of the deployment still meet.
        meeting.register("r", guard.group_of("10.1.0.2"), 1, "tcp://10.1.0.2:2")
        assert await meeting.wait_receivers("r", guard.group_of("10.1.0.1"), deadline_s=1) == [
            "tcp://10.1.0.2:2"
        ]
        # Nor does a flood of one, or of many, make anybody else be forgotten.
        meeting.register("r", mine, 1, "tcp://127.0.0.1:2")
        for n in range(5000):
            meeting.register(f"{n}", stranger, 2, "tcp://203.0.113.9:1")
            meeting.register("r", f"stranger {n}", 2, "tcp://203.0.113.9:1")
        assert await meeting.wait_receivers("r", mine, deadline_s=1) == ["tcp://127.0.0.1:2"]
        guard.close()

    asyncio.run(scenario())


def test_receiver_guard_slow_name_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    let_go = threading.Event()

    def slow(*_: object, **__: object) -> Any:
        let_go.wait(20)
        raise OSError

    async def scenario() -> None:
        guard = ReceiverGuard()
        asks = [guard.resolve_endpoint(f"h{n}.example", 5, requester="127.0.0.1") for n in range(40)]
        with within(15):
            waiting = asyncio.gather(*asks, return_exceptions=True)
            await asyncio.sleep(0.05)
            # Addresses are looked up nowhere, and asyncio's own threads are free.
            assert await guard.resolve_endpoint("127.0.0.1", 5, requester="127.0.0.1") == "tcp://127.0.0.1:5"
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 10) == 1
            assert all(isinstance(e, EncoderRefused) for e in await waiting)
        guard.close()
        let_go.set()

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.run(scenario())


def test_receiver_guard_knows_host_by_any_name() -> None:
    async def scenario() -> None:
        guard = ReceiverGuard()
        assert (
            await guard.resolve_endpoint("127.0.0.1", 5, requester="::ffff:127.0.0.1") == "tcp://127.0.0.1:5"
        )
        assert (
            await guard.resolve_endpoint("198.51.100.7", 5, requester="198.51.100.7")
            == "tcp://198.51.100.7:5"
        )
        for host, asker in (("198.51.100.8", "198.51.100.7"), ("127.0.0.1", "198.51.100.7"), ("::", "::1")):
            with pytest.raises(EncoderRefused):
                await guard.resolve_endpoint(host, 5, requester=asker)
        with pytest.raises(EncoderRefused):
            await guard.resolve_endpoint("127.0.0.1", 5, requester=None)

    asyncio.run(scenario())


def test_zmq_sender_closed_keeps_no_sockets() -> None:
    async def scenario() -> None:
        sender = ZmqSender()
        with expect_error(EncoderRefused, reason="undeliverable"):
            await sender.send("tcp://127.0.0.1:9", [b"x"], deadline_s=0.1)
        sender.close()

    asyncio.run(scenario())


def test_language_only_urls_are_of_models_that_sglang_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    def families(engine: str, _release: str, dtype: str) -> frozenset[str]:
        return frozenset({"qwen3_vl", "glm4v"} if (engine, dtype) == ("sglang", "float32") else ())

    def model(family: str, dtype: str) -> ServedModel:
        name = f"/m/{family}"
        return ServedModel(name, family, b"", b"", b"", b"", dtype=dtype, hidden_size=8)

    monkeypatch.setattr(sglang_server, "compared_families", families)
    whole, half, other = (
        model("qwen3_vl", "float32"),
        model("qwen3_vl", "bfloat16"),
        model("llava", "float32"),
    )
    without = model("glm4v", "float32")  # SGLang refuses `--language-only` for it
    assert sglang_server.language_only_urls([whole], 8750) == ["http://HOST:8750"]
    assert sglang_server.language_only_urls([half], 8750) == []
    found = sglang_server.language_only_urls([other, whole, without], 8750)
    assert found == [f"http://HOST:8750/sglang/{sglang_server.url_name('/m/qwen3_vl')}"]
