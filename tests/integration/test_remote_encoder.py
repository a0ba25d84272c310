"""An engine pulls embeddings from an encoder service of another host: own store, same secret, one URL.

Where network namespaces can be made the hosts have networks of their own, which a cable joins.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from integration.stack import Ask, count

from devkit import checkpoints
from devkit.engines import EngineServer, StoreProcess, VllmServer
from devkit.network_hosts import ADDRESSES, NetworkHosts, reason_against
from devkit.processes import EncoderProcess, at_once, wait_until
from devkit.sglang_engine import SglangServer, sglang_python

FROM_SERVICE = (Ask("What is shown?", (0,)), Ask("Compare the two.", (1, 0)))
AFTER_DEATH = Ask("What is shown?", (2,))
SGLANG = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")


@pytest.fixture
def network() -> Iterator[NetworkHosts | None]:
    """This thread is on host 0."""
    if reason_against():
        yield None
        return
    with NetworkHosts() as hosts, hosts.entered(0):
        yield hosts


def make_engine(kind: str, model: Path, *flags: str, log: Path, env: dict[str, str]) -> EngineServer:
    if kind == "sglang":
        return SglangServer(model, *flags, log=log, env=env)
    return VllmServer(model, *flags and ("--kv-connector", "cornplug"), *flags, log=log, env=env)


@pytest.mark.support("Sharing", "embeddings of an encoder service on another host", engine="{kind}")
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=SGLANG)])
def test_remote_encoder_engine_pulls_rows_and_encodes_when_it_is_killed(
    kind: str, network: NetworkHosts | None, tmp_path: Path
) -> None:
    model = checkpoints.qwen2_vl(tmp_path / "model")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    # The default secret, which each host makes by chance, is refused.
    env = {"CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret"), "CORNPLUG_STORE_AUTOSTART": "false"}
    theirs = StoreProcess(sockets / "theirs.sock", log=tmp_path / "theirs.log", env=env)
    ours = StoreProcess(sockets / "ours.sock", log=tmp_path / "ours.log", env=env)
    service = EncoderProcess(
        [model],
        # Engines prove to have the secret; a network without applications needs no keys for them.
        *("--store-socket", str(sockets / "theirs.sock"), "--allow-anonymous"),
        socket=sockets / "e.sock",
        log=tmp_path / "encoder.log",
        env=env,
        address="127.0.0.1" if network is None else ADDRESSES[1],
        inside=() if network is None else network.command(1),
    )
    engine = make_engine(
        kind,
        model,
        *("--cornplug-app", "far", "--cornplug-encoder", service.url),
        *("--cornplug-store", str(sockets / "ours.sock")),
        log=tmp_path / "engine.log",
        # Every entry of its store is an embedding then.
        env={**env, "CORNPLUG_ENGINE_SHARE_KV": "false", "CORNPLUG_STORE_LOAD_WHEN": "always"},
    )
    stock = make_engine(kind, model, log=tmp_path / "stock.log", env={})
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, sockets, ignore_errors=True)
        for process in (ours, theirs, service, stock, engine):
            ends.callback(process.kill)
        theirs.start()
        ours.start()
        at_once(service.start, stock.start)
        expected = {ask: ask.put(stock).token_ids for ask in (*FROM_SERVICE, AFTER_DEATH)}
        stock.stop()
        engine.start()
        warm = service.tower_passes()  # SGLang warms up with an image
        for ask in FROM_SERVICE:
            assert ask.put(engine).token_ids == expected[ask]
        images = warm + 2
        assert count(engine, "hits_total", kind="embedding", source="service_computed") == images
        assert count(engine, "misses_total", kind="embedding") == 0
        assert service.tower_passes() == images
        wait_until(lambda: ours.stat().entries == images, deadline_s=60, what="images in the engine's store")
        service.kill()
        assert AFTER_DEATH.put(engine).token_ids == expected[AFTER_DEATH]
        assert count(engine, "misses_total", reason="encoder_down") == 1
