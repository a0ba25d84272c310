"""The KV connector as one of several, made and called by vLLM's own MultiConnector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector import plugin

from ..conftest import open_in
from ..rig import Engine, Request

PROMPT: Final = list(range(150))  # 4 whole pages of 32, and 22 tokens


class NeighbourMoves(KVConnectorMetadata):
    """What the neighbour's worker half does in a step."""

    def __init__(self, loads: list[str], over: list[str]) -> None:
        self.loads, self.over = loads, over


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Another connector: it loads the tokens that a test plans, and keeps the blocks of finished requests."""

    tokens: Final[dict[str, int]] = {}
    """Request -> tokens that it has of it."""
    keeps: Final[set[str]] = set()
    """Requests whose blocks it reads for a step after their end."""

    def __init__(self, config: Any, role: KVConnectorRole, cache: KVCacheConfig) -> None:
        super().__init__(config, role, cache)
        self.loads: list[str] = []
        self.over: list[str] = []
        self.loaded: set[str] = set()
        self.sent: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        more = max(0, self.tokens.get(request.request_id, 0) - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        moves = NeighbourMoves(self.loads, self.over)
        self.loads, self.over = [], []
        return moves

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        kept = request.request_id in self.keeps
        self.over += [request.request_id] * kept
        return kept, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, NeighbourMoves)
        self.loaded, self.sent = set(moves.loads), set(moves.over)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self.sent, self.loaded


class TwoConnectors(Engine):
    """An engine with the neighbour before cornplug, under a name of a connector that vLLM has."""

    name = "NixlConnector"

    def _make_connector(self, config: Any, role: KVConnectorRole, cache: KVCacheConfig) -> Any:
        config = copy.copy(config)
        ours = {
            "kv_connector": "CornplugConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        other = {"kv_connector": self.name, "kv_role": "kv_both"}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [other, ours]},
        )
        multi = MultiConnector(config, role, cache)
        # The rig counts cornplug's figures.
        multi.get_kv_connector_stats = multi.sub_connectors[1].get_kv_connector_stats  # type: ignore[method-assign]
        return multi

    def _config(self, policy: str, context_parallel: int) -> Any:
        config = super()._config(policy, context_parallel)
        config.scheduler_config = type("Any", (), {"disable_hybrid_kv_cache_manager": False})
        return config


class UnknownBeside(TwoConnectors):
    """The same, under a name that cornplug does not know."""

    name = "ExampleConnector"


@pytest.fixture(autouse=True)
def neighbour(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Neighbour]]:
    plugin.register()
    for name in (TwoConnectors.name, UnknownBeside.name):
        monkeypatch.setitem(KVConnectorFactory._registry, name, lambda: Neighbour)
    yield Neighbour
    Neighbour.tokens.clear()
    Neighbour.keeps.clear()


@pytest.fixture
def beside(store: MemoryStore) -> Iterator[Callable[..., Engine]]:
    """Engines with the neighbour."""
    engines: list[Engine] = []

    def make(kind: type[Engine] = TwoConnectors, **options: Any) -> Engine:
        engines.append(kind(store.connect, **options))
        return engines[-1]

    yield make
    for one in engines:
        one.close()


Make = Callable[..., Engine]


def saved(engine: Engine) -> float:
    return engine.counts.get(("saves", "kv_page", "stored"), 0)


def prefix_from_own_cache(engine: Engine, name: str, tokens: int) -> Request:
    """A request of which the engine's own prefix cache holds the first `tokens`, to its end."""
    request = engine.add(name, PROMPT, local_tokens=tokens)
    while request.num_computed_tokens < len(PROMPT):
        engine.step(chunk=40)
    engine.settle()
    return request


@pytest.mark.parametrize("how", [{}, {"tp": 2}, {"second_runner": True}])
def test_kv_connector_beside_another_saves_and_loads(
    beside: Make, store: MemoryStore, how: dict[str, Any]
) -> None:
    first = beside(**how)
    first.finish(first.run("a", PROMPT))
    first.settle()
    assert saved(first) == 4
    second = beside(**how)
    request = second.run("b", PROMPT)
    assert request.external_tokens == 128
    second.finish(request)
    second.settle()
    assert open_in(store) == (0, 0)


def test_kv_connector_beside_loader_gives_its_offer_back(
    beside: Make, store: MemoryStore, neighbour: type[Neighbour]
) -> None:
    """The neighbour is asked first, and has fewer tokens: vLLM takes its."""
    beside().run("a", PROMPT)
    neighbour.tokens["b"] = 64
    second = beside()
    request = second.add("b", PROMPT)
    second.settle()
    assert request.external_tokens == 64
    assert open_in(store) == (0, 0)


def test_kv_connector_beside_loader_saves_none_of_its_tokens(
    beside: Make, engine: Make, neighbour: type[Neighbour]
) -> None:
    neighbour.tokens["a"] = 64
    first = beside()
    first.add("a", PROMPT)
    first.settle()
    assert saved(first) == 0
    assert engine().run("b", PROMPT).external_tokens == 0


def test_kv_connector_preempted_request_that_other_resumes_is_not_saved(
    beside: Make, neighbour: type[Neighbour]
) -> None:
    """Its KV before the preemption was this engine's; what it has now is not."""
    first = beside()
    request = first.add("a", PROMPT)
    first.step(chunk=31)
    first.preempt(request)
    neighbour.tokens["a"] = 16
    first.settle()
    assert request.external_tokens == 16
    assert saved(first) == 0


@pytest.mark.parametrize("both", [True, False])
def test_kv_connector_blocks_that_two_connectors_read_are_freed_once(
    beside: Make, neighbour: type[Neighbour], both: bool
) -> None:
    neighbour.keeps.add("a")
    one = beside()
    free = len(one.free_blocks)
    request = one.add("a", PROMPT)
    if not both:
        one.settle()
    else:
        one.step()  # its saves are open
    one.finish(request)
    one.settle()
    assert len(one.free_blocks) == free


def test_kv_connector_prefix_cache_of_prefill_server_is_saved(beside: Make) -> None:
    """A prefill server's NIXL loads nothing: its own prefix cache holds what it computed."""
    first = beside()
    prefix_from_own_cache(first, "a", 64)
    assert saved(first) == 4


def test_kv_connector_prefix_cache_after_load_of_other_is_not_saved(
    beside: Make, neighbour: type[Neighbour]
) -> None:
    neighbour.tokens["a"] = 64
    first = beside()
    first.add("a", PROMPT)
    first.settle()
    prefix_from_own_cache(first, "b", 64)
    assert saved(first) == 0


def test_kv_connector_prefix_cache_beside_unknown_connector_is_not_saved(beside: Make) -> None:
    first = beside(UnknownBeside)
    prefix_from_own_cache(first, "a", 64)
    assert saved(first) == 0
