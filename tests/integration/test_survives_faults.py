"""Never worse, on a real engine under a steady stream: after each fault, every request is answered as stock
answers, in time; the reason is counted; sharing resumes by itself."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from integration.faults import (
    UNSEEN,
    Subject,
    arena_corrupted,
    check,
    encoder_killed,
    sharing_resumes,
    store_hung,
    store_killed,
)
from integration.request_streams import answered, stream
from integration.stack import ASKS, COUNTED_S, Stack, count, wait_for_more

from cornplug.config import load
from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.store.client import PoolStore
from cornplug.store.payload import get_payload
from devkit.engines import EngineServer, photos, wait_until
from devkit.processes import at_once

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang_alone)
LATE_SGLANG = pytest.param("sglang", marks=pytest.mark.sglang_alone)
EACH_ENGINE = pytest.mark.parametrize("subject", ["vllm", SGLANG], indirect=True, scope="module")
VLLM_FIRST = pytest.mark.parametrize("subject", ["vllm", LATE_SGLANG], indirect=True, scope="module")
"""For faults that both plugins meet in code that they have in common, the clients of store and service. A
dead store, a dead service, damaged pages and an engine killed beside it end in each plugin's code:
EACH_ENGINE."""


@pytest.fixture(scope="module")
def subject(stack: Stack, request: pytest.FixtureRequest) -> Subject:
    """An engine, warm: its prompts are in the store."""
    if request.param == "vllm":
        found = Subject(stack.servers["a"], "a", "a", "b")
    else:
        server = stack.sglang("s", "q", "--chunked-prefill-size", "256", hurried=True)
        at_once(lambda: stack.stock_of_sglang("q"), lambda: stack.start(s=server))
        found = Subject(server, "q", "sglang:q", "a")
    for ask in ASKS:
        ask.put(found.server)
    return found


@pytest.fixture
def engine(subject: Subject) -> EngineServer:
    return subject.server


@EACH_ENGINE
@pytest.mark.support("Faults", "the store is killed", engine="{subject}")
def test_engine_store_killed_answers_as_stock(stack: Stack, subject: Subject) -> None:
    store_killed(stack, subject)


@VLLM_FIRST
@pytest.mark.support("Faults", "the store hangs", engine="{subject}")
def test_engine_store_stopped_answers_as_stock(stack: Stack, subject: Subject) -> None:
    store_hung(stack, subject)


@VLLM_FIRST
@pytest.mark.support("Faults", "the store is full", engine="{subject}")
def test_engine_store_full_answers_as_stock(stack: Stack, engine: EngineServer, subject: Subject) -> None:
    assert stack.store is not None
    stack.store.kill()
    stack.start_store("192KiB")
    full = count(engine, "saves_total", kind="kv_page", outcome="full")
    with stream(engine, "store-full") as seen:
        answered(seen, 10)
        wait_for_more(engine, "saves_total", above=full, kind="kv_page", outcome="full")
        answered(seen, 5)
        stack.store.kill()
        stack.start_store()
        sharing_resumes(engine, "kv_page", "store")
    check(stack, seen, subject)


@EACH_ENGINE
@pytest.mark.support("Faults", "stored bytes are damaged", engine="{subject}")
def test_engine_arena_bytes_corrupted_answers_as_stock(stack: Stack, subject: Subject) -> None:
    arena_corrupted(stack, subject)


@EACH_ENGINE
@pytest.mark.support("Faults", "the encoder service is killed", engine="{subject}")
def test_engine_encoder_killed_answers_as_stock(stack: Stack, subject: Subject) -> None:
    encoder_killed(stack, subject)


@EACH_ENGINE
@pytest.mark.support("Sharing", "an image that the engine encoded is in the store", engine="{subject}")
def test_engine_publishes_the_embedding_that_the_service_computes(
    stack: Stack, engine: EngineServer, subject: Subject
) -> None:
    """One image by two doors: the engine's own tower while the service was dead, and the
    service by HTTP. Both arrive at one key, and at values that agree within 1e-5."""
    photo = photos()[UNSEEN].data
    config = load({"store.socket": stack.store_socket})
    store = PoolStore(config.store, autostart=False, connect_timeout_s=5)
    with contextlib.closing(store), EncoderClient(stack.encoder.url, store=store) as client:
        ref = client.encode(photo, model=str(stack.models[subject.model]))
        published = get_payload(store, ref.key, deadline_s=5)
        assert published is not None
        header, payload = published
        theirs = np.frombuffer(payload, np.float32).reshape(header.shape)
        # Under another salt nothing is known yet: the service has to compute it.
        ours = client.encode(
            photo, model=str(stack.models[subject.model]), cache_salt="computed-by-the-service"
        )
        assert ours.origin == "computed"
        assert ours.key != ref.key
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-5)


@VLLM_FIRST
@pytest.mark.support("Faults", "the encoder service hangs", engine="{subject}")
def test_engine_encoder_slow_answers_as_stock(stack: Stack, engine: EngineServer, subject: Subject) -> None:
    late = count(engine, "misses_total", kind="embedding", reason="encoder_timeout")
    with stream(engine, "encoder-slow") as seen:
        answered(seen, 5)
        stack.encoder.freeze()
        try:
            wait_for_more(engine, "misses_total", above=late, kind="embedding", reason="encoder_timeout")
            answered(seen, 10)
        finally:
            stack.encoder.resume()
        sharing_resumes(engine, "embedding", "service_computed")
    check(stack, seen, subject)


@VLLM_FIRST
@pytest.mark.support("Faults", "the encoder service answers random bytes", engine="{subject}")
def test_engine_encoder_answers_random_bytes_answers_as_stock(
    stack: Stack, engine: EngineServer, subject: Subject
) -> None:
    bad = count(engine, "misses_total", kind="embedding", reason="encoder_bad_response")
    stack.encoder.stop()
    with stream(engine, "encoder-garbage") as seen:
        with babbler(stack.encoder.socket):
            wait_for_more(engine, "misses_total", above=bad, kind="embedding", reason="encoder_bad_response")
            answered(seen, 10)
        stack.encoder.start()
        sharing_resumes(engine, "embedding", "service_computed")
    check(stack, seen, subject)


@EACH_ENGINE
@pytest.mark.support("Faults", "another engine is killed while it writes", engine="{subject}")
def test_engine_neighbour_killed_with_reservations_answers_as_stock(
    stack: Stack, engine: EngineServer, subject: Subject
) -> None:
    victim = stack.servers[subject.neighbour]
    held = 0
    with stream(engine, "engine-killed") as seen:
        with stream(victim, "victim") as doomed:
            answered(doomed, 5)
            # Its processes are stopped at the moment that the store has given it room.
            wait_until(lambda: stack.stat().reservations > 0, deadline_s=COUNTED_S, what="a reservation")
            held = stack.stat().reservations
            victim.kill()
            wait_until(lambda: bool(doomed.errors), deadline_s=30, what="an error of the victim's clients")
        wait_until(lambda: stack.stat().reservations < max(held, 2), deadline_s=30, what="reservations ended")
        answered(seen, 10)
    check(stack, seen, subject)
    count(engine, "hits_total")
    wait_until(lambda: stack.stat().reservations == 0, deadline_s=30, what="no reservation left")


@contextlib.contextmanager
def babbler(path: Path) -> Iterator[None]:
    """A process that has taken the encoder's socket and answers random bytes."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        listener.settimeout(0.2)
        stop = threading.Event()

        def babble() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    client, _ = listener.accept()
                    with client:
                        client.settimeout(0.2)
                        client.recv(1 << 16)
                        client.sendall(os.urandom(64))

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            path.unlink(missing_ok=True)
