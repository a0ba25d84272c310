"""Cache of results: embeddings and features (a tower's output before the projector) in the host's store, if
there is one, and a few features in this process.

If the store fails, an embedding is computed again, and no request fails. `ResultCache` counts the failure and
raises no exception.

`StoreQuota` limits the share of the store that one account fills. At the limit, the account's oldest entries
are deleted. The store itself evicts the least recently used entries of all accounts. Without a quota, new
media of one caller could therefore evict the entries of all other callers. An account is a tenant, or a
service class for callers without a tenant. Engines on the unix socket have no account and no limit.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes, to_wire
from cornplug.encoder_service.towers.base import tensor_from_bytes
from cornplug.errors import CodecError, StoreError
from cornplug.store.base import Store, Tier
from cornplug.store.messages import MAX_COST_S
from cornplug.store.payload import NewPayload, get_payload, put_payload, recall_and_wait

_CAPACITY_TTL_S: Final = 30.0
_MAX_ENTRIES: Final = 1 << 17
"""Maximum number of entries per account. Above it, the account's oldest entries are deleted."""
MAX_FEATURE_BYTES: Final = 256 << 20
_NO_SPACE: Final = ("growing", "full", "too_large", "pending")


class StoreQuota:
    """Quotas of all accounts. Thread-safe. Methods raise StoreError if the store fails."""

    def __init__(
        self, store: Store, fraction: float, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the quotas. Each account is limited to `fraction` of the store's capacity."""
        self._store = store
        self._fraction = fraction
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, OrderedDict[bytes, int]] = {}
        self._used_bytes: dict[str, int] = {}
        self._capacity = 0.0, 0
        """Cached capacity of the store, as (time at which it expires, bytes)."""

    def evict_for(self, account: str, size_bytes: int) -> bool:
        """Delete the account's oldest entries until a new entry of `size_bytes` fits. Return False if the
        entry is larger than the account's limit."""
        ceiling = self._limit_bytes()
        if size_bytes > ceiling:
            return False
        drop: list[bytes] = []
        with self._lock:
            entries = self._entries.get(account, OrderedDict())
            while entries and (
                self._used_bytes[account] + size_bytes > ceiling or len(entries) >= _MAX_ENTRIES
            ):
                key, size = entries.popitem(last=False)
                self._used_bytes[account] -= size
                drop.append(key)
        if drop:
            self._store.delete(drop, deadline_s=self._deadline_s)
        return True

    def record_published(self, account: str, key: bytes, size_bytes: int) -> None:
        """Record that the account has added an entry to the store."""
        with self._lock:
            entries = self._entries.setdefault(account, OrderedDict())
            used = self._used_bytes.get(account, 0) - entries.pop(key, 0) + size_bytes
            entries[key] = size_bytes
            self._used_bytes[account] = used

    def _limit_bytes(self) -> int:
        until_s, capacity = self._capacity
        now = self._clock()
        if now >= until_s:
            capacity = self._store.stat(deadline_s=self._deadline_s).capacity_bytes
            self._capacity = now + _CAPACITY_TTL_S, capacity
        return int(capacity * self._fraction)


@dataclass(frozen=True, slots=True)
class StoredEmbedding:
    """Embedding that is in the store. `tensor` is None unless the reply must contain it."""

    tensor: WireTensor | None


