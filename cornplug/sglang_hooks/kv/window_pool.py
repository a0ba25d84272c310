"""Pages of SGLang's separate device pool for layers with sliding windows.

A request can continue at token n if two kinds of pages are available: all full-attention pages before n, and
the window pages that contain the window before n. SGLang queries both kinds together, fetches the window
last, and discards a prefix without a window. SGLang keeps windows only at the ends of a prompt's prefill
steps and of finished requests. Therefore most pages of a long prompt have no window page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import (
    PoolTransfer,
)

from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import LayoutError
from cornplug.kv_page import CombinedPageSize, PageGeometry, PageSize, RankSlice
from cornplug.sglang_hooks.kv_pages.layout import (
    ModelKV,
    RankPosition,
    host_pages,
    page_geometry,
    rank_heads,
    verify_layout,
)
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.reader import PageReader, PoolContext, RankPool
from cornplug.sglang_hooks.kv_pages.writer import PageWriter, writer_part
from cornplug.store.base import Tier


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV SGLang keeps in one device pool."""

    device: Any
    layers: tuple[int, ...]
    """Numbers of these layers in the model, in the pool's order."""
    window: int
    """Number of tokens to which the layers attend, or 0 for all tokens."""

    def page(self, page: PageGeometry) -> PageGeometry:
        """Return the geometry of this group's pages.

        Only SGLang reads these pages, because no test has compared them with other engines' pages.
        """
        return replace(page, engine="sglang", group=self.layers, window=self.window)


class LayerGroups(NamedTuple):
    """Layers of a model with sliding windows and full attention."""

    full: LayerGroup
    windows: LayerGroup


