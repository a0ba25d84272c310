"""Beside other connectors only what was computed here is saved as computed here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv import page_keys
from cornplug.vllm_connector.kv.page_keys import OwnTokens

from ..rig import Engine
from ..wrapped import wrapper_of

make_several = wrapper_of(page_keys, "MultiConnector.__init__")

Make = Callable[..., Engine]
PROMPT = [7 * i for i in range(150)]


def multi(children: int) -> Any:
    extra = {"connectors": [{"kv_connector": f"C{i}"} for i in range(children)]}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )


@pytest.fixture
def beside(engine: Make) -> Make:
    """An engine whose connector vLLM's MultiConnector makes, with another beside it."""

    def make(**options: Any) -> Engine:
        made: list[Engine] = []
        make_several(lambda *_: made.append(engine(**options)), None, multi(2))
        return made[0]

    return make


def saved(engine: Engine) -> float:
    return engine.counts.get(("saves", "kv_page", "stored"), 0)


def test_others_load_is_true_beside_another_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (module, name, wrapper), _ = page_keys.WRAPS
    monkeypatch.setattr(MultiConnector, "__init__", MultiConnector.__init__)
    compat.wrap(module, name, wrapper)
    seen: list[bool] = []
    monkeypatch.setattr(
        MultiConnector,
        "_get_connector_classes_and_configs",
        classmethod(lambda *_: seen.append(page_keys.has_other_connectors()) or []),
    )
    monkeypatch.setattr(MultiConnector, "all_children_support_hma", classmethod(lambda *_: True))
    for children in (1, 2):
        MultiConnector(multi(children), SimpleNamespace(), None)  # type: ignore[arg-type]
    assert seen == [False, True]
    assert not page_keys.has_other_connectors()


def test_provenance_computed_tokens_are_saved(beside: Make, engine: Make) -> None:
    first = beside()
    first.run("a", PROMPT)
    assert saved(first) == 4
    second = engine()
    assert second.run("b", PROMPT).external_tokens == 128


@pytest.mark.parametrize("given", [32, 64, 128])
def test_provenance_tokens_of_other_connector_are_not_saved(beside: Make, given: int) -> None:
    """As NIXL's pages, under whatever name: they come as tokens that are computed already."""
    first = beside()
    request = first.add("a", PROMPT, local_tokens=given)
    while request.num_computed_tokens < len(PROMPT):
        first.step(chunk=40)
    first.settle()
    assert saved(first) == 0


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor", "a later one"])
def test_provenance_hit_of_weak_hash_is_not_saved(engine: Make, algo: str) -> None:
    """The blocks may be those of another prompt whose hash collides."""
    first = engine(hash_algo=algo)
    request = first.add("a", PROMPT, local_tokens=64)
    while request.num_computed_tokens < len(PROMPT):
        first.step(chunk=40)
    first.settle()
    assert saved(first) == 0
    first.run("b", [token + 1 for token in PROMPT])
    assert saved(first) == 4, "what this engine computed"


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor"])
def test_provenance_local_prefix_without_others_is_saved(engine: Make, algo: str) -> None:
    first = engine(hash_algo=algo)
    request = first.add("a", PROMPT, local_tokens=64)
    while request.num_computed_tokens < len(PROMPT):
        first.step(chunk=40)
    first.settle()
    assert saved(first) == 4


def test_provenance_tokens_after_own_load_are_saved(beside: Make) -> None:
    beside().run("a", PROMPT[:100])
    second = beside()
    request = second.run("b", PROMPT)
    assert request.external_tokens == 96
    assert saved(second) == 1


def test_provenance_tokens_after_preemption_are_judged_anew(beside: Make) -> None:
    first = beside()
    request = first.add("a", PROMPT)
    first.step(chunk=40)
    first.preempt(request)
    request.local_tokens = 96  # more than was computed here: another connector had it
    while request.num_computed_tokens < len(PROMPT):
        first.step(chunk=40)
    first.settle()
    assert saved(first) <= 1  # the page before, where the preemption did not end its saving


def test_own_tokens_end_at_first_gap() -> None:
    own = OwnTokens()
    assert own.extend(0, 40) == 40
    assert own.extend(40, 80) == 80
    assert own.extend(0, 16) == 16  # again, after a preemption
    assert own.extend(96, 128) == 80  # a gap: somebody else's
    assert own.extend(128, 160) == 80
