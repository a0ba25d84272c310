"""When an idle server copies, and what. With SGLang's own tree: `tests/integration/test_save_policies.py`."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from cornplug.sglang_hooks.kv.idle_backups import IdleBackups


class Tree:
    """Of SGLang's tree, what the copies ask: a node is its prompt's first token, 0 the root."""

    def __init__(self) -> None:
        self.backed: list[int] = []
        self.evicted: set[int] = set()

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        first = key.token_ids[0]
        return (0, 0, 0) if first in self.evicted else (len(key), first, len(key))

    def is_root(self, node: int) -> bool:
        return node == 0

    def is_backuped(self, node: int) -> bool:
        return node in self.backed

    def build_backup_kv_action(self, node: int) -> int:
        return node


class Server:
    """A scheduler and its cache, with a clock that the test moves."""

    def __init__(self, *, free_tokens: int = 10_000, most_tokens: int = 10_000, ranks: int = 1) -> None:
        self.now_s, self.busy = 100.0, False
        self.free_tokens: int | None = free_tokens
        self.questions = 0
        self.other_votes: list[int] = []
        self.tree = Tree()
        self.idle = IdleBackups(self._free_tokens, most_tokens, lambda: self.now_s)
        self.cache = SimpleNamespace(
            tree_core=self.tree,
            tp_world_size=ranks,
            _all_reduce=self._reduce,
            _execute_and_commit_kv_backup=self.tree.backed.append,
        )
        self.scheduler = SimpleNamespace(
            tree_cache=self.cache,
            is_fully_idle=lambda: not self.busy,
            server_args=SimpleNamespace(sleep_on_idle=False),
        )
        self.votes = 0

    def _free_tokens(self) -> int | None:
        self.questions += 1
        return self.free_tokens

    def _reduce(self, vote: torch.Tensor, _op: Any) -> None:
        self.votes += 1
        vote[0] = min([int(vote), *self.other_votes])

    def finish(self, first: int, tokens: int = 64) -> None:
        self.idle.remember(RadixKey(array("q", [first] * tokens)))

    def idles(self, seconds: float, turns: int = 2) -> list[int]:
        """Prompts that have a copy after so many turns over `seconds`."""
        for _ in range(turns):
            self.idle.run_turn(self.scheduler)
            self.now_s += seconds / (turns - 1)
        return self.tree.backed


def test_idle_backups_short_pause_copies_nothing() -> None:
    server = Server()
    server.finish(1)
    assert server.idles(0.04) == []
    server.idle.record_batch()
    assert server.idles(0.04) == []
    assert server.idles(0.1, turns=3) == [1]


def test_idle_backups_busy_server_copies_nothing() -> None:
    server = Server()
    server.finish(1)
    server.busy = True
    assert server.idles(1, turns=9) == []


def test_idle_backups_newest_prompt_comes_first_and_each_once() -> None:
    server = Server()
    for first in (1, 2, 3):
        server.finish(first)
    assert server.idles(1, turns=20) == [3, 2, 1]


def test_idle_backups_prompt_without_a_device_copy_is_left_out() -> None:
    server = Server()
    for first in (1, 2, 3):
        server.finish(first)
    server.tree.evicted.add(3)
    server.tree.backed.append(2)
    assert server.idles(1, turns=20) == [2, 1]


@pytest.mark.parametrize(("free_tokens", "copied"), [(63, []), (64, [1]), (0, [])])
def test_idle_backups_prompt_larger_than_free_room_is_left_out(free_tokens: int, copied: list[int]) -> None:
    server = Server(free_tokens=free_tokens)
    server.finish(1)
    assert server.idles(1, turns=9) == copied


def test_idle_backups_without_room_forget_their_prompts() -> None:
    """Else every idle turn would ask a full store."""
    server = Server(free_tokens=0)
    server.finish(1)
    server.idles(1)
    server.free_tokens = 10_000
    assert server.idles(1, turns=9) == []


def test_idle_backups_store_that_answers_late_is_asked_in_the_next_pause() -> None:
    """Once a pause: the scheduler's thread waits for each question."""
    server = Server()
    server.finish(1)
    server.free_tokens = None
    assert server.idles(1, turns=9) == []
    assert server.questions == 1
    server.free_tokens = 10_000
    server.idle.record_batch()
    assert server.idles(1, turns=9) == [1]


def test_idle_backups_remember_as_many_tokens_as_the_device_holds() -> None:
    server = Server(most_tokens=130)
    for first in (1, 2, 3):
        server.finish(first)
    assert server.idles(1, turns=20) == [3, 2]


def test_idle_backups_ranks_copy_in_one_turn() -> None:
    server = Server(ranks=2)
    server.finish(1)
    server.other_votes = [-1]
    assert server.idles(1, turns=3 * 8) == []
    server.other_votes = [10_000]
    assert server.idles(1, turns=8) == [1]
    assert server.votes == 4


def test_idle_backups_ranks_that_sleep_between_turns_copy_in_the_second() -> None:
    """SGLang sleeps a second a turn with --sleep-on-idle: requests would come before an eighth turn."""
    server = Server(ranks=2)
    server.scheduler.server_args.sleep_on_idle = True
    server.other_votes = [10_000]
    server.finish(1)
    assert server.idles(1, turns=2) == [1]
    assert server.votes == 2
