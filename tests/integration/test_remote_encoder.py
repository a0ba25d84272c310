"""An engine pulls embeddings from an encoder service of another host: own store, same secret, one URL."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from integration.stack import Ask, count

from devkit import checkpoints
from devkit.engines import StoreProcess, VllmServer
from devkit.processes import EncoderProcess, at_once, wait_until

pytestmark = pytest.mark.integration

FROM_SERVICE = (Ask("What is shown?", (0,)), Ask("Compare the two.", (1, 0)))
AFTER_DEATH = Ask("What is shown?", (2,))


@pytest.mark.support("Sharing", "embeddings of an encoder service on another host", engine="vllm")
def test_remote_encoder_engine_pulls_rows_and_encodes_when_it_is_killed(tmp_path: Path) -> None:
    model = checkpoints.qwen2_vl(tmp_path / "model")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    # The default secret, which each host makes by chance, is refused.
    env = {"CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret"), "CORNPLUG_STORE_AUTOSTART": "false"}
    theirs = StoreProcess(sockets / "theirs.sock", log=tmp_path / "theirs.log", env=env)
    ours = StoreProcess(sockets / "ours.sock", log=tmp_path / "ours.log", env=env)
    service = EncoderProcess(
        [model],
        *("--store-socket", str(sockets / "theirs.sock")),
        socket=sockets / "e.sock",
        log=tmp_path / "encoder.log",
        env=env,
    )
    engine = VllmServer(
        model,
        *("--kv-connector", "cornplug", "--cornplug-app", "far", "--cornplug-encoder", service.url),
        *("--cornplug-store", str(sockets / "ours.sock")),
        log=tmp_path / "engine.log",
        # Every entry of its store is an embedding then.
        env={**env, "CORNPLUG_ENGINE_SHARE_KV": "false", "CORNPLUG_STORE_LOAD_WHEN": "always"},
    )
    stock = VllmServer(model, log=tmp_path / "stock.log")
    asks = (*FROM_SERVICE, AFTER_DEATH)
    try:
        theirs.start()
        ours.start()
        at_once(service.start, stock.start)
        expected = {ask: ask.put(stock).token_ids for ask in asks}
        stock.stop()
        engine.start()
        for ask in FROM_SERVICE:
            assert ask.put(engine).token_ids == expected[ask]
        assert count(engine, "hits_total", what="embedding") == 2
        assert count(engine, "misses_total", what="embedding") == 0
        assert service.tower_passes() == 2
        wait_until(lambda: ours.stat().entries == 2, deadline_s=60, what="both images in the engine's store")
        service.kill()
        assert AFTER_DEATH.put(engine).token_ids == expected[AFTER_DEATH]
        assert count(engine, "misses_total", reason="encoder_down") == 1
    finally:
        for process in (engine, stock, service, ours, theirs):
            process.kill()
        shutil.rmtree(sockets, ignore_errors=True)