class ResultCache:
    """Cache of results. Thread-safe. Without a store, embeddings are not cached, and features are cached only
    in this process."""

    def __init__(
        self,
        store: Store | None,
        *,
        deadline_s: float,
        max_feature_bytes: int = MAX_FEATURE_BYTES,
        account_fraction: float = 1.0,
    ) -> None:
        """Create a cache.

        Args:
            store: The host's store, or None.
            deadline_s: Deadline in seconds of each call to the store.
            max_feature_bytes: Maximum total bytes of features cached in this process.
            account_fraction: Maximum fraction of the store that the entries of one account may fill.
        """
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._store = store
        self._deadline_s = deadline_s
        self._max_feature_bytes = max_feature_bytes
        self._quota = None if store is None else StoreQuota(store, account_fraction, deadline_s=deadline_s)
        self._lock = threading.Lock()
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._used_bytes = 0

    @property
    def has_store(self) -> bool:
        """Whether there is a store. If not, features are cached only in this process."""
        return self._store is not None

    def has_entry(self, key: bytes) -> bool:
        """Return whether the store has this entry in memory. If the entry is on the store's disk, it is first
        read into memory."""
        if self._store is None:
            return False
        try:
            tiers = recall_and_wait(
                self._store, [key], within_s=self._deadline_s, deadline_s=self._deadline_s
            )
            return tiers[0] == Tier.MEMORY
        except StoreError as e:
            self.on_failure(e.reason)
            return False

    def look_up_embedding(self, key: bytes, dtype: torch.dtype, *, inline: bool) -> StoredEmbedding | None:
        """Look up an embedding in the store. The result contains its tensor if `inline` is set.

        Returns None if the store does not have the embedding.
        """
        if not inline:
            return StoredEmbedding(None) if self.has_entry(key) else None
        tensor = self.fetch_tensor(PayloadKind.EMBEDDING, key, dtype)
        return None if tensor is None else StoredEmbedding(to_wire(tensor))

    def fetch_tensor(self, kind: PayloadKind, key: bytes, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a verified tensor of shape (rows, width) from the store. Return None if the store does not
        have it."""
        if self._store is None:
            return None
        try:
            found = get_payload(self._store, key, deadline_s=self._deadline_s, recall_s=self._deadline_s)
            if found is None:
                return None
            header, data = found
            if header.kind != kind or header.dtype != dtype_name(dtype) or len(header.shape) != 2:
                raise CodecError(
                    f"entry is {header.kind.name} {header.dtype} {header.shape}", reason="wrong_kind"
                )
            return tensor_from_bytes(data, dtype, header.shape)
        except (StoreError, CodecError) as e:
            self.on_failure(e.reason)
        except ValueError:
            self.on_failure("wrong_size")
        return None

    def publish(
        self,
        kind: PayloadKind,
        key: bytes,
        tensor: torch.Tensor,
        app: str,
        *,
        account: str | None = None,
        cost_s: float = 0.0,
    ) -> bool:
        """Save a CPU tensor in the store for the app. It counts towards the account's quota (`StoreQuota`).

        `cost_s` is the time in seconds that computing the tensor took, or 0 if unknown. Returns whether the
        store has the tensor now.
        """
        if self._store is None or self._quota is None:
            return False
        try:
            if account is not None and not self._quota.evict_for(account, tensor.nbytes):
                self.on_failure("over_quota")
                return False
            outcome = put_payload(
                self._store,
                NewPayload(
                    raw_bytes(tensor),
                    kind,
                    key=key,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                ),
                app=app,
                deadline_s=self._deadline_s,
                cost_s=min(cost_s, MAX_COST_S),
            )
        except (StoreError, CodecError) as e:
            self.on_failure(e.reason)
            return False
        if outcome == "stored" and account is not None:
            self._quota.record_published(account, key, tensor.nbytes)
        if outcome in _NO_SPACE:
            self.on_failure(outcome)
        return outcome in ("stored", "present")

    def cache_features(self, key: bytes, features: torch.Tensor) -> None:
        """Cache features in this process. Drop the least recently used features if there are too many."""
        size = features.nbytes
        if size > self._max_feature_bytes:
            return
        with self._lock:
            old = self._features.pop(key, None)
            self._used_bytes += size - (old.nbytes if old is not None else 0)
            self._features[key] = features
            while self._used_bytes > self._max_feature_bytes:
                self._used_bytes -= self._features.popitem(last=False)[1].nbytes

    def look_up_features(self, key: bytes, dtype: torch.dtype) -> torch.Tensor | None:
        """Return features from this process or from the store, or None if neither has them."""
        with self._lock:
            kept = self._features.get(key)
            if kept is not None:
                self._features.move_to_end(key)
                return kept
        found = self.fetch_tensor(PayloadKind.FEATURE, key, dtype)
        if found is not None:
            self.cache_features(key, found)
        return found
