"""Order in which entries of a full store are evicted: by namespace, then by age.

The policy computes with bytes, uses and costs. It has no offsets, no clock and no I/O. The index uses it
through `placement.py`, and `cornplug replay` uses it on traces.

1. At its ceiling, a namespace evicts only its own entries. If that does not free enough memory, the
   reservation is refused.
2. Namespaces above their share lose entries in order of priority, the lowest priority first. Among equal
   priorities, the first namespace is the one with the most bytes above its share, divided by the seconds of
   recomputation that each of its bytes saves. Each namespace therefore gets memory beyond the shares, and
   unused shares, in proportion to the value of its entries.
3. A namespace does not lose its share to other namespaces. If no other namespace can lose entries, the
   writer's own namespace does.
4. Inside a namespace, the least recently used entry is evicted first. Uses of one call are recorded tail
   first, so that a prefix loses its tail before its head.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, Protocol, TypeVar

from cornplug.settings import DEFAULT_NAMESPACE, NamespaceConfig
from cornplug.store.daemon.reservations import ExpiryBuckets

_CEILING_RESET_FRACTION: Final = 0.75
"""Fraction of its ceiling below which a namespace that reached its ceiling may evict entries of other
namespaces again. Victims are adjacent and can be larger than the new entry. Without this margin, other
namespaces would lose the difference each time."""
DEFAULT_COST_NS: Final = 0.57
"""Nanoseconds of recomputation that a byte saves if its writer reports no cost. This is the cost of a KV
page, 0.6 ms per MiB."""


class PolicyEntry(Protocol):
    """Fields of a stored entry that the policy uses."""

    @property
    def key(self) -> bytes: ...
    @property
    def app(self) -> str: ...
    @property
    def aligned_bytes(self) -> int: ...
    @property
    def cost_s(self) -> float:
        """Seconds to recompute the entry, or 0 if its writer reported none."""

    last_use: int
    """Sequence number of the entry's last use, among the uses of all entries."""


E = TypeVar("E", bound=PolicyEntry)


class _Namespace(Generic[E]):
    """Bytes and entries of one namespace."""

    def __init__(self, rules: NamespaceConfig, capacity_bytes: int) -> None:
        self.rules, self.capacity_bytes = rules, capacity_bytes
        self.share_bytes = int(rules.share * capacity_bytes)
        self.ceiling_bytes = int(rules.ceiling * capacity_bytes) if rules.ceiling < 1 else math.inf
        self.used_bytes = 0
        """Bytes of entries and reservations."""
        self.is_at_ceiling = False
        """Whether the namespace has reached its ceiling and its bytes have not fallen below
        `_CEILING_RESET_FRACTION` of the ceiling since."""
        self.cost_ns = self.costed_bytes = 0
        """Total cost in nanoseconds and total bytes of entries whose writer reported a cost. These are
        integers, so that subtraction is exact."""
        self.oldest_first: OrderedDict[bytes, E] = OrderedDict()
        """Entries that may be evicted, least recently used first."""

    def weighted_excess(self, size_bytes: int) -> float:
        """Return the bytes by which the namespace would exceed its share with `size_bytes` more bytes,
        divided by the nanoseconds to recompute one of its bytes. The result is at most 0 if the share is not
        exceeded."""
        cost_ns = self.cost_ns / self.costed_bytes if self.costed_bytes else DEFAULT_COST_NS
        return (self.used_bytes + size_bytes - self.share_bytes) / max(cost_ns, 1e-9)


