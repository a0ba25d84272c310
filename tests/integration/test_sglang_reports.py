"""Public bug reports about SGLang, on real servers; a comment beside each test names the report."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from integration.stack import PREAMBLE, count, settle_saves
from integration.test_public_reports import ids
from integration.test_sglang_kinds import same, shareable
from PIL import Image

from cornplug.host import free_port
from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, RequestFailed, StoreProcess, wait_until
from devkit.injected_code import injected_environment
from devkit.processes import together
from devkit.sglang_engine import Generation, SglangServer, sglang_python

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
    pytest.mark.timeout(1800),
]

PAGE: Final = 64
OWN: Final = {"CORNPLUG_STORE_AUTOSTART": "false"}


def picture(left: tuple[int, int, int], right: tuple[int, int, int] = (0, 0, 0), side: int = 64) -> bytes:
    """PNG of a square of two halves."""
    image = Image.new("RGB", (side, side), left)
    image.paste(right, (side // 2, 0, side, side))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def equal(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


# -- storage that is detached and attached -------------------------------------------------------

DEVICE_TOKENS: Final = 2048
ADMIN: Final = {"Authorization": "Bearer key"}
ATTACHED: Final = {
    "hicache_storage_backend": "dynamic",
    "hicache_storage_backend_extra_config_json": json.dumps(
        {
            "backend_name": "cornplug",
            "module_path": "cornplug.sglang_hooks.kv.hicache_storage",
            "class_name": "CornplugStorage",
        }
    ),
}
"""As docs/operate.md has it."""


def test_storage_attached_to_a_warm_server_shares_again(sockets: Path, tmp_path: Path) -> None:
    # sglang#35269, sglang#15892
    model = checkpoints.qwen2_text(tmp_path / "model")
    store = StoreProcess(sockets / "attached", log=tmp_path / "store.log")

    def server(name: str, *flags: str) -> SglangServer:
        ours = ("--cornplug-store", str(store.socket), "--cornplug-save", "always", *flags)
        return SglangServer(model, *ours, log=tmp_path / f"{name}.log", env=OWN)

    small = ("--max-total-tokens", str(DEVICE_TOKENS), "--hicache-ratio", "1.1")
    warm, fresh = server("warm", *small, "--admin-api-key", "key"), server("fresh")
    stock = SglangServer(model, log=tmp_path / "stock.log")
    fill = [ids(i, 400) for i in range(14)]
    # A prompt that goes on where the tree has pages from before, and one that is new.
    after = [(*fill[-1], *ids(150, 200)), ids(151, 400)]
    with store:
        with together(stock, warm):
            expected = [stock.generate(prompt, max_tokens=4) for prompt in after]
            for prompt in fill:
                warm.generate(prompt, max_tokens=4)
            settle_saves(warm, store)
            # Every page came through host memory, which holds fewer: it is full.
            assert store.stat().entries * PAGE > 1.5 * 1.1 * DEVICE_TOKENS

            url = f"{warm.url}/hicache/storage-backend"

            def detached() -> bool:  # refused while the server copies
                answer = httpx.delete(url, headers=ADMIN, timeout=120, trust_env=False)
                return answer.status_code == 200

            wait_until(detached, deadline_s=90, what="storage detached from an idle server")
            answer = httpx.put(url, headers=ADMIN, json=ATTACHED, timeout=120, trust_env=False)
            assert answer.status_code == 200, answer.text
            for prompt, known in zip(after, expected, strict=True):
                same(warm.generate(prompt, max_tokens=4), known)
            settle_saves(warm, store)
        with fresh:
            for prompt, known in zip(after, expected, strict=True):
                found = fresh.generate(prompt, max_tokens=4)
                same(found, known)
                assert found.cached["storage"] == shareable(found) >= 6 * PAGE


# -- many images at once -------------------------------------------------------------------------

MANY: Final = 200
FEW_WAIT: Final = """
def change(module):
    module.MAX_WAITING = 8
"""
"""Makes the queue of the service so short that it refuses some images."""
QUEUE: Final = "cornplug.encoder_service.fair_queue"
AT_ONCE: Final = 64
"""Requests for which the service, which is stopped meanwhile, has a connection at least."""
HANGS_S: Final = 180.0
"""`encoder.language_only_timeout_s`, which is 60 s, and what a busy machine takes to answer."""
MODEL_WORDS: Final = "What is shown?"


def unique(i: int) -> bytes:
    return picture((40 + i, 255 - i, i * 7 % 256), (i * 13 % 256, 40, 255 - i))


def connections(port: int) -> int:
    """Number of established connections of clients on this host to a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.parametrize("backend", ["zmq_to_scheduler", "zmq_to_tokenizer"])
