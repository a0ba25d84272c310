"""Ranks that are processes, over gloo: together, and when one is late or gone."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cornplug.sglang_hooks.kv_ranks import Ranks, RanksApart

STEP_S = 1.0
MARGIN_S = 3.0
"""For a machine under load."""


def _rank(rank: int, rendezvous: str, task: str, answer: Connection) -> None:
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", world_size=2, rank=rank)
    ranks = Ranks(2, rank, step_s=STEP_S if task != "together" else 30.0)
    found: dict[str, Any] = {}
    if task == "together":
        found["message"] = ranks.announce(b"hello" if rank == 0 else b"ignored")
        found["nothing"] = ranks.announce(b"")
        rows = ranks.gather(np.full((2, 3), 2**64 - 1 - rank, np.uint64))
        found["rows"] = [int(row[1, 2]) for row in rows]
        found["agree"] = ranks.agree(True), ranks.agree(rank == 0)
    elif rank == 0:
        for _ in range(2):
            began = time.monotonic()
            try:
                ranks.announce(b"hello")
                ranks.gather(np.zeros(1, np.uint64))
            except RanksApart as e:
                found.setdefault("apart", []).append((e.reason, time.monotonic() - began))
    elif task == "late":
        time.sleep(2 * STEP_S)
        try:
            ranks.announce(b"")
            ranks.gather(np.zeros(1, np.uint64))
        except RanksApart as e:
            found["apart"] = [(e.reason, 0.0)]
    answer.send(found)
    answer.close()
    os._exit(0)


def run(tmp_path: Path, task: str) -> list[dict[str, Any]]:
    # Each imports torch, unless the process that forks them has.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ends, started = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, str(tmp_path / "meet"), task, theirs))
        process.start()
        ends.append(mine)
        started.append(process)
    try:
        answers = [end.recv() if end.poll(60) else {} for end in ends]
    finally:
        for process in started:
            process.join(5)
            process.kill()
    return answers


def test_together(tmp_path: Path) -> None:
    for found in run(tmp_path, "together"):
        assert found == {
            "message": b"hello",
            "nothing": b"",
            "rows": [2**64 - 1, 2**64 - 2],
            "agree": (True, False),
        }


@pytest.mark.parametrize("task", ["gone", "late"])
def test_nobody_waits_for_a_rank_for_ever(tmp_path: Path, task: str) -> None:
    first, second = run(tmp_path, task)
    (reason, waited), (again, no_time) = first["apart"]
    assert reason == again == "ranks"
    assert waited < 2 * STEP_S + MARGIN_S
    assert no_time < 0.1
    if task == "late":
        assert second["apart"][0][0] == "ranks"


def test_one_rank_asks_nobody() -> None:
    alone = Ranks(1, 0)
    assert alone.announce(b"x") == b"x"
    assert alone.agree(True)
    assert not alone.agree(False)
