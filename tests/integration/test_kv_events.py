"""KV events of a real vLLM, as a router reads them: pages of the store beside vLLM's own blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from integration.stack import PREAMBLE, flush

from cornplug.config import StoreConfig
from cornplug.host import free_port
from cornplug.store.base import PurgeRule
from cornplug.store.client import PoolStore
from devkit import checkpoints
from devkit.engines import VllmServer, wait_until
from devkit.processes import StoreProcess

WORDS = f"{PREAMBLE} {PREAMBLE} What is a router?"


class Subscriber:
    """A router, as far as it reads: no code of vLLM's takes part."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"")
        self.known: dict[str, dict[Any, dict[str, Any]]] = {}
        """Medium -> block -> the event that stored it."""

    def read(self) -> None:
        """Take what has arrived."""
        while self._socket.poll(100):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                blocks = self.known.setdefault(event.get("medium", ""), {})
                if event["type"] == "BlockStored":
                    blocks |= dict.fromkeys(event["block_hashes"], event)
                elif event["type"] == "BlockRemoved":
                    for block in event["block_hashes"]:
                        blocks.pop(block, None)
                else:
                    self.known.clear()

    def has(self, medium: str) -> dict[Any, dict[str, Any]]:
        self.read()
        return self.known.get(medium, {})

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def server(short_path: Path) -> Iterator[tuple[VllmServer, Subscriber, StoreConfig]]:
    model, socket, port = checkpoints.qwen2_text(short_path / "model"), short_path / "s", free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    ours = ("--kv-connector", "cornplug", "--cornplug-app", "events", "--cornplug-store", str(socket))
    subscriber = Subscriber(port)
    with (
        StoreProcess(socket, log=short_path / "store.log"),
        VllmServer(
            model, *ours, "--kv-events-config", json.dumps(events), log=short_path / "log",
            env={"VLLM_SERVER_DEV_MODE": "1"},
        ) as one,
    ):  # fmt: skip
        yield one, subscriber, StoreConfig(socket=socket, autostart=False)
    subscriber.close()


@pytest.mark.timeout(400)
@pytest.mark.support("Sharing", "KV events of the store's pages")
def test_vllm_subscriber_learns_of_stored_and_of_evicted_pages(
    server: tuple[VllmServer, Subscriber, StoreConfig],
) -> None:
    engine, router, settings = server
    for _ in range(2):
        engine.chat(WORDS, max_tokens=1)
    wait_until(lambda: bool(router.has("CPU")), deadline_s=30, what="events of stored pages")
    stored, own = router.has("CPU"), router.has("GPU")
    assert stored.keys() <= own.keys(), "the names of pages are those of vLLM's blocks"
    first = next(event for event in stored.values() if event.get("parent_block_hash") is None)
    theirs = next(event for event in own.values() if event.get("parent_block_hash") is None)
    together = min(len(first["token_ids"]), len(theirs["token_ids"]))
    assert first["token_ids"][:together] == theirs["token_ids"][:together]
    assert first["block_size"] == theirs["block_size"]
    store = PoolStore(settings, connect_timeout_s=10)
    try:
        assert store.purge(PurgeRule(), deadline_s=10).entries
    finally:
        store.close()

    def forgotten() -> bool:
        flush(engine)  # an engine tells of evictions in a step
        return not stored.keys() & router.has("CPU").keys()

    wait_until(forgotten, deadline_s=30, what="events of removed pages")
