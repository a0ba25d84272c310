"""Keys for embeddings that an encoder sends through SGLang's encoder disaggregation (EPD).

    cornplug encoder ── header + rows ──> tokenizer or scheduler ──> items
                          └ signed statement: model, media digests      └ `assign_key` (embedding key)

A statement is valid if it is signed with the store's secret for exactly these rows. The key is never read
from the message. It is computed from this engine's own model identity, the media digests and the request's
salt. A statement with another model, dtype or preprocessing than this engine's checkpoint is rejected. The
request then fails, or this server encodes the image itself. Embeddings without a statement (from a stock
encoder) are used as in stock SGLang, and get no key.

Hashing the rows of a large image takes tens of milliseconds, so it runs in a thread. In the meantime, the
request waits as if a part had not arrived, and the scheduler's step continues.

With `zmq_to_tokenizer`, keys are set when the request goes to the scheduler, because other hooks clear or set
keys before that. With `zmq_to_scheduler`, each rank sets the keys of its items, and all ranks must set the
same keys. Therefore each rank computes the model's identity before the server is ready, and the ranks compare
the identities.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch

from cornplug.encoder_service.formats.engine_seal import SignedClaim, prove_salt
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.engine_common import weights_guard
from cornplug.engine_common.runtime import EMBEDDING
from cornplug.errors import CheckpointError, CodecError, EncoderRefused
from cornplug.identity import embedding_key
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger, salt_of_request
from cornplug.sglang_hooks.media import placeholder_tokens
from cornplug.sglang_hooks.model.model_config import engine_model

_KEY: Final = "_cornplug_epd_key"
_PARTS: Final = "_cornplug_epd_parts"

_INLINE_HASH_BYTES: Final = 1 << 20
"""Maximum size in bytes of rows that are hashed without a thread. Hashing them takes a millisecond, which is
as long as switching to a thread."""

MediaDigests = Sequence[bytes] | None
"""Digests of the images in one part of a request, or None if the part has no valid signature."""

_RECEIVER: Final = "sglang.srt.disaggregation.encoder.receiver"


@dataclass(slots=True)
class _EpdState:
    """State for encoder disaggregation in this process."""

    identity: bytes | None = None
    """Model identity that signed statements must contain, or None if no statement is accepted."""


_state = _EpdState()
_received_parts: ContextVar[dict[int, Future[MediaDigests]] | None] = ContextVar("cornplug_epd", default=None)
"""Digests of the images in each verified part of the tokenizer's current request, by part number."""


def verify_claims(data: Any, identity: bytes | None, secret: bytes) -> MediaDigests:
    """Verify the signed statement of a received EmbeddingData, and return the digests of its media.

    Raises CodecError ("no_statement", "statement" or "not_identified") if there is no valid statement. Raises
    EncoderRefused("other_model") if another model than `identity` computed the embedding.
    """
    statement = SignedClaim.from_fields(vars(data))
    if statement is None or data.embedding is None:
        raise CodecError("the encoder sent embeddings without a signature", reason="no_statement")
    if identity is None:
        raise CodecError("this engine's model is not identified yet", reason="not_identified")
    rows: torch.Tensor = data.embedding
    grid = data.get_grid()
    if rows.ndim != 2 or not _is_grid(grid):
        raise CodecError("the shape of the embedding or its grid is not supported", reason="statement")
    shape = (rows.shape[0], rows.shape[1])
    payload = raw_bytes(rows)
    if not statement.is_valid(secret, dtype=dtype_name(rows.dtype), shape=shape, grid=grid, payload=payload):
        raise CodecError(
            "invalid signature: the embedding was not signed with this store's secret", reason="statement"
        )
    if statement.identity != identity:
        raise EncoderRefused(
            "the encoder's model, dtype or preprocessing differs from this server's: "
            f"{statement.identity.hex()[:12]}, expected {identity.hex()[:12]}. Start the encoder with this "
            "server's --model-path and --dtype, or name the model in --encoder-urls",
            reason="other_model",
        )
    return statement.media


