"""KV of a draft model, which is stored in addition to the model's own KV.

SGLang keeps the draft model's KV in a separate host pool, at the same slots as the model's pages. A page is a
hit only if the store has both the model's page and the draft model's page. The two pages have different keys,
and are looked up, loaded and saved together. The draft model's KV affects how many proposed tokens the model
accepts, but never which tokens the model generates.

The last position of a draft page depends on the token after the page, which is not part of any key. If
another request continues with another token, one position of 64 is stale. SGLang's own tree has the same
limitation for STANDALONE.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import KV_PAGE, count_as_miss
from cornplug.errors import LayoutError
from cornplug.kv_page import RankSlice
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv_pages.layout import (
    ModelKV,
    host_pages,
    page_geometry,
    rank_heads,
    verify_layout,
)
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_copies import copy_thread_count
from cornplug.sglang_hooks.kv_pages.reader import PageReader, PoolContext, RankPool
from cornplug.sglang_hooks.kv_pages.writer import PageWriter, writer_part

_ENGINE: Final = "sglang draft"
"""Engine name in the geometry of draft pages. A draft model receives each token one position early. Its pages
therefore differ from the pages of the same model on a server without speculative decoding."""

_model: Any = None


def set_draft_model(model: Any) -> None:
    """Set the draft model of this process's engine. The storage reads it with `get_draft_model`.

    `model` is SGLang's ModelConfig of the draft model, or None if no draft model has KV.
    """
    global _model
    _model = model


def get_draft_model() -> Any:
    """Return SGLang's ModelConfig of this engine's draft model, or None (see `set_draft_model`)."""
    return _model


class DraftPages:
    """Pages of a draft model in its host pool on this rank, at the same slots as the model's pages.

    Metrics count only the model's pages. A page whose draft page is missing counts as a miss.

    Args:
        model: SGLang's ModelConfig of the draft model.
        pool: entry of the draft model's host pool, which also contains its device pool.
        controller: SGLang's cache controller.
        tp: (number of tensor-parallel ranks, number of this rank).

    Raises LayoutError if the pool cannot be shared.
    """

    def __init__(
        self, context: PoolContext, model: Any, pool: Any, controller: Any, tp: tuple[int, int]
    ) -> None:
        runtime, index = context.runtime, context.index
        pages = host_pages(pool.host_pool)
        if pages.latent:
            raise LayoutError("the draft model uses MLA", reason="speculative")
        plain = page_geometry(
            pages,
            ModelKV(model.get_total_num_kv_heads(), model.num_hidden_layers, model.hf_config.to_dict()),
            page_tokens=index.page_tokens,
        )
        page = dataclasses.replace(plain, engine=_ENGINE)
        heads, writes = rank_heads(pages, page, *tp)
        verify_layout(pages, controller, pool.device_pool)
        group = activation.rank_group_id() if tp[0] > 1 else b""
        if tp[0] > 1 and not group:
            raise LayoutError("the tensor-parallel ranks have no common group name", reason="tp_group_broken")
        held = RankSlice(heads=heads, layers=range(page.layers), writes=writes)
        roots = NamespaceRoots(runtime.secret, page, partial(_identify, model))
        self.page_bytes, self._page_size = page.page_bytes, pages.page_size
        # The threads that copy the model's pages are idle in the meantime, because SGLang does not copy pages
        # and draft pages at the same time.
        threads = copy_thread_count(pool.device_pool.device, tp[0])
        mine = RankPool(RankPages(page, held, runtime.store), pages, threads)
        uncounted = dataclasses.replace(context, tally=Tally())
        self._reader = PageReader(uncounted, roots, mine)
        self._writer = PageWriter(uncounted, self._reader, mine, writer_part(page, *tp, group))
        self._run, self._index, self._tally = runtime, index, context.tally

    def count_present(self, hashes: Sequence[str]) -> int:
        """Return the number of leading pages for which the store has the draft page.

        Does not raise an exception if the store fails.
        """
        found = 0
        with count_as_miss(self._tally, self._run.app, KV_PAGE):
            found = self._reader.count_present(hashes)
            if lacking := (len(hashes) - found) * self._index.page_size // self._index.page_tokens:
                self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, "absent", amount=lacking)
        return found

    def fetch(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Fill the draft model's host pages from the store.

        Returns a bool per key, by pool: whether the host page has verified KV now.
        """
        found = {}
        for transfer in transfers:
            keys, done = transfer.keys or [], 0
            if transfer.name == PoolName.DRAFT:
                done = self._reader.load(keys, self._first_slots(transfer))
            found[str(transfer.name)] = [True] * done + [False] * (len(keys) - done)
        return found

    def offer(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Offer the draft model's pages to the store.

        Returns True for each key of the draft model's pool, and False for the keys of other pools.
        """
        found = {}
        for transfer in transfers:
            keys, is_draft = transfer.keys or [], transfer.name == PoolName.DRAFT
            if is_draft:
                self._writer.save(keys, self._first_slots(transfer))
            found[str(transfer.name)] = [is_draft] * len(keys)
        return found

    def _first_slots(self, transfer: PoolTransfer) -> list[int]:
        return [int(slot) for slot in transfer.host_indices[:: self._page_size].tolist()]

    def close(self) -> None:
        """Close the scheduler thread's store connection, and stop the threads that copy draft pages."""
        self._reader.close()
        self._writer.close()


def _identify(model: Any) -> tuple[bytes, dict[str, Any]]:
    from cornplug.sglang_hooks.model.model_config import draft_model, engine_model

    fingerprint, spec = draft_model(model).kv_identity()
    # EAGLE's KV depends on the model's hidden states and embedding, so the model is part of the key. A
    # standalone draft model does not depend on the model.
    of, beside = engine_model().kv_identity()
    return fingerprint, {**spec, "drafts_for": {"weights": of.hex(), "spec": beside}}
