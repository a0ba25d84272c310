"""KV of a draft model, stored in addition to the model's own KV.

SGLang keeps it in a separate host pool, at the slots of the model's pages, and a page is a hit only if both
pools have it. A page and its draft therefore have two keys, and are looked up, loaded and saved together. A
draft's KV affects how many of its proposals the model accepts, but never which tokens.

A page's last position in the draft's KV depends on the token after the page, which is in no key. If another
request continues with another token, that one position of 64 is stale. SGLang's own tree has the same
limitation for STANDALONE.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import KV_PAGE, miss
from cornplug.errors import LayoutError
from cornplug.kv_page import RankSlice
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv_pages.layout import ModelKV, host_pages, page_geometry, rank_heads, verify
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_copies import copy_threads
from cornplug.sglang_hooks.kv_pages.pool_context import PoolContext, RankPool
from cornplug.sglang_hooks.kv_pages.reader import PageReader
from cornplug.sglang_hooks.kv_pages.writer import PageWriter, part_of

_ENGINE: Final = "sglang draft"
"""Engine name for draft pages. A draft sees each token one position early, so its pages differ from pages of
the same model on its own server."""

_model: Any = None


def announce(model: Any) -> None:
    """Set the draft of this process's engine, as SGLang's ModelConfig, or None if there is no draft with
    KV."""
    global _model
    _model = model


def announced() -> Any:
    """Return the argument of the last call of `announce`."""
    return _model


class DraftPages:
    """A draft's host pool on this rank, whose pages have the same slots as the model's.

    Metrics count the model's pages. A page without its draft page counts as missed.

    Args:
        model: SGLang's ModelConfig of the draft.
        pool: the entry of the draft's host pool, with its device pool.
        controller: SGLang's cache controller.
        tp: (size, rank).

    Raises LayoutError for a pool that cannot be shared.
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
        verify(pages, controller, pool.device_pool)
        group = activation.group() if tp[0] > 1 else b""
        if tp[0] > 1 and not group:
            raise LayoutError("the tensor-parallel ranks have no common group name", reason="tp_group_broken")
        held = RankSlice(heads=heads, layers=range(page.layers), writes=writes)
        roots = NamespaceRoots(runtime.secret, page, partial(_identify, model))
        self.page_bytes, self._page_size = page.page_bytes, pages.page_size
        # The model's pages are idle in the meantime, because SGLang copies a page and its draft in turn.
        threads = copy_threads(pool.device_pool.device, tp[0])
        mine = RankPool(RankPages(page, held, runtime.store), pages, threads)
        uncounted = dataclasses.replace(context, tally=Tally())
        self._reader = PageReader(uncounted, roots, mine)
        self._writer = PageWriter(uncounted, self._reader, mine, part_of(page, *tp, group))
        self._run, self._index, self._tally = runtime, index, context.tally

    def present(self, hashes: Sequence[str]) -> int:
        """Return the number of leading pages for which the store has the draft page. Does not raise if the
        store fails.
        """
        found = 0
        with miss(self._tally, self._run.app, KV_PAGE):
            found = self._reader.present(hashes)
            if lacking := (len(hashes) - found) * self._index.page_size // self._index.page_tokens:
                self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, "absent", by=lacking)
        return found

    def get(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Fill the draft's host pages. Returns for each key of a pool whether it now has verified KV."""
        found = {}
        for transfer in transfers:
            keys, done = transfer.keys or [], 0
            if transfer.name == PoolName.DRAFT:
                done = self._reader.load(keys, self._slots(transfer))
            found[str(transfer.name)] = [True] * done + [False] * (len(keys) - done)
        return found

    def set(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Offer the draft's pages to the store. Returns True for each key of its pool."""
        found = {}
        for transfer in transfers:
            keys, is_draft = transfer.keys or [], transfer.name == PoolName.DRAFT
            if is_draft:
                self._writer.save(keys, self._slots(transfer))
            found[str(transfer.name)] = [is_draft] * len(keys)
        return found

    def _slots(self, transfer: PoolTransfer) -> list[int]:
        return [int(slot) for slot in transfer.host_indices[:: self._page_size].tolist()]

    def close(self) -> None:
        """See `PageReader.close` and `PageWriter.close`."""
        self._reader.close()
        self._writer.close()


def _identify(model: Any) -> tuple[bytes, dict[str, Any]]:
    from cornplug.sglang_hooks.model.model_config import draft_model, engine_model

    fingerprint, spec = draft_model(model).kv_identity()
    # EAGLE uses the model's hidden states and embedding. For a standalone draft, the key contains more than
    # necessary.
    of, beside = engine_model().kv_identity()
    return fingerprint, {**spec, "drafts_for": {"weights": of.hex(), "spec": beside}}
