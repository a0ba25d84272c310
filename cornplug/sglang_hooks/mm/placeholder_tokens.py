"""Which placeholder values of this scheduler's token streams stand for media that we named.

SGLang puts four rotating wide values for a medium's placeholder tokens. Those of a medium
with an identity of ours say what its KV was computed from; any other's come of a 64-bit hash
of features, of a client's own word, or of nothing that knows model and salt. So KV that has
such a value before it is shared with nobody, and this is where the two are told apart.

    embedding key ── with the item: what store and encoder service know its embedding by
         └ and number of rows ── lineage ── SGLang's identity of the item ── placeholder values

So SGLang's own caches, too, tell a medium of more rows from the same of fewer.

Filled in the scheduler process, from the identities that requests bring; read by whoever
makes page keys, from any thread. SGLang's own processors may set an item's identity too (Kimi's do,
of what a client may claim): ours is one that `give` has marked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

from cornplug.identity import DIGEST_BYTES, medium_lineage, placeholder_tokens
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook

FIRST_PLACEHOLDER: Final = 1_000_000
"""SGLang's placeholder values begin here; no vocabulary reaches so far."""
_KEY: Final = "cornplug_key"
_MAX_IDENTITIES: Final = 65_536
"""What is forgotten is no longer shared, and never taken for something else."""

_lock = threading.Lock()
_identities: OrderedDict[bytes, tuple[int, int, int, int]] = OrderedDict()
_values: set[int] = set()


def rows_of(item: Any) -> int:
    """Placeholder tokens of an item, which is rows of its embedding; 0 where nobody has said where it is."""
    return sum(end - start + 1 for start, end in item.offsets or ())


def give(item: Any, key: bytes) -> None:
    """Name an item by its embedding key, which travels with it to the scheduler.

    Its offsets must be known: an item without a place gets no name.
    """
    rows = rows_of(item)
    if not rows:
        withhold(item)
        return
    item.set_identity(medium_lineage(key, rows))
    item.model_specific_data[_KEY] = key


def withhold(item: Any) -> None:
    """An item has no name of ours, whatever anybody else has set."""
    item.identity = None
    item.model_specific_data.pop(_KEY, None)


def key_of(item: Any) -> bytes | None:
    """The embedding key of an item that we named; None for what SGLang or a client has named since,
    and for one that has other rows by now."""
    key = item.model_specific_data.get(_KEY)
    # Fields of a client's own processor output end up there too.
    if not isinstance(key, bytes) or len(key) != DIGEST_BYTES:
        return None
    return key if item.identity == medium_lineage(key, rows_of(item)) else None


def add(identity: bytes) -> None:
    """Remember a medium's lineage, which is SGLang's identity of its item, or that it was seen again."""
    with _lock:
        if identity in _identities:
            _identities.move_to_end(identity)
            return
        values = placeholder_tokens(identity)
        _identities[identity] = values
        _values.update(values)
        if len(_identities) > _MAX_IDENTITIES:
            _values.difference_update(_identities.popitem(last=False)[1])


def is_named(token: int) -> bool:
    """Whether a wide value belongs to a medium with an identity of ours."""
    return token in _values


def is_foreign(token: int) -> bool:
    """Whether a token is a placeholder of a medium that we did not name."""
    return token >= FIRST_PLACEHOLDER and token not in _values


def _multimodal_inputs(result: Any, scheduler: Any, mm_inputs: Any) -> None:
    if activation.is_on() and result is not None:
        for item in result.mm_items:
            if key_of(item) is not None:
                add(item.identity)


HOOKS: tuple[Hook, ...] = (
    # Every rank passes here for every request, whoever made its inputs and however they came.
    Hook("sglang.srt.managers.scheduler.Scheduler._get_multimodal_inputs", "after", _multimodal_inputs),
)