def keys_of(
    image_items: Sequence[Any], parts: Mapping[int, MediaDigests], salt: str | None
) -> list[bytes] | None:
    """Return the embedding keys of a request's image items, in order.

    Returns None if the key of any item cannot be computed.
    """
    media: list[bytes] = []
    for index in sorted(parts):
        said = parts[index]
        if said is None:
            return None
        media += said
    # `identity` is the identity of the tower with which the engine started.
    if _state.identity is None or weights_guard.has_replaced_weights() or weights_guard.epoch():
        return None
    if len(media) != len(image_items):
        return None
    secret = activation.runtime().secret
    return [embedding_key(secret, _state.identity, digest, salt) for digest in media]


def _is_grid(grid: Any) -> bool:
    return isinstance(grid, list) and all(
        isinstance(row, list) and all(isinstance(n, int) and 0 <= n < 1 << 63 for n in row) for row in grid
    )


def _image_items(mm_inputs: Any) -> list[Any]:
    return [item for item in mm_inputs.mm_items if item.is_image()]


def _count_hits(image_items: Sequence[Any]) -> None:
    tally, app = activation.tally(), activation.runtime().app
    tally.count("cornplug_hits_total", app, EMBEDDING, "service_epd", amount=len(image_items))
    tally.count("cornplug_saved_tower_passes_total", app, amount=len(image_items))
    size = sum(item.precomputed_embeddings.nbytes for item in image_items)
    tally.count("cornplug_bytes_total", app, EMBEDDING, "load", amount=size)


# -- both processes --------------------------------------------------------------------------


def _on_receiver_created(_result: None, receiver: Any, *_args: Any, **_kwargs: Any) -> None:
    """Determine the model's identity after SGLang has created a receiver.

    This reads the checkpoint's tower only once per machine, because its digests are cached on disk.
    """
    if not activation.is_on():
        return
    identity = None
    try:
        identity = engine_model().tower_identity().served_identity
    except CheckpointError as e:
        logger.warning("cornplug: this server does not share embeddings from encoders: %s", e)
    group = receiver.tp_group
    if group is not None and receiver.tp_size > 1 and len(set(group.all_gather_object(identity))) > 1:
        logger.warning(
            "cornplug: this server does not share embeddings from encoders, because its ranks "
            "identify the model differently"
        )
        identity = None
    _state.identity = identity


def _wrap_part_received(original: Callable[..., Any], current: Any, recv_obj: Any, model_type: Any) -> Any:
    """Wrap the function that receives the rows of a part, to verify the part's statement."""
    if not activation.is_on():
        return original(current, recv_obj, model_type)
    rows = recv_obj.embedding
    check: Future[MediaDigests]
    if rows is not None and rows.nbytes > _INLINE_HASH_BYTES:
        check = _threads().submit(_verify_part, recv_obj)
    else:
        check = Future()
        try:
            check.set_result(_verify_part(recv_obj))
        except EncoderRefused as e:
            check.set_exception(e)
    whole = original(current, recv_obj, model_type)
    # Only images get keys. SGLang sends each modality in separate parts.
    if recv_obj.modality.name == "IMAGE":
        vars(whole).setdefault(_PARTS, {})[recv_obj.part_idx] = check
        parts = _received_parts.get()
        if parts is not None:
            parts[recv_obj.part_idx] = check
    return whole


def _verify_part(data: Any) -> MediaDigests:
    """Verify the encoder's statement about a part of a request, and return the media digests in it.

    Returns None and counts a miss if the statement is missing or invalid. Raises EncoderRefused if another
    model computed the embedding.
    """
    try:
        return verify_claims(data, _state.identity, activation.runtime().secret)
    except CodecError as e:
        activation.tally().count("cornplug_misses_total", activation.runtime().app, EMBEDDING, e.reason)
        return None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="cornplug-epd")


# -- tokenizer -------------------------------------------------------------------------------


