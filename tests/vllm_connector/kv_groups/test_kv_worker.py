"""Worker half: which caches it registers with the workers of its groups, and how it reports failed loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.worker import KVWorker

NAMES = (["model.layers.0.attn"], ["model.layers.1.attn"])
READER = "model.layers.2.attn"


class Recorder:
    """Stand-in for the worker of one group. Records its layers, or why they were rejected."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refused = ""

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        self.names = list(caches)

    def report_unusable(self, error: LayoutError) -> None:
        self.refused = error.reason


def registered(
    caches: Mapping[str, torch.Tensor], names: Sequence[Sequence[str]] = NAMES, *, one_stage: bool = True,
    **target: str,
) -> list[Recorder]:  # fmt: skip
    """The workers of these groups, after the layer `READER` was registered with the fields `target`."""
    workers: Any = [Recorder() for _ in names]
    worker = KVWorker(workers, names, allow_shared_caches=one_stage)
    worker.register(caches, {READER: SimpleNamespace(**target)})
    found: list[Recorder] = workers
    return found


def own() -> dict[str, torch.Tensor]:
    """A cache for each layer of the groups."""
    return {name: torch.zeros(4, 2) for names in NAMES for name in names}


def test_layer_that_uses_another_cache_is_left_out() -> None:
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
def test_cache_without_a_group_is_rejected(added: Mapping[str, torch.Tensor], target: dict[str, Any]) -> None:
    assert [worker.refused for worker in registered({**own(), **added}, **target)] == ["layout", "layout"]


def test_group_without_its_cache_is_rejected() -> None:
    caches = own()
    del caches[NAMES[0][0]]
    assert [worker.refused for worker in registered(caches)] == ["layout", "layout"]


def test_one_group_registers_its_caches_in_page_order() -> None:
    """vLLM registers caches in any order, and a shared cache once more under the name of its reader."""
    names = [[name for group in NAMES for name in group]]
    caches = dict(reversed(own().items()))
    caches[READER] = caches[NAMES[0][0]]
    (worker,) = registered(caches, names, kv_sharing_target_layer_name=NAMES[0][0])
    assert (worker.names, worker.refused) == (names[0], "")


def test_pipeline_stage_with_a_shared_cache_is_rejected() -> None:
    """A page has as many layers as the model, and this stage does not write the layer without a cache."""
    names = [[name for group in NAMES for name in group]]
    caches = own()
    caches[READER] = caches[NAMES[0][0]]
    target = NAMES[0][0]
    (worker,) = registered(caches, names, one_stage=False, kv_sharing_target_layer_name=target)
    assert worker.refused == "layout"
