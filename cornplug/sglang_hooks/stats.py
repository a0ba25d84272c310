"""Reports cornplug's counters in SGLang's own `/metrics`, with `--enable-metrics`.

SGLang's processes write their metrics to files in a folder (PROMETHEUS_MULTIPROC_DIR). The process that
serves `/metrics` sums the files. cornplug's counters use the same files. Only the first rank of a
tensor-parallel group writes its counters, so that an event on all ranks is counted once.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Final

from cornplug.metrics import METRICS, WAIT_BUCKETS_S, Tally

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

_MAX_SAMPLES: Final = 4096
"""Maximum number of samples that the tally keeps per histogram. SGLang never drains the tally."""

_lock = threading.Lock()
_counters: dict[str, Counter] = {}
_histograms: dict[str, Histogram] = {}


class ServerTally(Tally):
    """A `Tally` whose counts also appear in the server's `/metrics`."""

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter of the tally, and to the same counter in the server's `/metrics`."""
        super().count(name, *labels, amount=amount)
        if is_shown():
            _counter(name).labels(*labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a sample to a histogram. The tally keeps at most `_MAX_SAMPLES` samples until the next
        drain."""
        self._check_metric(name, labels, "histogram")
        with self._lock:
            samples = self._samples.setdefault((name, labels), [])
            if len(samples) < _MAX_SAMPLES:
                samples.append(value)
        if is_shown():
            _histogram(name).labels(*labels).observe(value)


def is_shown() -> bool:
    """Return whether the server's `/metrics` includes the counts of this process.

    The result is False until SGLang has set the settings and the rank of the process.
    """
    from sglang.srt.runtime_context import publish_role

    role = publish_role()
    return role is not None and _shown(role)


@functools.cache
def _shown(role: str) -> bool:
    from sglang.srt.runtime_context import get_observability, get_parallel

    if not get_observability().enable_metrics:
        return False
    if role != "scheduler":
        return True
    rank = get_parallel()
    return rank.pp_rank == 0 and rank.attn_tp_rank == 0 and rank.attn_cp_rank == 0


def _counter(name: str) -> Counter:
    with _lock:
        if name not in _counters:
            # prometheus_client decides at import whether it writes to files. SGLang sets
            # PROMETHEUS_MULTIPROC_DIR after cornplug's hooks are installed, so import prometheus_client only
            # now.
            from prometheus_client import Counter

            _counters[name] = Counter(name, METRICS[name].help, METRICS[name].labels)
        return _counters[name]


def _histogram(name: str) -> Histogram:
    with _lock:
        if name not in _histograms:
            from prometheus_client import Histogram

            _histograms[name] = Histogram(
                name, METRICS[name].help, METRICS[name].labels, buckets=WAIT_BUCKETS_S
            )
        return _histograms[name]