def _send_salt(entries: list[dict[str, Any]], _receiver: Any, request_obj: Any) -> None:
    """Add the request's salt to the messages for the encoder service, which uses it in the embedding's
    key."""
    salt = salt_of_request(request_obj)
    if activation.is_on() and salt is not None and _state.identity is not None:
        for entry in entries:
            if entry["modality"].name == "IMAGE":
                entry["cornplug_salt"] = salt
                entry["cornplug_salt_proof"] = prove_salt(activation.runtime().secret, salt)


async def receive_with_keys(
    original: Callable[..., Any], receiver: Any, request_obj: Any, **kwargs: Any
) -> Any:
    """Wrap SGLang's `recv_mm_data`, to return a request's items with embedding keys (zmq_to_tokenizer).

    This is not a hook itself, because SGLang supports only one "around" hook per function. The hook in
    `epd_fallback` calls it.
    """
    parts: dict[int, Future[MediaDigests]] = {}
    token = _received_parts.set(parts)
    try:
        mm_inputs = await original(receiver, request_obj=request_obj, **kwargs)
    finally:
        _received_parts.reset(token)
    if mm_inputs is not None:
        try:
            media = {index: await asyncio.wrap_future(check) for index, check in parts.items()}
        except EncoderRefused as e:
            logger.error("cornplug: rejected the embeddings of a request: %s", e)
            return None  # SGLang also returns None if it cannot read a part.
        image_items = _image_items(mm_inputs)
        keys = keys_of(image_items, media, salt_of_request(request_obj))
        for item, key in zip(image_items, keys or (), strict=bool(keys)):
            item.__dict__[_KEY] = key
        _count_hits(image_items)
    return mm_inputs


def _before_send(_manager: Any, tokenized_obj: Any) -> None:
    """Set a request's keys before the request goes to the scheduler, after all other hooks have changed its
    items."""
    mm_inputs = getattr(tokenized_obj, "mm_inputs", None)
    if activation.is_on() and mm_inputs is not None:
        for item in mm_inputs.mm_items:
            key = item.__dict__.get(_KEY)
            if key is not None:
                placeholder_tokens.assign_key(item, key)


# -- scheduler -------------------------------------------------------------------------------


def _wrap_prepare(original: Callable[..., bool], waiting: Any) -> bool:
    """Wrap the function that assembles a request's parts. Return False until all parts are verified.

    SGLang calls this again in each step. An exception ends only this request.
    """
    checks = _checks(waiting)
    if not all(check.done() for check in checks.values()):
        return False
    for check in checks.values():
        check.result()
    return original(waiting)


def _checks(waiting: Any) -> dict[int, Future[MediaDigests]]:
    found: dict[int, Future[MediaDigests]] = vars(waiting.recv_embedding_data).get(_PARTS, {})
    return found if activation.is_on() else {}


def _on_assembled(_result: None, waiting: Any, recv_embedding: Any) -> None:
    """Assign keys to a request's items after this rank has created them (zmq_to_scheduler)."""
    if not activation.is_on():
        return
    mm_inputs = waiting.recv_req.mm_inputs
    image_items = _image_items(mm_inputs)
    media = {index: check.result() for index, check in _checks(waiting).items()}
    keys = keys_of(image_items, media, salt_of_request(waiting.recv_req))
    for item, key in zip(image_items, keys or (), strict=bool(keys)):
        placeholder_tokens.assign_key(item, key)
    _count_hits(image_items)


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_RECEIVER}.MMReceiverBase.__init__", "after", _on_receiver_created),
    Hook(f"{_RECEIVER}.MMReceiverBase._extract_url_data", "after", _send_salt),
    Hook(f"{_RECEIVER}._aggregate_embedding_part", "around", _wrap_part_received),
    Hook(f"{_RECEIVER}.WaitingZmqRequest._prepare_embedding_buffer", "around", _wrap_prepare),
    Hook(f"{_RECEIVER}.WaitingMMRequestBase._finish_assemble", "after", _on_assembled),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request", "before", _before_send),
)
