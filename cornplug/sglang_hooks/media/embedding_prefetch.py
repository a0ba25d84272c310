"""Puts an image's embedding into the store before the request goes to the scheduler.

    in the store ──────────────────────────────> the scheduler loads it from the store
    not in the store: request to the encoder service
        └─ the service stores it ──────────────> the scheduler loads it from the store
        └─ no service, rejected or late ───────> counted as a miss: the engine encodes the image
    the engine's tower is faster than the store > counted as a miss, without a lookup

This runs in the tokenizer process. Only the image's own request waits. Its deadline depends on the time of
the tower, which the scheduler process measures. The source of the embedding is sent with the item, and the
scheduler counts the hit when it uses the embedding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.client.engine_encoder import engine_encoder
from cornplug.encoder_service.formats.messages import EncodeRequest, WireTensor
from cornplug.encoder_service.formats.tensors import view_as_wire
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.embeddings import EncoderRequestPolicy, ExpectedEmbedding
from cornplug.engine_common.load_policy import encode_deadline_s
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.engine_common.runtime import EMBEDDING, EngineRuntime
from cornplug.errors import (
    CornplugError,
    EncoderError,
    EncoderRefused,
    EncoderUnavailable,
    StoreUnavailable,
)
from cornplug.metrics import Tally
from cornplug.sglang_hooks.compat import logger
from cornplug.sglang_hooks.media import placeholder_tokens
from cornplug.store.base import Tier
from cornplug.store.payload import NewPayload, put_payload, recall_and_wait

_SOURCE: Final = "cornplug_source"
has_waited: Final[ContextVar[bool]] = ContextVar("cornplug_waited", default=False)
"""Whether this task's request has already waited for an encoder until the deadline. Such a request does not
wait for another encoder."""


def source_of(item: Any) -> str | None:
    """Return the source of an item's embedding, such as "store". Return None if the store is not expected to
    have the embedding."""
    found: str | None = item.model_specific_data.get(_SOURCE)
    return found


class EmbeddingPrefetcher:
    """Prefetches embeddings in one tokenizer process. Called on the event loop, which is never blocked."""

    def __init__(self, runtime: EngineRuntime, tally: Tally) -> None:
        self._run = runtime
        self._tally = tally
        self._policy = EncoderRequestPolicy()
        self._encoder = engine_encoder(runtime.config, runtime.secret)
        # Use separate threads, because decoding images may occupy all of asyncio's own threads.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="cornplug-ask")

    async def prepare(
        self, items: list[Any], tower_of: Callable[[Any], TowerIdentity | None], salt: str | None
    ) -> None:
        """Put the embeddings of items with a key into the store, and set the source of each item.

        `tower_of` returns the tower of an item. Never raises an exception.
        """
        if weights_guard.has_replaced_weights():
            return
        keys = [placeholder_tokens.key_of(item) for item in items]
        unlike = {key: item for key, item in zip(keys, items, strict=True) if key is not None}
        sources = await asyncio.gather(
            *(self._prefetch_item(key, item, tower_of(item), salt) for key, item in unlike.items())
        )
        found = dict(zip(unlike, sources, strict=True))
        for key, item in zip(keys, items, strict=True):
            if key is not None and found[key]:
                item.model_specific_data[_SOURCE] = found[key]

    def close(self) -> None:
        """Close the connection to the service."""
        self._encoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prefetch_item(
        self, key: bytes, item: Any, tower: TowerIdentity | None, salt: str | None
    ) -> str:
        """Return the source of an item's embedding, or "" after a counted miss."""
        began = time.monotonic()
        always = self._run.config.store.load_when == "always"
        if not always and not engine_state.current().is_fetch_faster():
            self._tally.count("cornplug_misses_total", self._run.app, EMBEDDING, "cheaper")
            return ""
        try:
            if await self._run_in_thread(self._is_stored, key):
                return "store"
            return await self._request_encoding(key, item, tower, salt, began)
        except CornplugError as e:
            self._tally.count("cornplug_misses_total", self._run.app, EMBEDDING, e.reason)
            return ""
        except Exception:  # noqa: BLE001 - any error: the engine encodes the item
            logger.exception("cornplug: looking up an embedding failed, so this server encodes the item")
            self._tally.count("cornplug_misses_total", self._run.app, EMBEDDING, "error")
            return ""
        finally:
            seconds = time.monotonic() - began
            self._tally.observe("cornplug_wait_seconds", seconds, self._run.app, EMBEDDING)

    async def _request_encoding(
        self, key: bytes, item: Any, tower: TowerIdentity | None, salt: str | None, began: float
    ) -> str:
        if has_waited.get():
            raise EncoderUnavailable(
                "the request has already waited for an encoder", reason="encoder_timeout"
            )
        identity = self._policy.identity_for_request(
            tower, identified=True, refusal=self._encoder.refusal, now=began
        )
        expected = ExpectedEmbedding(key, placeholder_tokens.rows_of(item))
        inputs = await self._run_in_thread(
            _tower_inputs, item, tower.image_inputs if tower is not None else ()
        )
        deadline_s = self._deadline_s(expected.rows) - (time.monotonic() - began)
        request = EncodeRequest(
            id=0,
            identity=identity,
            key=key,
            cache_salt=salt,
            inputs=inputs,
            app=self._run.app,
            deadline_s=max(0.0, deadline_s),
        )
        try:
            # The client copies the inputs to shared memory, which takes milliseconds for large images.
            sent = await self._run_in_thread(self._encoder.submit, request)
            reply = await asyncio.wrap_future(sent)
            source = self._policy.check_reply(reply, expected)
        except EncoderError as e:
            self._policy.record_failure(e, time.monotonic())
            raise
        if reply.tensor is not None:
            await self._run_in_thread(self._save_embedding, reply.key, reply.tensor)
        return source

    def _deadline_s(self, rows: int) -> float:
        config, row_s = self._run.config, engine_state.current().encode_row_s()
        encode_s = None if row_s is None else rows * row_s
        return encode_deadline_s(config.store.load_when, encode_s, ceiling_s=config.encoder.deadline_s)

    async def _run_in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _is_stored(self, key: bytes) -> bool:
        deadline_s = self._run.deadline_s
        tiers = recall_and_wait(self._run.store, [key], within_s=deadline_s, deadline_s=deadline_s)
        return tiers[0] == Tier.MEMORY

    def _save_embedding(self, key: bytes, tensor: WireTensor) -> None:
        """Save an embedding that the service has sent but could not store.

        This happens if the service runs on another host, or if its store has failed.
        """
        outcome = put_payload(
            self._run.store,
            NewPayload(tensor.data, PayloadKind.EMBEDDING, key=key, dtype=tensor.dtype, shape=tensor.shape),
            app=self._run.app,
            deadline_s=self._run.background_timeout_s,
        )
        if outcome not in ("stored", "present"):
            raise StoreUnavailable(
                f"cannot reserve memory for an embedding: {outcome}", reason=f"store_{outcome}"
            )


def _tower_inputs(item: Any, names: Sequence[str]) -> dict[str, WireTensor]:
    """Return one item's tensors by name, in the form that its tower expects.

    Raises EncoderRefused("no_inputs") if the item does not contain these tensors.
    """
    known = {**item.model_specific_data, "pixel_values": item.feature}
    values = {name: known[name] for name in names if name in known}
    found = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            # Examples are a handle to another process's GPU memory, or LLaVA's (width, height).
            raise EncoderRefused(f"{name} is a {type(value).__name__}", reason="no_inputs")
        found[name] = view_as_wire(value)
    return found
