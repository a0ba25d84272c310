"""Measures the duration of this engine's loads and steps. `LoadRule` uses the durations to decide whether to
load or to compute a prefix."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cornplug.config import StoreConfig
from cornplug.engine_common.load_policy import EwmaRate, LoadRule
from cornplug.engine_common.page_publish import PageCost
from cornplug.kv_page import PageSize
from cornplug.store.payload import LEASE_S
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_LOAD_FLOOR_S: Final = 1.0
"""Minimum time limit of a load in seconds. When the limit expires, the load is cancelled, and its remaining
tokens are computed instead. The actual limit is three times the time to compute all tokens of the load, if
this is longer."""
_TIMED_TOKENS, _TIMED_STEPS = 64, 16
"""A step is measured if it has at least `_TIMED_TOKENS` more tokens than requests. One in `_TIMED_STEPS` of
the other steps is measured too."""
_MAX_TIMED_STEPS: Final = 256
RECALL_MAX_AGE_S: Final = 60.0
"""Seconds after which measured disk speeds expire, so that reads from a slow disk are tried again."""


@dataclass(slots=True)
class _OpenLoad:
    began_s: float
    size_bytes: int
    copy_s_before: float | None
    """Value of `LoadCosts._copy_s` when the load began, or None if the load overlapped with another
    load."""


class LoadCosts:
    """Measures the cost of one engine's loads and steps, and decides which loads to start. Used by the
    engine's thread."""

    def __init__(self, config: StoreConfig, page: PageSize) -> None:
        self.rule = LoadRule(config.load_when)
        self.page_cost = PageCost()
        """Cost of computing one page's tokens. It is stored with each page that this engine saves."""
        self._config = config
        self._page = page
        self._recall_rate = EwmaRate()
        """Measured rate of reads from disk, including the delay until this engine notices that the pages have
        arrived."""
        self._open_loads: dict[str, _OpenLoad] = {}
        self._copy_s = 0.0
        """Total seconds that this engine has spent on copying pages for loads since it started."""
        self._steps = 0
        self._timed_steps: dict[int, tuple[float, int]] = {}
        """(time when the step was scheduled, number of tokens) for each measured step, by step number."""
        self._step_ended_s = 0.0
        self._has_new_bytes = False
        """Whether bytes have been loaded since the last step ended."""

    @property
    def has_open_loads(self) -> bool:
        """Whether any load is in flight."""
        return bool(self._open_loads)

    @property
    def queued_bytes(self) -> int:
        """Total size in bytes of all loads in flight."""
        return sum(one.size_bytes for one in self._open_loads.values())

    def should_load(self, *, tokens: int, pages: int) -> bool:
        """Return whether to load `tokens` tokens from `pages` stored pages now. True if loading is faster
        than computing, if the speeds are unknown, or if `store.load_when` is "always"."""
        size_bytes = pages * self._page.page_bytes
        return self.rule.should_load(tokens=tokens, size_bytes=size_bytes, queued_bytes=self.queued_bytes)

    def should_recall(self, *, tokens: int, pages: int, on_disk: int) -> bool:
        """Return the result of `should_load` for a load in which `on_disk` of the pages must first be read
        from disk."""
        page_bytes = self._page.page_bytes
        recall_s = self._recall_rate.estimate_s(on_disk * page_bytes, max_age_s=RECALL_MAX_AGE_S) or 0.0
        return self.rule.should_load(
            tokens=tokens, size_bytes=pages * page_bytes, queued_bytes=self.queued_bytes, disk_s=recall_s
        )

    def record_recall(self, pages: int, seconds: float) -> None:
        """Record that reading `pages` pages from disk took `seconds`."""
        self._recall_rate.add_sample(pages * self._page.page_bytes, seconds)

    def deadline_s(self, tokens: int) -> float:
        """Return the time limit in seconds for a load of `tokens` tokens. After this time, the load is
        cancelled and the remaining tokens are computed."""
        # At most a third of the lease's time has passed when the engine accepts the load.
        leased_s, compute_s = LEASE_S * 2 / 3, self.rule.compute_s(tokens)
        if compute_s is None or self._config.load_when == "always":
            return leased_s
        return min(leased_s, max(_LOAD_FLOOR_S, 3 * compute_s))

    def far_wait_s(self, tokens: int) -> float:
        """Return the maximum seconds to wait for far stores (remote storage) to report whether they hold
        `tokens` missing tokens (see `LoadRule.far_wait_s`)."""
        return self.rule.far_wait_s(tokens)

    def begin_load(self, request_id: str, pages: int) -> None:
        """Record that a request begins to load `pages` pages."""
        alone = not self._open_loads
        for other in self._open_loads.values():
            # The latency of a load cannot be measured while two loads overlap.
            other.copy_s_before = None
        self._open_loads[request_id] = _OpenLoad(
            time.monotonic(), pages * self._page.page_bytes, self._copy_s if alone else None
        )

    def end_load(self, request_id: str, *, is_complete: bool) -> float:
        """Record the end of a request's load, and return for how many seconds the request waited.
        `is_complete` is whether all pages were loaded."""
        one = self._open_loads.pop(request_id)
        waited = time.monotonic() - one.began_s
        if is_complete and one.copy_s_before is not None:
            self.rule.record_delay(waited - (self._copy_s - one.copy_s_before))
        return waited

    def time_step(self, output: SchedulerOutput) -> int:
        """Start to measure the step that was just scheduled. Returns the step's number, or 0 if the step is
        not measured."""
        self._steps += 1
        tokens = output.total_num_scheduled_tokens
        more = tokens - len(output.num_scheduled_tokens)
        wanted = more >= _TIMED_TOKENS or (tokens and not self._steps % _TIMED_STEPS)
        # The tokens alone do not determine the duration of a step that runs the tower.
        if not wanted or getattr(output, "scheduled_encoder_inputs", None):
            return 0
        if len(self._timed_steps) >= _MAX_TIMED_STEPS:
            self._timed_steps.clear()  # The workers no longer acknowledge steps.
        self._timed_steps[self._steps] = time.monotonic(), tokens
        return self._steps

    def handle_acks(self, acks: CornplugKVWorkerMetadata) -> None:
        """Record the measurements in the workers' acknowledgements."""
        for number in acks.timed_steps:
            began, tokens = self._timed_steps.pop(number, (0.0, 0))
            # Steps may be scheduled while other steps run. A step begins to run when the previous step has
            # ended.
            self.rule.record_step(tokens, time.monotonic() - max(began, self._step_ended_s))
        if acks.timed_steps:
            self.page_cost.seconds = self.rule.compute_s(self._page.page_tokens) or 0.0
        if acks.loaded_bytes:
            self._copy_s += acks.loading_s
            self.rule.record_transfer(acks.loaded_bytes, acks.loading_s)
            self._has_new_bytes = True

    def record_step_end(self) -> None:
        """Record that the engine has read the output of a step."""
        self._step_ended_s = time.monotonic()
        if self._has_new_bytes:
            self._has_new_bytes = False
            news = self.rule.speed_report(self._page.page_bytes / self._page.page_tokens)
            if news:
                compat.logger.info("cornplug: %s", news)
