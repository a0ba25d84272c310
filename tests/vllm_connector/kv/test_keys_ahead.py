"""Keys of long prompts are made in the thread that receives requests, and are the same keys."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import hot_path
import pytest
from collaborators import kept
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from cornplug.errors import CheckpointError
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector import plugin
from cornplug.vllm_connector.kv import page_keys
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

LONG = 8192


@pytest.fixture
def half() -> hot_path.Half:
    return hot_path.Half(MemoryStore(capacity_bytes=1 << 30).connect())


def arriving(tokens: int, **fields: Any) -> Any:
    """A request as the front end sends it."""
    return SimpleNamespace(**{**_FIELDS, "prompt_token_ids": hot_path.prompt(tokens, 1), **fields})


_FIELDS: dict[str, Any] = {
    "request_id": "r", "client_index": 0, "prompt_embeds": None, "prompt_is_token_ids": None,
    "mm_features": None, "sampling_params": SamplingParams(max_tokens=4), "pooling_params": None,
    "arrival_time": 0.0, "lora_request": None, "cache_salt": None, "priority": 0, "trace_headers": None,
    "resumable": False, "session_id": None, "kv_hints": None, "reasoning_ended": None,
    "reasoning_parser_kwargs": None, "abort_immediately": False,
}  # fmt: skip


def test_keys_ahead_of_long_prompt_leave_none_to_its_lookup(
    half: hot_path.Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    request = Request.from_engine_core_request(arriving(LONG), None)
    ahead = page_keys.early_keys(request)
    assert ahead is not None
    whole = page_keys.PageKeys(hot_path.SECRET, ahead._root, hot_path.PAGE.page_tokens, ())
    assert ahead.keys_until(request.all_token_ids, LONG) == whole.keys_until(request.all_token_ids, LONG)
    monkeypatch.setattr(page_keys, "hash_chain", None)
    half.lookup(request)
    tracked = kept(half.scheduler, TrackedRequest)[0]
    assert tracked.keys is ahead


def test_keys_ahead_of_short_prompt_are_not_made(half: hot_path.Half) -> None:
    request = half.request(hot_path.prompt(1024, 1))
    page_keys.compute_early_keys(request)
    assert page_keys.early_keys(request) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_request": SimpleNamespace(lora_path="x", lora_int_id=1, load_inplace=False)},
        {"resumable": True},
    ],
)
def test_keys_ahead_of_request_that_needs_a_look_are_not_made(
    half: hot_path.Half, fields: dict[str, Any]
) -> None:
    request = half.request(hot_path.prompt(LONG, 1))
    for name, value in fields.items():
        setattr(request, name, value)
    page_keys.compute_early_keys(request)
    assert page_keys.early_keys(request) is None


def test_keys_ahead_that_cannot_be_made_are_left_to_the_lookup(
    half: hot_path.Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(requests: TrackedRequests, request: Request) -> None:
        raise CheckpointError("its identity is gone", reason="identity_error")

    monkeypatch.setattr(TrackedRequests, "keys_of", fails)
    request = half.request(hot_path.prompt(LONG, 1))
    page_keys.compute_early_keys(request)
    assert page_keys.early_keys(request) is None


def test_keys_ahead_without_an_engine_are_not_made(half: hot_path.Half) -> None:
    request = half.request(hot_path.prompt(LONG, 1))
    del half.scheduler
    gc.collect()
    page_keys.compute_early_keys(request)
    assert page_keys.early_keys(request) is None