class EvictionPolicy(Generic[E]):
    """Eviction rules of one store, and their state.

    Args:
        namespaces: Rules by name. Apps without a namespace are in "default". None: a single namespace, so
            that the policy is plain LRU.
    """

    def __init__(self, capacity_bytes: int, namespaces: Mapping[str, NamespaceConfig] | None = None) -> None:
        rules = {DEFAULT_NAMESPACE: NamespaceConfig()} | dict(namespaces or {})
        self._namespaces: dict[str, _Namespace[E]] = {
            name: _Namespace(one, capacity_bytes) for name, one in rules.items()
        }
        self._name_of_app = {app: name for name, one in rules.items() for app in one.apps or (name,)}
        self._expiries: ExpiryBuckets[E] = ExpiryBuckets()
        self._expiry_of: dict[E, int] = {}
        self._uses = 0

    def namespace_of(self, app: str) -> str:
        """Return the namespace of an app."""
        return self._name_of_app.get(app, DEFAULT_NAMESPACE)

    @property
    def has_guarantees(self) -> bool:
        """Whether a namespace is pinned or has a share."""
        return any(one.rules.pinned or one.rules.share for one in self._namespaces.values())

    def rules_of(self, app: str) -> NamespaceConfig:
        """Return the rules of an app's namespace."""
        return self._space_of(app).rules

    def ttl_s(self, app: str) -> float | None:
        """Return the time to live of an app's entries, or None if it is unlimited."""
        return self._space_of(app).rules.ttl_s

    @property
    def names(self) -> list[str]:
        """Names of all namespaces."""
        return list(self._namespaces)

    def used_bytes(self, name: str) -> int:
        """Return the bytes of a namespace's entries and reservations."""
        return self._namespaces[name].used_bytes

    def bounds_bytes(self, name: str) -> tuple[int, int]:
        """Return a namespace's share and ceiling in bytes."""
        space = self._namespaces[name]
        return space.share_bytes, int(min(space.ceiling_bytes, space.capacity_bytes))

    def charge(self, app: str, size_bytes: int) -> None:
        """Add `size_bytes` bytes to the app's namespace, or subtract them if negative."""
        space = self._space_of(app)
        space.used_bytes += size_bytes
        if space.used_bytes < _CEILING_RESET_FRACTION * space.ceiling_bytes:
            space.is_at_ceiling = False

    def add(self, entry: E, *, now_s: float) -> None:
        """Add an entry as the most recently used of its namespace. The caller has charged its bytes."""
        space = self._space_of(entry.app)
        if entry.cost_s:
            space.cost_ns += _cost_ns(entry)
            space.costed_bytes += entry.aligned_bytes
        if space.rules.ttl_s is not None:
            self._expiry_of[entry] = self._expiries.add(entry, now_s + space.rules.ttl_s)
        self.unpin(entry)

    def remove(self, entry: E) -> None:
        """Remove an entry. Its bytes stay charged, because a reader may still use them."""
        space = self._space_of(entry.app)
        if entry.cost_s:
            space.cost_ns -= _cost_ns(entry)
            space.costed_bytes -= entry.aligned_bytes
        expires = self._expiry_of.pop(entry, None)
        if expires is not None:
            self._expiries.discard(entry, expires)
        self.pin(entry)

    def pin(self, entry: E) -> None:
        """Exclude an entry from eviction because it has a lease."""
        self._space_of(entry.app).oldest_first.pop(entry.key, None)

    def unpin(self, entry: E) -> None:
        """Allow an entry's eviction, as the most recently used of its namespace. For entries of one prefix,
        call this tail first."""
        space = self._space_of(entry.app)
        self._mark_used(entry)
        if not space.rules.pinned:
            space.oldest_first[entry.key] = entry

    def touch(self, entry: E) -> None:
        """Mark an entry as the most recently used of its namespace, if it can be evicted."""
        oldest_first = self._space_of(entry.app).oldest_first
        if entry.key in oldest_first:
            self._mark_used(entry)
            oldest_first.move_to_end(entry.key)

    def _mark_used(self, entry: E) -> None:
        self._uses += 1
        entry.last_use = self._uses

    def pop_expired(self, now_s: float, limit: int) -> list[E]:
        """Return at most `limit` entries whose time to live has passed. The caller removes them."""
        due = self._expiries.pop_due(now_s, limit)
        for entry in due:
            del self._expiry_of[entry]
        return due

    def ceiling_victims(self, app: str, size_bytes: int) -> list[E] | None:
        """Return the entries to evict from the app's namespace so that it stays below its ceiling with
        `size_bytes` more bytes. The least recently used entry is first. Returns None if evictions are not
        enough."""
        space = self._space_of(app)
        missing, victims = space.used_bytes + size_bytes - space.ceiling_bytes, []
        space.is_at_ceiling = space.is_at_ceiling or missing > 0
        for entry in space.oldest_first.values():
            if missing <= 0:
                break
            victims.append(entry)
            missing -= entry.aligned_bytes
        return victims if missing <= 0 else None

    def is_at_ceiling(self, app: str) -> bool:
        """Return whether the app's namespace may evict only its own entries."""
        return self._space_of(app).is_at_ceiling

    def is_within_share(self, app: str, size_bytes: int) -> bool:
        """Return whether `size_bytes` more bytes are within the share of the app's namespace."""
        space = self._space_of(app)
        return space.used_bytes + size_bytes <= space.share_bytes

    def search_victims(
        self, app: str, size_bytes: int, *, beyond_shares: bool = False, only_own: bool = False
    ) -> VictimSearch[E]:
        """Return a search for victims, to make space for an entry of `app` that takes `size_bytes` bytes.

        Args:
            beyond_shares: Whether entries next to a victim may belong to any namespace that is not pinned.
            only_own: Whether all victims must belong to the app's namespace, because it is at its ceiling.
        """
        own = self._space_of(app)
        if only_own:
            return VictimSearch([own], own, False, self._space_of, self._uses, only_own=True)
        if len(self._namespaces) == 1:
            return VictimSearch([own], own, beyond_shares, self._space_of, self._uses)
        ranked = [
            (one.rules.priority, -excess, i, one)
            for i, one in enumerate(self._namespaces.values())
            if one.oldest_first and (excess := one.weighted_excess(size_bytes if one is own else 0)) > 0
        ]
        sources = [one for *_, one in sorted(ranked, key=lambda each: each[:3])]
        if own not in sources:
            sources.append(own)
        return VictimSearch(sources, own, beyond_shares, self._space_of, self._uses)

    def _space_of(self, app: str) -> _Namespace[E]:
        return self._namespaces[self._name_of_app.get(app, DEFAULT_NAMESPACE)]


