"""Storage backend "cornplug" for SGLang's hierarchical cache, using the host's store.

SGLang calls the backend on its storage threads, in batches of at most 128 pages. It computes pages that the
backend does not return. If the store fails, no call raises an exception. Every call has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)

from cornplug.engine_common import weights_guard
from cornplug.engine_common.page_publish import count_free_pages
from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import KV_PAGE, count_as_miss, log_store_size
from cornplug.errors import ConfigError, CornplugError, LayoutError
from cornplug.kv_page import PageGeometry, PageSize, RankSlice
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import logger
from cornplug.sglang_hooks.kv.early_lookup import EarlyLookup
from cornplug.sglang_hooks.kv.extra_pools import ExtraPools
from cornplug.sglang_hooks.kv.hicache_config import SECOND_REQUEST_POLICY, compile_hash
from cornplug.sglang_hooks.kv.idle_backups import IdleBackups
from cornplug.sglang_hooks.kv.window_pool import layer_groups, open_window_pool
from cornplug.sglang_hooks.kv_pages import page_hash_index
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.draft_pages import DraftPages
from cornplug.sglang_hooks.kv_pages.layout import (
    ModelKV,
    RankPosition,
    attention_backends,
    check_first_layer,
    host_pages,
    page_geometry,
    quantised_format,
    rank_heads,
    rank_position,
    verify_layout,
)
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_copies import copy_thread_count
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace
from cornplug.sglang_hooks.kv_pages.reader import PageReader, PoolContext, RankPool
from cornplug.sglang_hooks.kv_pages.writer import PageWriter, writer_part
from cornplug.store.base import WriterPart

_MAX_ERRORS: Final = 8
"""Number of unexpected errors after which sharing stops."""


class CornplugStorage(ExtraPools):
    """Storage backend of one rank.

    If KV cannot be shared, this logs the reason once, and SGLang then uses only its host pool.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        if not activation.is_on():
            raise ConfigError(
                "--hicache-storage-backend-extra-config",
                "selects cornplug's storage on a server without cornplug",
                "Add --enable-cornplug.",
            )
        parts = activation.selected_parts()
        if parts is not None and "kv" not in parts:
            raise ConfigError(
                "hicache_storage_backend",
                "selects cornplug's storage on a server that was started without KV sharing",
                "Start the server with --enable-cornplug. Its log gives the reason if KV cannot be shared.",
            )
        super().__init__(activation.runtime(), activation.tally())
        self._config = storage_config
        self._off = "starting"
        self._errors = 0
        """Number of unexpected errors so far."""
        self.why_off = ""
        """Reason why this rank does not share KV, or "" if it does."""
        self._has_draft_pool = False
        self._context: PoolContext | None = None
        self._writer: PageWriter | None = None
        self._early_lookup: EarlyLookup | None = None
        self._host_page_bytes = 0
        self.pace: LoadPace | None = None
        """Measured durations of loads and steps on this rank, or None until SGLang has registered its
        pools."""
        self.idle_backups: IdleBackups | None = None
        """Backups while the server is idle. None until SGLang has registered its pools, and on servers that
        do not save pages while they are idle."""
        self._extra_pools: dict[str, Any] = {}
        self._controller = page_hash_index.attaching_controller()

    # -- start ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether this rank's storage has started and was not stopped."""
        return not self._off

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name == PoolName.DRAFT and self._draft_model is not None:
            self._has_draft_pool = True
            self._share_draft()
        elif host_pool_name != PoolName.KV:
            self._extra_pools[str(host_pool_name)] = host_pool
            if self._reader is not None:
                self._stop_sharing("attention_kind", f"SGLang added pool {host_pool_name} after the start")

    def on_host_pools_registered(self) -> None:
        try:
            self._open_pools()
            self._off = ""
        except CornplugError as e:
            self._stop_sharing(e.reason, str(e))
        # At startup, SGLang registers the draft model's pool after this call. If the storage is attached at
        # run time, SGLang has already registered the pool.
        self._share_draft()

    def _share_draft(self) -> None:
        if self._has_draft_pool and self.is_open and self.lacks_draft:
            try:
                self._open_draft()
            except CornplugError as e:
                self._stop_sharing(e.reason, f"cannot share KV of the draft model: {e}")

    def _open_pools(self) -> None:
        if self._controller is None:
            raise LayoutError("cannot find SGLang's cache controller", reason="layout")
        from sglang.srt.arg_groups.overrides import model_config_of
        from sglang.srt.runtime_context import get_server_args

        model = model_config_of(get_server_args())
        quantised = quantised_format(self._controller.mem_pool_device.dtype)
        place = rank_position(self._config, model.num_hidden_layers)
        groups = layer_groups(self._controller, self._extra_pools, model, place)
        if groups is None:
            check_first_layer(place, self._controller.mem_pool_device)
        tokens = self._run.config.engine.page_tokens
        pages = host_pages(self.mem_pool_host)
        if groups is not None:
            # SGLang keeps windows that end where one of its own pages ends. Larger store pages rarely end
            # there.
            tokens = min(tokens, pages.page_size)
        kv_heads = model.get_total_num_kv_heads()
        full_layers = model.num_hidden_layers if groups is None else len(groups.full.layers)
        page = page_geometry(
            pages,
            ModelKV(kv_heads, full_layers, model.hf_config.to_dict()),
            page_tokens=tokens,
            quantised=quantised,
            attention=attention_backends() if quantised else "",
            position=place if groups is None else None,
        )
        page = page if groups is None else groups.full.page(page)
        heads, writes = rank_heads(pages, page, place.tp_size, place.tp_rank)
        verify_layout(pages, self._controller, None if groups is None else groups.full.device)
        try:
            index = page_hash_index.open_index(pages.page_size, tokens)
        except ValueError as e:
            raise LayoutError(str(e), reason="page_size") from e
        # Load the compiled hash in this process now. Otherwise SGLang would load it on a thread that may have
        # to stop in the meantime.
        compile_hash()
        roots = NamespaceRoots(self._run.secret, page, _identify)
        layers = place.layers if groups is None else range(page.layers)
        held = RankSlice(heads=heads, layers=layers, writes=writes)
        mine = RankPages(page, held, self._run.store)
        token_bytes = mine.size_bytes / page.page_tokens
        self._host_page_bytes = int(token_bytes * pages.page_size)
        self.pace = LoadPace(self._run.config.store.load_when, token_bytes)
        stops = self._controller.storage_stop_event.is_set
        threads = copy_thread_count(self._controller.mem_pool_device.device, place.ranks)
        # If SGLang's own tree offers pages only at their second request, cornplug need not count requests.
        only_seen = self._must_count_requests()
        self._context = PoolContext(self._run, index, self._tally, self.pace, stops, only_seen)
        pool = RankPool(mine, pages, threads)
        self._reader = PageReader(self._context, roots, pool)
        group = activation.rank_group_id() if place.ranks > 1 else b""
        part = self._writer_part(place, page, group, latent=pages.latent)
        self._writer = PageWriter(self._context, self._reader, pool, part)
        if groups is not None:
            self._windows = open_window_pool(
                self._context, groups.windows, self._extra_pools[str(PoolName.SWA)], self._controller, roots,
                heads=kv_heads, rank=(place.tp_size, place.tp_rank, group),
            )  # fmt: skip
        whole: PageSize = page if self._windows is None else self._windows.combined_page(page)
        own_tokens = self._controller.mem_pool_device.size
        # Copies on an idle server must begin on all ranks in the same turn of the scheduler's loop. However,
        # pipeline stages have idle turns at different times.
        if self._run.config.engine.save == "second" and not only_seen and len(place.layers_of_stages) == 1:
            self.idle_backups = IdleBackups(partial(self._free_tokens, whole), own_tokens)
        self._early_lookup = EarlyLookup(
            index, self._reader, self.pace, self._tally, self._run.app, windows=self._windows
        )
        logger.info(
            "cornplug: KV is shared: pages of %d tokens in host layout %s as pages of %d, heads %d to "
            "%d of %d, layers %d to %d of %d; its layout is verified",
            pages.page_size,
            self.mem_pool_host.layout,
            tokens,
            heads.start,
            heads.stop - 1,
            page.heads,
            place.layers.start,
            place.layers.stop - 1,
            page.layers,
        )
        logger.info(
            "cornplug: SGLang's HiCache uses %.1f GiB of host memory on this rank for KV sharing, and "
            "rejects requests with beam_width",
            sum(pool.kv_buffer.nbytes for pool in self.registered_pools.values()) / (1 << 30),
        )
        if place.tp_rank == place.stage == 0:
            log_store_size(self._run, whole, own_tokens, logger)

    def _open_draft(self) -> None:
        assert self._context is not None
        self._draft_pages = DraftPages(
            self._context,
            self._draft_model,
            self._controller.mem_pool_host.entry_map[PoolName.DRAFT],
            self._controller,
            (self._config.tp_size, self._config.tp_rank),
        )
        logger.info("cornplug: KV of the draft model is shared with servers that have the same draft model")

    def _must_count_requests(self) -> bool:
        """Return whether cornplug must count the requests that use a page.

        This is the case if pages are saved at their second request and SGLang's tree does not count requests.
        """
        by_tree = self._controller.write_policy == SECOND_REQUEST_POLICY
        return self._run.config.engine.save == "second" and not by_tree

    @staticmethod
    def _writer_part(
        position: RankPosition, page: PageGeometry, group: bytes, *, latent: bool
    ) -> WriterPart | None:
        """Return the part of a page that this rank writes, or None if it writes complete pages or no pages.

        Raises LayoutError if the ranks have no common group name."""
        # Every rank of a stage holds the same latents (MLA). Only the stage's first rank writes them.
        size, rank = (1, 0) if latent else (position.tp_size, position.tp_rank)
        stages = len(position.layers_of_stages)
        if size * stages > 1 and not group:
            raise LayoutError("the ranks have no common group name", reason="tp_group_broken")
        return writer_part(page, size, rank, group, stages=stages, stage=position.stage)

    def _stop_sharing(self, reason: str, why: str) -> None:
        self._off, self.why_off = reason, why
        page_hash_index.close_index()
        logger.warning("cornplug: KV of this engine is not shared: %s", why)

    def close(self) -> None:
        """Stop sharing KV. The process keeps its store connection for embeddings."""
        self._off = "closed"
        page_hash_index.close_index()
        for part in (self._reader, self._writer, self._windows, self._draft_pages):
            if part is not None:
                part.close()

    # -- reading ----------------------------------------------------------------------------

    def count_worth_fetching(
        self,
        tokens: Sequence[int],
        prefix: Sequence[int],
        last_hash: str | None,
        space: CacheNamespace,
        *,
        in_pairs: bool = False,
    ) -> int:
        """Return how many of `tokens` are worth fetching. `tokens` follow `prefix` in a request.

        Called on the scheduler's thread. Returns 0 if the store fails. With `in_pairs`, SGLang hashes pairs
        of tokens, as for an EAGLE draft model.
        """
        found = 0
        if self._early_lookup is not None and self._may_share():
            with self._catch_errors("lookup"), count_as_miss(self._tally, self._run.app, KV_PAGE):
                found = self._early_lookup.count_worth_fetching(
                    tokens, prefix, last_hash, space, in_pairs=in_pairs
                )
        return found

    def record_queued(self, request: Any, tokens: int) -> None:
        """Record that SGLang has queued a prefetch of `tokens` tokens for a request."""
        if self.pace is not None:
            self.pace.record_queued(request, tokens)
            if said := self.pace.next_log_message():
                logger.info("cornplug: %s", said)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages the store has.

        Returns 0 for a model with sliding windows. Such a model also needs window pages to continue a
        request, which `batch_exists_v2` looks up.
        """
        found = 0
        if self._may_share() and self._reader is not None and self._windows is None:
            with self._catch_errors("lookup"), count_as_miss(self._tally, self._run.app, KV_PAGE):
                found = self._reader.count_present(keys)
        return found

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Fill host pages from the store. Returns a bool per page: whether the host page has verified KV
        now."""
        done = 0
        if self._may_share() and self._reader is not None:
            began = time.monotonic()
            with self._catch_errors("load"):
                done = self._reader.load(keys, self._first_slots(host_indices))
            took_s = time.monotonic() - began
            self._tally.observe("cornplug_wait_seconds", took_s, self._run.app, KV_PAGE)
            if self.pace is not None and done:
                self.pace.record_copy(done * self._host_page_bytes, took_s)
        return [True] * done + [False] * (len(keys) - done)

    def _free_tokens(self, page: PageSize) -> int | None:
        """Return the number of tokens that fit into the store without an eviction.

        The result is 0 if this rank does not share KV, and None if the store does not reply.
        """
        if self._off or weights_guard.has_replaced_weights():
            return 0
        pages = count_free_pages(self._run, page)
        if pages is None:
            return None
        free = pages * page.page_tokens
        if self._draft_pages is not None:
            free = free * page.page_bytes // (page.page_bytes + self._draft_pages.page_bytes)
        return free

    def _may_share(self) -> bool:
        reason = self._off or ("speculative" if self.lacks_draft else "")
        reason = reason or ("weights_updated" if weights_guard.has_replaced_weights() else "")
        if reason:
            self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason)
        return not reason

    @contextmanager
    def _catch_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - any error
            self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, "error")
            self._errors += 1
            if self._errors == 1:
                logger.exception("cornplug: KV %s failed", what)
            elif self._errors == _MAX_ERRORS:
                self._stop_sharing("error", f"{self._errors} errors, the last in a {what}")

    def _may_save(self) -> bool:
        may = self._run.config.engine.save != "never" and not self._off and not self.lacks_draft
        return may and not weights_guard.has_replaced_weights()

    def _first_slots(self, host_indices: torch.Tensor) -> list[int]:
        size: int = self.mem_pool_host.page_size
        return [int(slot) for slot in host_indices[::size].tolist()]

    # -- writing ----------------------------------------------------------------------------

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Offer pages to the store.

        Always returns True for each page. SGLang uses the result only to log each rejected page, which would
        flood the log if the store is full or absent. Metrics count the outcomes.
        """
        if self._writer is not None and self._may_save():
            with self._catch_errors("save"):
                self._writer.save(keys, self._first_slots(host_indices))
        return [True] * len(keys)


def _identify() -> tuple[bytes, dict[str, Any]]:
    from cornplug.sglang_hooks.model.model_config import engine_model

    return engine_model().kv_identity()