def window_pools(pool: Any) -> tuple[Any, Any] | None:
    """Return SGLang's device pools for full attention and for windows.

    Returns None if the pages of either pool cannot be shared.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    # Subclasses have other contents, such as compressed states, scales or asymmetric heads.
    if type(pool) is not SWAKVPool:
        return None
    pools = (pool.full_kv_pool, pool.swa_kv_pool)
    plain = all(type(one) is MHATokenToKVPool and one.layer_num > 0 for one in pools)
    return pools if plain and pools[0].head_num == pools[1].head_num else None


def layer_groups(
    controller: Any, extra_pools: Mapping[str, Any], model: Any, position: RankPosition
) -> LayerGroups | None:
    """Return the groups of a model's layers, or None if SGLang keeps all of them in one pool.

    Args:
        controller: SGLang's cache controller.
        extra_pools: host pools other than the full-attention pool, by SGLang's names.
        model: SGLang's config of the complete model.

    Raises LayoutError if a pool cannot be shared.
    """
    if not extra_pools:
        return None
    if len(position.layers_of_stages) > 1:
        raise LayoutError("sliding windows with pipeline parallelism are not tested", reason="attention_kind")
    pools = window_pools(controller.mem_pool_device)
    if pools is None or set(extra_pools) != {"swa"}:
        raise LayoutError(
            f"the model has state other than KV of full attention: {', '.join(sorted(extra_pools))}",
            reason="attention_kind",
        )
    window = model.sliding_window_size
    if not isinstance(window, int) or window <= 0:
        raise LayoutError(f"sliding windows of {window} tokens are not supported", reason="attention_kind")
    places = controller.mem_pool_device.layers_mapping
    of_full, of_windows = (
        tuple(sorted((layer for layer, at in places.items() if at[1] is sliding), key=lambda n: places[n][0]))
        for sliding in (False, True)
    )
    if sorted((*of_full, *of_windows)) != list(range(model.num_hidden_layers)):
        raise LayoutError(
            f"pools of layers {sorted(places)} in a model with {model.num_hidden_layers} layers",
            reason="attention_kind",
        )
    return LayerGroups(LayerGroup(pools[0], of_full, 0), LayerGroup(pools[1], of_windows, window))


class WindowPool:
    """Looks up, fetches and saves one rank's window pages.

    A window page has the same hash as the full-attention page for the same tokens.

    Args:
        page: geometry of the windows' store pages.
        page_size: number of tokens in an SGLang page.
        min_pages: number of SGLang pages that a window needs.
    """

    def __init__(
        self, page: PageGeometry, reader: PageReader, writer: PageWriter, page_size: int, min_pages: int
    ) -> None:
        self._page, self._reader, self._writer = page, reader, writer
        self._page_size, self._min_pages = page_size, min_pages

    def combined_page(self, full: PageGeometry) -> PageSize:
        """Return the size of a full-attention page plus a window page.

        This is the maximum number of bytes that the store needs for the tokens of one page.
        """
        return CombinedPageSize(full.page_tokens, full.page_bytes + self._page.page_bytes)

    def close(self) -> None:
        """Close the store connection of the scheduler's thread, and stop the threads that copy pages."""
        self._reader.close()
        self._writer.close()

    def find_hits(
        self, full: PageReader, hashes: Sequence[str], transfers: Sequence[PoolTransfer], *, at_start: bool
    ) -> list[int]:
        """Return the numbers of leading pages after which a request can continue.

        A request can continue after n pages if the store has these pages and the window at their end. Only
        the longest hit's window is read from disk. Absent pages are counted as misses. Raises CornplugError
        if the store fails.

        Args:
            full: reader for the full-attention pages.
            transfers: SGLang's queries. Only a query for windows is supported, which has as many keys as a
                window has pages.
            at_start: whether the pages begin a sequence. If so, a sequence shorter than a window needs only
                its own pages. Otherwise SGLang needs a complete window after the pages that it already has.
        """
        if not _is_window_transfer(transfers):
            return []
        window = max(1, len(transfers[0].keys or ()))
        tiers = self._reader.tiers(hashes)
        ends = _hit_lengths(tiers, window, at_start)
        if ends and Tier.DISK in tiers:
            tail = slice(max(0, ends[-1] - window), ends[-1])
            if Tier.DISK in tiers[tail]:
                tiers[tail] = self._reader.tiers(hashes[tail], recall=True)
            ends = _hit_lengths(
                [tier if tier == Tier.MEMORY else Tier.ABSENT for tier in tiers], window, at_start
            )
        asked = ends[-1] if ends else 0
        most = full.count_present(hashes[:asked]) if asked else 0
        ends = [end for end in ends if end <= most]
        # `count_present` has already counted the misses among the first `asked` full-attention pages.
        full.count_absent(len(hashes) - asked + most - (ends[-1] if ends else 0))
        return ends

    def longest_stored(self, hashes: Sequence[str], *, at_start: bool) -> int:
        """Return the largest number of leading pages for which the store has the window at their end.

        Windows on disk count too. Reads no page, because this is called on the scheduler's thread. Raises
        CornplugError if the store fails.
        """
        ends = _hit_lengths(self._reader.tiers(hashes, on_scheduler=True), self._min_pages, at_start)
        return ends[-1] if ends else 0

    def fetch(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Fill the host pages of a window from the store.

        Returns one bool per page, by pool: True if the host page now contains verified KV.
        """
        if not _is_window_transfer(transfers):
            return {}
        keys, slots = self._keys_and_slots(transfers[0])
        done = self._reader.load(keys, slots)
        return {str(transfers[0].name): [True] * done + [False] * (len(transfers[0].keys or ()) - done)}

    def offer(self, transfers: Sequence[PoolTransfer]) -> None:
        """Offer the pages of a window to the store."""
        if _is_window_transfer(transfers):
            self._writer.save(*self._keys_and_slots(transfers[0]))

    def _keys_and_slots(self, transfer: PoolTransfer) -> tuple[list[str], list[int]]:
        """Return the hashes and the first slots of a transfer's pages.

        Both lists are empty if SGLang passes an unexpected number of slots.
        """
        keys, at = transfer.keys or [], transfer.host_indices
        if at is None or at.numel() != len(keys) * self._page_size:
            return [], []
        return keys, [int(slot) for slot in at[:: self._page_size].tolist()]


def _is_window_transfer(transfers: Sequence[PoolTransfer]) -> bool:
    return [str(transfer.name) for transfer in transfers] == ["swa"]


def _hit_lengths(tiers: Sequence[Tier], window: int, at_start: bool) -> list[int]:
    """Return each number of leading pages of which the last `window` pages are available.

    With `at_start`, fewer than `window` leading pages are sufficient if all of them are available.
    """
    ends: list[int] = []
    run = 0
    for end, tier in enumerate(tiers, 1):
        run = run + 1 if tier else 0
        if run >= window or (at_start and run == end):
            ends.append(end)
    return ends


def open_window_pool(
    context: PoolContext,
    group: LayerGroup,
    host_pool: Any,
    controller: Any,
    roots: NamespaceRoots,
    *,
    heads: int,
    rank: tuple[int, int, bytes],
) -> WindowPool:
    """Create the window pool of one rank, and verify its layout with test writes.

    Args:
        roots: roots for the full-attention pages.
        heads: number of KV heads of the complete model.
        rank: (number of tensor-parallel ranks, number of this rank, name of the ranks' group).

    Raises LayoutError if SGLang's copies differ from the layout that this release expects.
    """
    pages, index = host_pages(host_pool), context.index
    if pages.latent or pages.page_size != index.page_size:
        raise LayoutError(f"the window pool has pages of {pages.page_size} tokens", reason="attention_kind")
    page = group.page(
        page_geometry(pages, ModelKV(heads, len(group.layers), {}), page_tokens=index.page_tokens)
    )
    size, number, name = rank
    held, writes = rank_heads(pages, page, size, number)
    verify_layout(pages, controller, group.device)
    in_page = RankSlice(heads=held, layers=range(page.layers), writes=writes)
    mine = RankPool(RankPages(page, in_page, context.runtime.store), pages)
    reader = PageReader(context, roots.for_page(page), mine, counts_tokens=False)
    writer = PageWriter(context, reader, mine, writer_part(page, size, number, name))
    # Some models count a token's own position as part of the window, and some do not.
    least = max(1, -(-(group.window - 1) // index.page_size))
    return WindowPool(page, reader, writer, index.page_size, least)