class VictimSearch(Generic[E]):
    """One search for victims: the entries to start from, and the adjacent entries that may also be evicted.
    The entries that are evicted together form a run (`placement.py`)."""

    def __init__(
        self,
        sources: list[_Namespace[E]],
        own_space: _Namespace[E],
        beyond_shares: bool,
        namespace_of: Callable[[str], _Namespace[E]],
        uses: int,
        *,
        only_own: bool = False,
    ) -> None:
        """Create a search. `uses` is the number of uses so far, summed over all entries."""
        self._only_own = only_own
        self._sources, self._own_space, self._beyond_shares = sources, own_space, beyond_shares
        self._namespace_of, self._uses = namespace_of, uses
        self._run_bytes: Counter[_Namespace[E]] = Counter()

    def __iter__(self) -> Iterator[E]:
        """Yield entries from which a run can start, best first."""
        for space in self._sources:
            for entry in space.oldest_first.values():
                self._run_bytes.clear()
                if self.try_add(entry):
                    yield entry
                elif space is not self._own_space:
                    break

    def group_of(self, entry: E) -> object:
        """Return the entry's namespace, within which entries are chosen by age."""
        return self._namespace_of(entry.app)

    def loss(self, size_bytes: int, entry: E) -> float:
        """Return the value of `size_bytes` bytes that were last used together with `entry`. The value
        decreases with the time since that use."""
        return size_bytes / (self._uses - entry.last_use + 1)

    def try_add(self, entry: E) -> bool:
        """Return whether this run may also evict `entry`, which has no reader. If so, add it to the run."""
        space = self._namespace_of(entry.app)
        if space.rules.pinned:
            return False
        if space is self._own_space or self._beyond_shares:
            return True
        if self._only_own:
            return False
        if space.used_bytes - self._run_bytes[space] - entry.aligned_bytes < space.share_bytes:
            return False
        self._run_bytes[space] += entry.aligned_bytes
        return True


def _cost_ns(entry: PolicyEntry) -> int:
    return round(entry.cost_s * 1e9)
