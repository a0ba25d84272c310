"""Saves prompts of finished requests while an SGLang server is idle.

With `engine.save = "second"`, a page is not saved at its first use. A prompt that one app sent once would
then be computed again for another app. While a server is idle, it backs up these prompts in the same way as
SGLang does at their second request, one prompt at a time. It stops when the store has no free capacity, so no
page is evicted for these prompts.

    a request finishes ──> its key in SGLang's tree is remembered
    the server idles for 50 ms ──> the newest prompt's pages that are still on the device are copied to the
                                   host pool, and from there to the store
    a flush, or a release of memory ──> waits for the copy in progress, because SGLang must be idle

All ranks of a tensor-parallel group copy in the same turn of the scheduler's loop. The ranks run their turns
in lockstep and vote on each copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

_IDLE_DELAY_S: Final = 0.05
"""Seconds without a batch before the first copy, so that no copy begins in a short pause."""
_TURNS_PER_VOTE: Final = 8
"""Number of idle turns between two votes of a group's ranks. SGLang synchronizes the ranks several times per
turn, which takes 30 ms if there are more ranks than cores."""
_NOT_YET: Final = -1


class IdleBackups:
    """Backs up prompts of one rank while the server is idle. Used by the scheduler's thread.

    Args:
        free_tokens: returns the number of tokens that fit into the store without an eviction, 0 if nothing
            should be saved, or None if the store does not reply.
        max_tokens: maximum total number of tokens of the remembered prompts. Usually the size of the device
            pool.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        free_tokens: Callable[[], int | None],
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free_tokens, self._max_tokens, self._clock = free_tokens, max_tokens, clock
        self._finished: deque[RadixKey] = deque()
        """Keys of finished requests, oldest first."""
        self._tokens = 0
        """Number of tokens in `_finished`."""
        self._idle_since: float | None = None
        self._store_failed = False
        """Whether the store has failed to reply during this idle period."""
        self._turns = 0

    def remember(self, key: RadixKey) -> None:
        """Remember the key of a finished request whose pages are in SGLang's tree."""
        self._finished.append(key)
        self._tokens += len(key)
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._finished.popleft())

    def run_turn(self, scheduler: Any) -> None:
        """Begin a copy if it is due. Called in each idle turn of the scheduler's loop."""
        if not self._finished:
            return
        cache = scheduler.tree_cache
        self._turns += 1
        if cache.tp_world_size > 1:
            # A server that sleeps between turns has one turn per second, so it votes in each turn. Eight
            # turns would take longer than most pauses.
            if self._turns % _TURNS_PER_VOTE and not scheduler.server_args.sleep_on_idle:
                return
            vote = torch.tensor([self._copy_limit(scheduler)], dtype=torch.int64)
            cache._all_reduce(vote, torch.distributed.ReduceOp.MIN)
            max_tokens = int(vote.item())
        else:
            max_tokens = self._copy_limit(scheduler)
        if max_tokens == 0:
            self._finished.clear()
            self._tokens = 0
        elif max_tokens > 0:
            self._back_up(cache, max_tokens)

    def record_batch(self) -> None:
        """Record that a batch has run, so the server was not idle."""
        self._idle_since, self._store_failed = None, False

    def _copy_limit(self, scheduler: Any) -> int:
        """Return the maximum number of tokens to copy now.

        The result is `_NOT_YET` if the server has other work, became idle only recently, or if the store did
        not reply.
        """
        if not scheduler.is_fully_idle():
            return _NOT_YET
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if self._store_failed or now - self._idle_since < _IDLE_DELAY_S:
            return _NOT_YET
        free = self._free_tokens()
        # If the store does not reply, retry only in the next idle period, because the scheduler's thread
        # waits for each reply.
        self._store_failed = free is None
        return _NOT_YET if free is None else free

    def _back_up(self, cache: Any, max_tokens: int) -> None:
        """Let SGLang copy the newest prompt that is only on the device and has at most `max_tokens`
        tokens."""
        tree = cache.tree_core
        while self._finished:
            key = self._finished.pop()
            self._tokens -= len(key)
            _, node, path_tokens = tree.match_full_device_prefix(key)
            if tree.is_root(node) or tree.is_backuped(node) or path_tokens > max_tokens:
                continue
            # As at a node's second hit, SGLang also copies the node's ancestors if they have no copy.
            cache._execute_and_commit_kv_backup(tree.build_backup_kv_action(node))
            return
