"""Engines' path over HTTP: a real service at a real port, and services that fail in every way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.config import Config, load
from cornplug.encoder_service.client.endpoints import rank_services
from cornplug.encoder_service.client.engine_encoder import engine_encoder
from cornplug.encoder_service.client.remote_client import RemoteEncoder
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.engine_seal import ENGINE_PATH, MEDIA_TYPE, EngineSeal
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest
from cornplug.encoder_service.http.access_control import DrainState
from cornplug.encoder_service.http.app import create_app
from cornplug.errors import ConfigError, EncoderError, EncoderRefused
from cornplug.store.memory import MemoryStore

from ..conftest import SECRET, MakeEncoder, Requests, eventually, waiting_for_batch
from ..execution.test_encoder import Gate, passes
from ..services import Behaviour, Misbehaving, Served, drips, half, raves, resets, says, says_nothing

__all__ = ["gate"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class Stage:
    def __init__(self, config: Config, make: MakeEncoder, stack: ExitStack) -> None:
        self.config, self.make, self.stack = config, make, stack

    def serve(self, encoder: EncoderCore | None = None, secret: bytes = SECRET, **changes: Any) -> Served:
        config = self.config.encoder.model_copy(update=changes)
        app = create_app(encoder or self.make(), config, secret=secret, drain_state=self.gate())
        return self.stack.enter_context(Served(app))

    def gate(self) -> DrainState:
        self.drain = DrainState()
        return self.drain

    def misbehave(self, behave: Behaviour) -> Misbehaving:
        return self.stack.enter_context(Misbehaving(behave))

    def ask(self, *urls: str) -> RemoteEncoder:
        return self.stack.enter_context(RemoteEncoder(urls, SECRET))


@pytest.fixture
def stage(config: Config, make_encoder: MakeEncoder) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(config, make_encoder, stack)


def reason(future: Future[EncodeReply], within_s: float = 40) -> str:
    error = future.exception(within_s)
    assert isinstance(error, EncoderError)
    return error.reason


def first_at(request: EncodeRequest, url: str, other: str, requests: Requests, path: Path) -> EncodeRequest:
    """A request whose medium goes to `url` first."""
    seeds = (requests(path, seed) for seed in range(2, 60))
    return next(
        one for one in chain([request], seeds) if rank_services(one.key, {url: 1, other: 1})[0] == url
    )


def test_remote_answer_equals_the_unix_sockets_and_carries_the_rows(
    stage: Stage, request_for: Requests, llava_pair: tuple[Path, Path], qwen: Path
) -> None:
    store = MemoryStore(capacity_bytes=16 << 20)
    encoder = stage.make(store.connect())
    client = stage.ask(stage.serve(encoder, require_key=True).url)
    assert client.describe(20) == encoder.registry.served_models()
    eventually(lambda: client.connected)
    for path in (*llava_pair, qwen):
        request = request_for(path, 1, cache_salt="acme")
        first = client.submit(request).result(60)
        local = encoder.submit(request, inline=True).result(60)
        again = client.submit(request).result(60)
        assert isinstance(local, EncodeReply)
        assert (first.key, first.tensor, first.stored) == (local.key, local.tensor, False)
        # From the service's store, which this engine cannot read.
        assert (again.origin, again.tensor) == ("cached", first.tensor)
    assert passes(encoder) == 2
    with expect_error(EncoderRefused, reason="bad_input", match="pixel_values"):
        client.submit(request_for(llava_pair[0], 2, inputs={})).result(60)
    assert client.refusal is None


@pytest.mark.parametrize(
    ("behave", "want"),
    [
        (says_nothing, "encoder_timeout"),
        (drips, "encoder_timeout"),
        (resets, "encoder_down"),
        (half, "encoder_down"),
        (raves, "encoder_down"),
        (says(200, b"x" * 100, content_type=MEDIA_TYPE), "encoder_untrusted"),
        (says(404, b""), "encoder_version"),
        (says(401, b'{"error": {"message": "no"}}'), "encoder_untrusted"),
        (says(503, b'{"error": {"message": "full", "retry_after_s": 9}}'), "overloaded"),
        (says(413, b""), "bad_input"),
        (says(302, b"", location="http://elsewhere"), "encoder_bad_response"),
    ],
)
def test_remote_service_that_fails_is_a_counted_miss_within_the_deadline(
    behave: Behaviour, want: str, stage: Stage, request_for: Requests, qwen: Path, within: TimeLimits
) -> None:
    client = stage.ask(stage.misbehave(behave).url)
    deadline_s = 0.5 if want == "encoder_timeout" else 30
    with within(15):
        assert reason(client.submit(request_for(qwen, 1, deadline_s=deadline_s))) == want
    if want != "bad_input":
        # Others do not wait for it.
        eventually(lambda: client.refusal is not None)
        with within(10):
            reason(client.submit(request_for(qwen, 1, deadline_s=30)))


def test_remote_client_without_service_fails_at_once_then_recovers(
    stage: Stage, request_for: Requests, qwen: Path, within: TimeLimits
) -> None:
    served = stage.serve()
    client = stage.ask(served.url)
    eventually(lambda: client.connected)
    served.kill()
    assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"
    eventually(lambda: client.refusal is not None)
    with within(10):
        assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"
    client.close()
    assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"


def test_remote_service_killed_while_answering_fails_over(
    stage: Stage, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    dying, other = stage.serve(), stage.serve()
    client = stage.ask(dying.url, other.url)
    eventually(lambda: all(s.is_verified for s in client._services.values()))
    path = llava_pair[0]
    request = first_at(request_for(path, 1), dying.url, other.url, request_for, path)
    pending = client.submit(request)
    assert gate.entered.wait(60)
    dying.kill()
    gate.open.set()
    assert pending.result(60).tensor is not None
    eventually(lambda: client._services[dying.url].error is not None)
    assert client.refusal is None


@pytest.mark.more
def test_remote_full_or_slow_service_fails_over_and_is_left_out(
    stage: Stage, request_for: Requests, llava_pair: tuple[Path, Path], within: TimeLimits
) -> None:
    path = llava_pair[0]
    for behave in (says(503, b'{"error": {"message": "full", "retry_after_s": 60}}'), says_nothing):
        bad, good = stage.misbehave(behave), stage.serve()
        client = stage.ask(bad.url, good.url)
        request = first_at(request_for(path, 1), bad.url, good.url, request_for, path)
        with within(9.5, "a silent service has half of the deadline"):
            first = client.submit(msgspec.structs.replace(request, deadline_s=12.0)).result(60)
        assert first.tensor is not None
        eventually(lambda c=client, b=bad: c._services[b.url].error is not None)  # type: ignore[misc]
        sent = sum(len(one) > 5000 for one in bad.requests)
        with within(10, "it had half of the deadline of 30 s"):
            client.submit(request).result(40)
        assert sum(len(one) > 5000 for one in bad.requests) == sent  # no pixels: probes are small


def test_remote_service_late_by_a_second_is_a_timeout(
    stage: Stage, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    client = stage.ask(stage.serve().url)
    eventually(lambda: client.connected)
    pending = client.submit(request_for(llava_pair[0], 1, deadline_s=0.5))
    assert reason(pending, 15) == "encoder_timeout"  # the gate is closed for 20 s
    gate.open.set()
    # It answers the probe, and is asked again.
    eventually(lambda: client.refusal is None)
    assert client.submit(request_for(llava_pair[0], 2)).result(60).tensor is not None


def test_remote_other_secret_is_untrusted_on_both_sides(
    stage: Stage, request_for: Requests, qwen: Path
) -> None:
    encoder = stage.make()
    served = stage.serve(encoder, secret=b"o" * 32)
    client = stage.ask(served.url)
    assert reason(client.submit(request_for(qwen, 1))) == "encoder_untrusted"
    assert passes(encoder) == 0
    with expect_error(EncoderError, reason="encoder_untrusted", match="secret_file"):
        client.describe(20)


def test_engine_route_replay_stolen_proof_and_unsealed_body_are_refused(
    stage: Stage, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    encoder = stage.make()
    url = stage.serve(encoder).url + ENGINE_PATH
    seal = EngineSeal.new(SECRET)
    body = seal.seal_request(msgspec.msgpack.encode(request_for(llava_pair[0], 1)))

    def post(authorization: str, content: bytes, kind: str = MEDIA_TYPE) -> int:
        headers = {"authorization": authorization, "content-type": kind}
        return httpx.post(url, content=content, headers=headers).status_code

    assert post("", body) == post("Bearer key", body) == 401
    assert post(seal.authorization, body) == 200
    assert passes(encoder) == 1
    assert post(seal.authorization, body) == 401
    stolen = EngineSeal.new(SECRET).authorization
    assert post(stolen, body) == 401
    assert post(EngineSeal.new(SECRET).authorization, b"") == 401
    assert post(EngineSeal.new(SECRET).authorization, body, "text/plain") == 415
    other = EngineSeal.new(SECRET)
    garbage = httpx.post(
        url,
        content=other.seal_request(b"\xc1"),
        headers={"authorization": other.authorization, "content-type": MEDIA_TYPE},
    )
    assert b"refused" in other.open_reply(garbage.content)
    assert passes(encoder) == 1


def test_engine_route_body_limits_and_drain_are_those_of_other_routes(
    stage: Stage, request_for: Requests, qwen: Path
) -> None:
    client = stage.ask(stage.serve(max_body_bytes=1).url)
    large = {
        "pixel_values": msgspec.structs.replace(
            request_for(qwen, 1).inputs["pixel_values"], data=bytes(1 << 17)
        )
    }
    assert reason(client.submit(request_for(qwen, 1, inputs=large))) == "bad_input"
    stage.drain.close()
    assert reason(client.submit(request_for(qwen, 1))) == "overloaded"


def test_engine_that_hangs_up_is_not_computed_for(
    stage: Stage, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = stage.make()
    url = stage.serve(encoder).url
    stays, leaves = stage.ask(url), stage.ask(url)
    held = stays.submit(request_for(llava_pair[0], 1))
    assert gate.entered.wait(60)
    gone = leaves.submit(request_for(llava_pair[0], 2))
    eventually(lambda: waiting_for_batch(encoder) == 1)
    leaves.close()
    assert reason(gone) == "encoder_down"
    eventually(lambda: encoder.count_waiting() == 1)
    gate.open.set()
    held.result(60)
    assert passes(encoder) == 1


def settings(tmp_path: Path, **changes: str) -> Config:
    said = {"store.secret_file": str(tmp_path / "secret"), "encoder.engine_urls": "http://a:1, http://b:1/"}
    return load({**said, **changes}, environ={})


def test_engine_encoder_chooses_by_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = engine_encoder(settings(tmp_path), SECRET)
    assert isinstance(remote, RemoteEncoder)
    assert list(remote._services) == ["http://a:1", "http://b:1"]
    remote.close()
    local = engine_encoder(settings(tmp_path, **{"encoder.engine_urls": ""}), SECRET)
    assert isinstance(local, SocketEncoder)
    local.close()
    default = load({"encoder.engine_urls": "http://a:1"}, environ={})
    with expect_error(ConfigError, field="store.secret_file"):
        engine_encoder(default, SECRET)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with expect_error(ConfigError, field="encoder.engine_urls"):
        engine_encoder(settings(tmp_path), SECRET)


def test_engine_encoder_takes_the_weights_of_its_urls(tmp_path: Path) -> None:
    urls = "http://a:1/#3, http://b:1#0.5, http://c:1"
    remote = engine_encoder(settings(tmp_path, **{"encoder.engine_urls": urls}), SECRET)
    assert isinstance(remote, RemoteEncoder)
    assert remote._weights == {"http://a:1": 3.0, "http://b:1": 0.5, "http://c:1": 1.0}
    assert list(remote._services) == ["http://a:1", "http://b:1", "http://c:1"]
    remote.close()


@pytest.mark.parametrize(
    "urls",
    [
        "tcp://a", "http://", "http://a:99999", "/path", "http://a,/path", "http://a,http://a/",
        "http://a#1,http://a/#2", "http://a#0", "http://a#-1", "http://a#inf", "http://a#nan", "http://a#x",
    ],
)  # fmt: skip
def test_engine_urls_that_name_no_service_are_refused(urls: str) -> None:
    with expect_error(ConfigError, field="encoder.engine_urls"):
        load({"encoder.engine_urls": urls}, environ={})
