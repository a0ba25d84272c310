"""Caches that a model's layers register beside those of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.groups_worker import GroupsWorker

NAMES = (["model.layers.0.attn"], ["model.layers.1.attn"])
READER = "model.layers.2.attn"


class Recorder:
    """A worker half of one group: what it was told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refused = ""

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        self.names = list(caches)

    def report_unusable(self, error: LayoutError) -> None:
        self.refused = error.reason


def registered(caches: Mapping[str, torch.Tensor], **target: str) -> list[Recorder]:
    """The worker halves of two groups, after the layer `READER` came with these fields."""
    workers: Any = [Recorder(), Recorder()]
    GroupsWorker(workers, NAMES).register(caches, {READER: SimpleNamespace(**target)})
    found: list[Recorder] = workers
    return found


def own() -> dict[str, torch.Tensor]:
    """A cache for each layer of the groups."""
    return {name: torch.zeros(4, 2) for names in NAMES for name in names}


def test_groups_worker_leaves_out_a_layer_that_reads_anothers_cache() -> None:
    caches = own()
    caches[READER] = caches[NAMES[1][0]]
    workers = registered(caches, kv_sharing_target_layer_name=NAMES[1][0])
    assert [(worker.names, worker.refused) for worker in workers] == [(NAMES[0], ""), (NAMES[1], "")]


@pytest.mark.parametrize(
    ("added", "target"),
    [
        ({READER: torch.zeros(4, 2)}, {"kv_sharing_target_layer_name": NAMES[1][0]}),
        ({READER: torch.zeros(4, 2)}, {"kv_sharing_target_layer_name": None}),
        ({READER: torch.zeros(4, 2)}, {"kv_sharing_target_layer_name": "model.layers.9.attn"}),
        ({READER: torch.zeros(4, 2)}, {}),
    ],
    ids=["a cache of its own", "no other layer", "a layer of no group", "another kind of layer"],
)
def test_groups_worker_refuses_a_cache_of_no_group(
    added: Mapping[str, torch.Tensor], target: dict[str, Any]
) -> None:
    assert [worker.refused for worker in registered({**own(), **added}, **target)] == ["layout", "layout"]


def test_groups_worker_refuses_a_group_without_its_cache() -> None:
    caches = own()
    del caches[NAMES[0][0]]
    assert [worker.refused for worker in registered(caches)] == ["layout", "layout"]
