"""The scheduler half of the KV connector: what to load, what to save, and who may see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cornplug.codec import Header, Kind, decode_header, encode_header
from cornplug.errors import CheckpointError, CodecError, CornplugError
from cornplug.identity import kv_root
from cornplug.kv_page import PageGeometry, pages_between
from cornplug.metrics import Tally
from cornplug.store.base import Lease, Refusal, Reservation
from cornplug.vllm_connector import compat, weights
from cornplug.vllm_connector.kv_moves import KVAcks, KVMoves, Load, PageRead, PageWrite, Save
from cornplug.vllm_connector.model import adapter_digest, kv_identity
from cornplug.vllm_connector.page_keys import PageKeys
from cornplug.vllm_connector.runtime import Runtime, miss

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

WHAT = "kv_page"
_FIRST_READ_S = 2.0


@dataclass(slots=True)
class _Match:
    """Leased pages for one request, good until `expires`."""

    computed: int
    reads: list[PageRead]
    tokens: list[int]
    expires: float


@dataclass(slots=True)
class _Tracked:
    request: Request
    keys: PageKeys | None
    """None: nothing of this request is shared."""
    saved_pages: int = 0
    """Pages offered to the store, or known to be there."""
    match: _Match | None = None
    loading: _Match | None = None
    load_began: float = 0.0
    barred: bool = False
    """A load of it failed once: it computes for itself from then on."""
    open_saves: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _OpenSave:
    reservation: Reservation
    request_id: str
    checksums: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _StoreWork:
    """What the store is told at the next step."""

    commit: list[_OpenSave] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    delete: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.commit or self.release or self.delete)


class KVScheduler:
    """One per engine core. Every call into the store has the store's deadline."""

    def __init__(self, config: VllmConfig, runtime: Runtime, geometry: PageGeometry, tally: Tally) -> None:
        self._config = config
        self._run = runtime
        self._page = geometry
        self._tally = tally
        self._manager: KVCacheManager | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._open: dict[int, _OpenSave] = {}
        self._finishing: list[str] = []
        self._store_work = _StoreWork()
        self._off = ""
        self._identity: tuple[bytes, dict[str, Any]] | None = None
        self._identified = threading.Event()
        self._adapters: dict[str, bytes] = {}
        threading.Thread(target=self._identify, name="cornplug-identify-lm", daemon=True).start()
        self._identified.wait(_FIRST_READ_S)

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    # -- identity ---------------------------------------------------------------------------

    def _identify(self) -> None:
        try:
            self._identity = kv_identity(self._config)
        except CheckpointError as e:
            self._off = e.reason
            compat.logger.warning("cornplug: KV of this engine is not shared: %s", e)
        finally:
            self._identified.set()

    def _why_off(self, request: Request) -> str:
        """Why this request shares no KV; "" when it does."""
        if self._off:
            return self._off
        if weights.replaced():
            return "weights_updated"
        if self._identity is None:
            return "identifying"
        if getattr(request, "prompt_embeds", None) is not None:
            return "prompt_embeds"
        return ""

    def _root(self, request: Request) -> bytes:
        assert self._identity is not None
        fingerprint, spec = self._identity
        lora = request.lora_request
        extra: dict[str, Any] = {"page": self._page.spec()}
        if lora is not None:
            if lora.lora_path not in self._adapters:
                self._adapters[lora.lora_path] = adapter_digest(lora.lora_path)
            extra["lora"] = self._adapters[lora.lora_path].hex()
        return kv_root(self._run.secret, fingerprint, spec | extra, request.cache_salt)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            keys = None
            why = self._why_off(request)
            if why:
                self._tally.count("cornplug_misses_total", self._run.app, WHAT, why)
            else:
                with miss(self._tally, self._run.app, WHAT):
                    keys = PageKeys(
                        self._run.secret, self._root(request), self._page.page_tokens, request.mm_features
                    )
            tracked = self._tracked[request.request_id] = _Tracked(request, keys)
        return tracked

    # -- loading ----------------------------------------------------------------------------

    def matched_tokens(self, request: Request, computed: int) -> int:
        """Tokens beyond `computed` that leased pages hold. Asked often; answers from memory."""
        tracked = self._track(request)
        if tracked.keys is None or tracked.barred or request.skip_reading_prefix_cache or weights.replaced():
            return 0
        match = tracked.match
        if match is None or match.computed != computed or time.monotonic() > match.expires:
            self._drop_match(tracked)
            match = tracked.match = _Match(
                computed, [], [], time.monotonic() + self._run.config.store.lease_s / 3
            )
            with miss(self._tally, self._run.app, WHAT):
                self._look_up(tracked, match)
        if not match.reads:
            return 0
        return (match.reads[-1].index + 1) * self._page.page_tokens - computed

    def _look_up(self, tracked: _Tracked, match: _Match) -> None:
        request, page = tracked.request, self._page
        assert tracked.keys is not None
        # The last token is always computed here: it is what the next one is sampled from.
        wanted = pages_between(match.computed, request.num_tokens - 1, page.page_tokens)
        keys = tracked.keys.upto(request.all_token_ids, request.num_tokens - 1)[wanted.start :]
        if not keys:
            return
        store, config = self._run.store, self._run.config.store
        present = store.contains(keys, deadline_s=config.deadline_s).find(0)
        keys = keys if present < 0 else keys[:present]
        if present >= 0:
            self._tally.count(
                "cornplug_misses_total", self._run.app, WHAT, "absent", by=len(wanted) - present
            )
        if not keys:
            return
        leases = store.lease(keys, ttl_s=config.lease_s, deadline_s=config.deadline_s)
        match.tokens = [lease.token for lease in leases if lease is not None]
        for index, lease in zip(wanted, leases, strict=False):
            read = self._read(index, lease)
            if read is None:
                break
            match.reads.append(read)

    def _read(self, index: int, lease: Lease | None) -> PageRead | None:
        if lease is None:
            return None
        try:
            header = decode_header(lease.meta, key=lease.key)
            if header.shape != self._page.shape or header.dtype != self._page.dtype:
                raise CodecError(f"page of shape {header.shape} {header.dtype}", reason="wrong_shape")
        except CodecError as e:
            self._tally.count("cornplug_misses_total", self._run.app, WHAT, e.reason)
            self._store_work.delete.append(lease.key)
            return None
        return PageRead(index, lease.key, lease.location, header.checksums)

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """The engine took the offer: `external` tokens go into `blocks`."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.match is None or not external:
            return
        match, tracked.match = tracked.match, None
        tracked.loading, tracked.load_began = match, time.monotonic()
        end = match.computed + external
        self._loads.append(Load(request.request_id, match.computed, end, tuple(match.reads), tuple(blocks)))
        tracked.saved_pages = max(tracked.saved_pages, end // self._page.page_tokens)

    def _drop_match(self, tracked: _Tracked) -> None:
        if tracked.match is not None and tracked.match.tokens:
            self._store_work.release += tracked.match.tokens
        tracked.match = None

    def loaded(self, request_id: str) -> None:
        """Worker halves are done with a load, well or not."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.loading is None:
            return
        match, tracked.loading = tracked.loading, None
        self._store_work.release += match.tokens
        app = self._run.app
        self._tally.observe("cornplug_wait_seconds", time.monotonic() - tracked.load_began, app, WHAT)
        if not tracked.barred:
            tokens = (match.reads[-1].index + 1) * self._page.page_tokens - match.computed
            self._tally.count("cornplug_hits_total", app, WHAT, "store", by=len(match.reads))
            self._tally.count("cornplug_saved_tokens_total", app, by=tokens)
        if tracked.request.is_finished():
            self._forget(request_id)

    # -- saving -----------------------------------------------------------------------------

    def moves(self, output: SchedulerOutput) -> KVMoves:
        """The moves of the step that was just scheduled."""
        loads, self._loads = self._loads, []
        finishing, self._finishing = self._finishing, []
        moves = KVMoves(loads=loads, finishing=finishing, preempted=bool(output.preempted_req_ids))
        if self._store_work:
            self._flush()
        wanted = self._new_pages(output)
        if wanted:
            with miss(self._tally, self._run.app, WHAT):
                moves.saves = self._reserve(wanted)
        return moves

    def _new_pages(self, output: SchedulerOutput) -> list[tuple[_Tracked, int, bytes]]:
        """(request, page index, key) of pages that this step's forward completes."""
        if self._off or weights.replaced():
            return []
        found = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.keys is None:
                continue
            request = tracked.request
            # Draft tokens and async placeholders lie beyond the tokens that are known: not saved.
            end = min(request.num_computed_tokens + scheduled, len(request.all_token_ids))
            if end // self._page.page_tokens <= tracked.saved_pages:
                continue
            keys = tracked.keys.upto(request.all_token_ids, end)
            found += [(tracked, i, keys[i]) for i in range(tracked.saved_pages, len(keys))]
            tracked.saved_pages = max(tracked.saved_pages, len(keys))
        return found

    def _reserve(self, wanted: list[tuple[_Tracked, int, bytes]]) -> list[Save]:
        assert self._manager is not None
        answers = self._run.store.reserve(
            [(key, self._page.page_bytes) for _, _, key in wanted],
            app=self._run.app,
            deadline_s=self._run.deadline_s,
        )
        writes: dict[str, list[PageWrite]] = {}
        for (tracked, index, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Refusal):
                self._tally.count("cornplug_saves_total", self._run.app, WHAT, answer.value)
                continue
            request_id = tracked.request.request_id
            self._open[answer.token] = _OpenSave(answer, request_id)
            tracked.open_saves.add(answer.token)
            writes.setdefault(request_id, []).append(PageWrite(index, answer.token, answer.location))
        return [
            Save(request_id, tuple(pages), tuple(self._manager.get_block_ids(request_id)[0]))
            for request_id, pages in writes.items()
        ]

    # -- what the workers answer ------------------------------------------------------------

    def acknowledged(self, acks: KVAcks) -> None:
        """Commit what every rank has written; give up what one could not."""
        if acks.unusable and not self._off:
            self._off = acks.unusable
        for request_id, reason in acks.failed_loads.items():
            self._tally.count("cornplug_misses_total", self._run.app, WHAT, reason)
            if request_id in self._tracked:
                self._tracked[request_id].barred = True
        if acks.loaded_bytes:
            self._tally.count("cornplug_bytes_total", self._run.app, WHAT, "load", by=acks.loaded_bytes)
        for token, sums in acks.written.items():
            save = self._open.get(token)
            if save is not None:
                save.checksums |= sums
                if len(save.checksums) == self._page.segments:
                    self._store_work.commit.append(self._close(token))
        for token in acks.failed_writes:
            if token in self._open:
                self._close(token)
                self._store_work.release.append(token)
                self._tally.count("cornplug_saves_total", self._run.app, WHAT, "write_failed")

    def _close(self, token: int) -> _OpenSave:
        save = self._open.pop(token)
        tracked = self._tracked.get(save.request_id)
        if tracked is not None:
            tracked.open_saves.discard(token)
            if not tracked.open_saves and tracked.request.is_finished():
                self._forget(save.request_id)
        return save

    def _flush(self) -> None:
        """Tell the store what has piled up since the last step: at most three questions.

        From this thread and not another: each takes 0.1 ms, where a thread would wait for its
        turns at the interpreter's lock behind vLLM's busy loop, holding up whoever comes next.
        """
        work, self._store_work = self._store_work, _StoreWork()
        store, deadline_s = self._run.store, self._run.deadline_s
        if work.commit:
            self._commit(work.commit)
        with miss(self._tally, self._run.app, WHAT):
            if work.release:
                store.release(work.release, deadline_s=deadline_s)
            if work.delete:
                store.delete(work.delete, deadline_s=deadline_s)

    def _commit(self, saves: list[_OpenSave]) -> None:
        app, page_bytes = self._run.app, self._page.page_bytes
        written = [(save.reservation, self._header(save)) for save in saves]
        try:
            stored = sum(self._run.store.commit(written, deadline_s=self._run.deadline_s))
        except CornplugError as e:
            self._tally.count("cornplug_saves_total", app, WHAT, e.reason, by=len(saves))
            return
        if stored:
            self._tally.count("cornplug_saves_total", app, WHAT, "stored", by=stored)
            self._tally.count("cornplug_bytes_total", app, WHAT, "save", by=stored * page_bytes)
        if stored < len(saves):
            self._tally.count("cornplug_saves_total", app, WHAT, "reservation_ended", by=len(saves) - stored)

    def _header(self, save: _OpenSave) -> bytes:
        page = self._page
        checksums = tuple(save.checksums[i] for i in range(page.segments))
        return encode_header(Header(Kind.KV_PAGE, save.reservation.key, page.dtype, page.shape, checksums))

    # -- the end of a request ---------------------------------------------------------------

    def finished(self, request: Request) -> bool:
        """True when its blocks must stay until the worker halves have read them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        self._drop_match(tracked)
        if tracked.open_saves:
            self._finishing.append(request.request_id)
            return True
        if tracked.loading is None:
            self._forget(request.request_id)
        return False

    def _forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def saves_open(self) -> bool:
        """Whether the engine must keep stepping for acknowledgements."""
        return bool(self._open or self._finishing or self._store_work)
