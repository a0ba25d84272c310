"""vLLM's room makes the frozen roots of page keys, with the code that serves requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import page_root_vectors as vectors
import pytest
from collaborators import recorded

from cornplug.engine_common import lora_digests
from cornplug.metrics import Tally
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv import tracked_requests
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequests

from ..rig import Request, runtime


@pytest.mark.parametrize("name", vectors.CASES)
def test_kv_request_roots_equal_golden_vectors(name: str, tmp_path: Path, store: MemoryStore) -> None:
    case = vectors.CASES[name]
    path = vectors.adapter(tmp_path / "lora")
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    with (
        mock.patch.object(tracked_requests, "kv_identity", return_value=vectors.IDENTITY),
        recorded(tracked_requests, "BackgroundLoraDigests") as adapters,
    ):
        made = TrackedRequests(config, runtime(store.connect(), page_tokens=64), vectors.PAGE, Tally())
    lora = SimpleNamespace(lora_path=path, lora_int_id=1, load_inplace=False) if case.lora else None
    request: Any = Request("r", [1], cache_salt=case.salt, lora_request=lora)
    if lora is not None:
        adapters[0].read_digest(path, 1)  # another thread would
    with mock.patch.object(lora_digests, "_CHECK_TIMEOUT_S", 30):  # a busy machine
        assert made.root_of(request, vectors.PAGE).hex() == vectors.known()[name]
