"""One request id for all requests, as some gateways send: the engine answers as stock does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import httpx
import pytest

from devkit import checkpoints
from devkit.engines import VllmServer
from devkit.processes import StoreProcess

REQUESTS: Final = 100
ENVIRONMENT: Final = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}


def complete(server: VllmServer, number: int) -> int:
    """The status of a completion whose prompt shares nothing with others."""
    tokens = [(7 * i + 13 * number) % 200 + 3 for i in range(200)]
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "model", "prompt": tokens, "max_tokens": 1, "temperature": 0},
        headers={"X-Request-Id": "same"},
        timeout=60,
        trust_env=False,
    )
    return answer.status_code


@pytest.mark.timeout(600)
@pytest.mark.support("Faults", "one request id for all requests, saves {save}")
@pytest.mark.parametrize("save", ["always", "second"])
@pytest.mark.parametrize("bed", ["v1", "v2-gpu"])
def test_repeated_request_id_is_answered(bed: str, save: str, short_path: Path) -> None:
    if bed != "v1" and "DEVKIT_VLLM_BED" in os.environ:
        pytest.skip("the run has a bed of its own")
    model, socket = checkpoints.qwen2_text(short_path / "model"), short_path / "s"
    flags = ("--kv-connector", "cornplug", "--cornplug-store", str(socket), "--cornplug-save", save)
    with (
        StoreProcess(socket, log=short_path / "store.log"),
        VllmServer(
            model, *flags, log=short_path / "vllm.log", env=ENVIRONMENT, bed=None if bed == "v1" else bed
        ) as server,
    ):
        assert [complete(server, number) for number in range(REQUESTS)] == [200] * REQUESTS
        assert httpx.get(f"{server.url}/health", timeout=10, trust_env=False).status_code == 200
