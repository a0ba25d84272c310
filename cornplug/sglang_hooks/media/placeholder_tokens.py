"""Distinguishes placeholder tokens of media with an embedding key from all other placeholder tokens.

SGLang represents a media item by four token values beyond the vocabulary, in rotation. For an item with an
embedding key, these values identify its content, model and salt. All other values come from a 64-bit hash of
features or from a client, and do not depend on model and salt. Therefore the KV after them is not shared.

    embedding key ── sent with the item, and used in the store and the encoder service
         └ with the number of rows ── lineage ── SGLang's identity of the item ── placeholder values

SGLang's own caches therefore also distinguish an item with more rows from the same item with fewer rows.

The scheduler process adds the identities in requests to a set. The code for page keys reads this set on any
thread. SGLang's own processors may also set an item's identity. For example, Kimi's processor sets it from a
value that a client may choose. Only an identity that `assign_key` has set counts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

from cornplug.engine_common import weights_guard
from cornplug.identity import DIGEST_BYTES, media_item_lineage, placeholder_tokens
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook

FIRST_PLACEHOLDER: Final = 1_000_000
"""SGLang's first placeholder value, which is larger than any token id in a vocabulary."""
_KEY: Final = "cornplug_key"
_EPOCH: Final = "cornplug_epoch"
_EMBEDDING_ONLY: Final = "cornplug_rows_alone"
_MAX_IDENTITIES: Final = 65_536
"""Maximum number of remembered media items. The KV after a dropped item is no longer shared, but it is never
confused with other KV."""

_lock = threading.Lock()
_identities: OrderedDict[bytes, tuple[int, int, int, int]] = OrderedDict()
_keyed_tokens: set[int] = set()


def rows_of(item: Any) -> int:
    """Return the number of an item's placeholder tokens, which equals its number of embedding rows.

    Returns 0 for an item without offsets.
    """
    return sum(end - start + 1 for start, end in item.offsets or ())


def assign_key(item: Any, key: bytes, *, epoch: int = 0, embedding_only: bool = False) -> None:
    """Assign an embedding key to an item. The key is sent to the scheduler with the item.

    An item without offsets gets no key.

    Args:
        key: embedding key.
        epoch: epoch of the tower's weights for which the key was computed.
        embedding_only: whether only the embedding is shared, and not the KV after the item.
    """
    rows = rows_of(item)
    if not rows:
        clear_key(item)
        return
    item.set_identity(media_item_lineage(key, rows))
    item.model_specific_data[_KEY] = key
    item.model_specific_data[_EPOCH] = epoch
    if embedding_only:
        item.model_specific_data[_EMBEDDING_ONLY] = True
    else:
        item.model_specific_data.pop(_EMBEDDING_ONLY, None)


def is_current(item: Any) -> bool:
    """Return whether an item's key was computed for the engine's current weights.

    The weights may have been replaced since the key was assigned.
    """
    return bool(item.model_specific_data.get(_EPOCH, 0) == weights_guard.epoch())


def forget_all() -> None:
    """Forget all media items, because the keys in current requests and sessions were computed for previous
    weights."""
    with _lock:
        _identities.clear()
        _keyed_tokens.clear()


def clear_key(item: Any) -> None:
    """Clear an item's embedding key, and any identity that SGLang or a client has set."""
    item.identity = None
    item.model_specific_data.pop(_KEY, None)


def key_of(item: Any) -> bytes | None:
    """Return the embedding key that `assign_key` assigned to an item, or None.

    The result is also None if SGLang or a client has set another identity later, or if the item's number of
    rows has changed.
    """
    key = item.model_specific_data.get(_KEY)
    # A client's own processor output may also contain this field.
    if not isinstance(key, bytes) or len(key) != DIGEST_BYTES:
        return None
    return key if item.identity == media_item_lineage(key, rows_of(item)) else None


def remember_identity(identity: bytes) -> None:
    """Remember a media item with an embedding key, as the newest entry.

    `identity` is the item's lineage (a digest of key and number of rows), which is also SGLang's identity of
    it.
    """
    with _lock:
        if identity in _identities:
            _identities.move_to_end(identity)
            return
        values = placeholder_tokens(identity)
        _identities[identity] = values
        _keyed_tokens.update(values)
        if len(_identities) > _MAX_IDENTITIES:
            _keyed_tokens.difference_update(_identities.popitem(last=False)[1])


def is_keyed(token: int) -> bool:
    """Return whether a token is a placeholder of a media item with an embedding key."""
    return token in _keyed_tokens


def is_unkeyed(token: int) -> bool:
    """Return whether a token is a placeholder of a media item without an embedding key."""
    return token >= FIRST_PLACEHOLDER and token not in _keyed_tokens


def _on_multimodal_inputs(result: Any, scheduler: Any, mm_inputs: Any) -> None:
    if activation.is_on() and result is not None:
        for item in result.mm_items:
            if (
                key_of(item) is not None
                and is_current(item)
                and _EMBEDDING_ONLY not in item.model_specific_data
            ):
                remember_identity(item.identity)


HOOKS: tuple[Hook, ...] = (
    # Every rank calls this for every request, whether the inputs come from the tokenizer or from an encoder.
    Hook("sglang.srt.managers.scheduler.Scheduler._get_multimodal_inputs", "after", _on_multimodal_inputs),
)