def test_server_without_tower_answers_or_refuses_many_images(
    backend: str, sockets: Path, tmp_path: Path
) -> None:  # sglang#23082
    """The service has all requests at once when it goes on, and room for a few."""
    model = checkpoints.qwen3_vl(tmp_path / "model")
    store = StoreProcess(sockets / backend, log=tmp_path / "store.log")
    encoder = EncoderProcess(
        [model],
        *("--sglang", "--store-socket", str(store.socket)),
        socket=sockets / f"e-{backend}",
        log=tmp_path / "encoder.log",
        env={**OWN, **injected_environment(tmp_path, FEW_WAIT, into=QUEUE)},
    )
    stock = SglangServer(model, log=tmp_path / "stock.log")
    server = SglangServer(
        model,
        *("--language-only", "--encoder-urls", encoder.url, "--encoder-transfer-backend", backend),
        *("--encoder-bootstrap-port", str(free_port()), "--cornplug-store", str(store.socket)),
        *("--cornplug-encoder", str(encoder.socket)),
        log=tmp_path / "server.log",
        env=OWN,
    )

    def put(engine: SglangServer, i: int) -> Answer:
        return engine.chat(MODEL_WORDS, images=[unique(i)], max_tokens=4, timeout_s=HANGS_S)

    def ended(i: int) -> tuple[Answer | int, float]:
        """The answer, or the status of an error, and the time until then."""
        began_s = time.monotonic()
        try:
            found: Answer | int = put(server, i)
        except RequestFailed as e:
            found = e.status
        return found, time.monotonic() - began_s

    with store, together(encoder, stock, server):
        sample = {i: put(stock, i) for i in range(0, MANY + 1, 10)}
        equal(put(server, MANY), sample[MANY])
        encoder.freeze()
        try:
            with ThreadPoolExecutor(MANY) as pool:
                requests = [pool.submit(ended, i) for i in range(MANY)]
                try:
                    wait_until(
                        lambda: connections(encoder.port) >= AT_ONCE, deadline_s=50, what="many requests"
                    )
                finally:
                    encoder.resume()
                found = [request.result() for request in requests]
        finally:
            encoder.resume()
        failed = Counter(outcome for outcome, _ in found if isinstance(outcome, int))
        assert set(failed) == {503}, f"{failed}, of {MANY}"
        assert failed[503] < MANY
        assert max(took_s for _, took_s in found) < HANGS_S
        for i, (outcome, _) in enumerate(found):
            if i in sample and isinstance(outcome, Answer):
                assert outcome.token_ids == sample[i].token_ids
        for i in sample:  # those that were refused, too
            equal(put(server, i), sample[i])


# -- names of media ------------------------------------------------------------------------------

ONE_HASH: Final = """
def change(module):
    item = module.MultimodalDataItem
    adopt = item.set_identity

    def set_identity(self, identity):
        adopt(self, identity)
        self.hash = 7

    item.set_identity = set_identity
"""
"""The 64 bits by which SGLang's embedding cache names media are those of every medium; identities differ."""
ITEMS: Final = "sglang.srt.managers.schedule_batch"


def test_media_of_one_hash_keep_their_own_rows(sockets: Path, tmp_path: Path) -> None:
    # sglang#36595, sglang#32404
    model = checkpoints.qwen2_vl(tmp_path / "model")
    store = StoreProcess(sockets / "hash", log=tmp_path / "store.log")
    red, blue = (255, 0, 0), (0, 0, 255)
    large, small = picture(red, blue, 112), picture(blue, red, 56)
    words = f"What is shown? {PREAMBLE}"
    prompt = f"<|vision_start|><|image_pad|><|vision_end|>{words}"

    def server(name: str, env: Mapping[str, str]) -> SglangServer:
        ours = ("--cornplug-store", str(store.socket), "--cornplug-save", "always")
        return SglangServer(model, *ours, log=tmp_path / f"{name}.log", env={**OWN, **env})

    def look(engine: SglangServer) -> list[Answer]:
        return [
            engine.chat(words, images=images, max_tokens=8)
            for images in ([large], [small], [large], [large, small])
        ]

    def named(engine: SglangServer, **fields: Any) -> list[Generation]:
        """Two images of one size, by turns."""
        return [
            engine.generate(prompt, images=[picture(*colours, 112)], max_tokens=8, **fields)
            for colours in ((red, blue), (blue, red), (red, blue))
        ]

    stock = SglangServer(model, log=tmp_path / "stock.log")
    collided = server("collided", injected_environment(tmp_path, ONE_HASH, into=ITEMS))
    fresh = server("fresh", {})
    with store:
        with together(stock, collided):
            expected, theirs = look(stock), named(stock)
            other = stock.chat("Another question.", images=[small], max_tokens=8)
            assert theirs[0].output_ids == theirs[2].output_ids
            assert theirs[0].logprobs != pytest.approx(theirs[1].logprobs, abs=1e-4)
            for answer, known in zip(look(collided), expected, strict=True):
                equal(answer, known)
            # SGLang's own words: so the hashes were equal.
            assert "token-count mismatch" in collided.log.read_text()
            wait_until(
                lambda: count(collided, "saves_total", kind="embedding", outcome="stored") >= 2,
                deadline_s=60,
                what="both embeddings in the store",
            )
            settle_saves(collided, store)
        with fresh:
            # The embedding that the other server published is this image's.
            before = count(fresh, "hits_total", kind="embedding", source="store")
            equal(fresh.chat("Another question.", images=[small], max_tokens=8), other)
            assert count(fresh, "hits_total", kind="embedding", source="store") > before
            # A client's hash of 64 bits says nothing of the image.
            for answer, known in zip(named(fresh, mm_hashes=["ab" * 8]), theirs, strict=True):
                same(answer, known)
