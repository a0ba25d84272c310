"""Long passes give way to better classes, and end with their callers, between two layers of a tower."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cornplug.config import load
from cornplug.encoder_service.formats.messages import EncodeRefusal, EncodeReply
from cornplug.encoder_service.model_loader import layers_of
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.towers.base import PassScheduler
from cornplug.qos import QosClasses
from cornplug.store.memory import MemoryStore

from ..conftest import MakeEncoder, Requests, eventually, joined

CLASSES = {
    "premium": {"share": 0.5, "priority": 10, "apps": ["checkout"]},
    "nightly": {"priority": -1},
}


def classes() -> QosClasses:
    return QosClasses(load({"qos.classes": CLASSES, "qos.default": "nightly"}, environ={}).qos)


class LongPass:
    """Makes the next pass of a tower one of very many layers: it repeats a layer until `until` is true."""

    LIMIT_S = 30.0

    def __init__(self, layer: torch.nn.Module) -> None:
        self.until: Callable[[], bool] = lambda: False
        self.entered = threading.Event()
        self.left = threading.Event()
        self.ended_early = False
        self._armed = True
        self._inside = False
        self._hook = layer.register_forward_pre_hook(self._repeat, with_kwargs=True)

    def _repeat(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not self._armed:
            return
        self._armed = False
        self.entered.set()
        end = time.monotonic() + self.LIMIT_S
        try:
            while not self.until() and time.monotonic() < end:
                layer(*args, **kwargs)
        except BaseException:
            self.ended_early = True
            raise
        finally:
            self.left.set()

    def remove(self) -> None:
        self._armed = False
        self._hook.remove()


@pytest.fixture
def long_pass(registry: ModelRegistry, llava_pair: tuple[Path, Path]) -> Iterator[LongPass]:
    loaded = registry.find_by_name(str(llava_pair[0]))
    assert loaded is not None
    made = LongPass(next(iter(layers_of(loaded.tower))))
    yield made
    made.remove()


def test_encoder_better_class_overtakes_a_running_pass(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], long_pass: LongPass
) -> None:
    """Before: a class with a guaranteed share waited until the whole pass of another one was over."""
    encoder = make_encoder(classes=classes())
    order: list[str] = []
    nightly = encoder.submit(request_for(llava_pair[0], 1, app="albums"))
    nightly.add_done_callback(lambda _: order.append("nightly"))
    assert long_pass.entered.wait(30)
    premium = [encoder.submit(request_for(llava_pair[0], seed, app="checkout")) for seed in (2, 3, 4)]
    for one in premium:
        one.add_done_callback(lambda _: order.append("premium"))
    long_pass.until = lambda: all(one.done() for one in premium)
    answers = [one.result(60) for one in (*premium, nightly)]
    assert all(isinstance(answer, EncodeReply) for answer in answers)
    assert order == ["premium"] * 3 + ["nightly"]
    # The paused pass made what it would have made alone.
    again = make_encoder().submit(request_for(llava_pair[0], 1, app="albums")).result(60)
    assert isinstance(again, EncodeReply)
    assert answers[-1].tensor == again.tensor  # type: ignore[union-attr]


def test_tower_turn_wait_of_an_urgent_pass_is_not_a_pause() -> None:
    """Otherwise a tiny medium that waited for a layer of a huge one would make its tower seem slow."""
    now_s = 0.0
    waits = threading.Event()
    measured: list[tuple[float, float]] = []

    def clock() -> float:
        if threading.current_thread() is thread:
            waits.set()
        return now_s

    def urgent() -> None:
        with turns.acquire(urgent=True, share=0.5, is_abandoned=lambda: False) as current:
            measured.append((current.waited_s, current.paused_s))

    turns, thread = PassScheduler(clock), threading.Thread(target=urgent)
    with turns.acquire(urgent=False, share=0.5, is_abandoned=lambda: False) as first:
        thread.start()
        assert waits.wait(30)
        now_s = 7.0
        first.between_layers()
    thread.join(30)
    assert measured == [(7.0, 0.0)]


def test_encoder_urgent_job_behind_a_pass_that_does_not_pause_is_stored(
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    long_pass: LongPass,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cost is the time of its own pass, and not negative, which the store would refuse."""
    monkeypatch.setattr(PassScheduler, "yield_to_urgent", lambda self, current: None)
    encoder = make_encoder(MemoryStore(capacity_bytes=1 << 24).connect(), classes=classes())
    nightly = encoder.submit(request_for(llava_pair[0], 1, app="albums"))
    assert long_pass.entered.wait(30)
    premium = encoder.submit(request_for(llava_pair[0], 2, app="checkout"))
    eventually(lambda: encoder.count_waiting() == 2)
    time.sleep(0.5)
    long_pass.until = lambda: True
    for answer in (nightly.result(60), premium.result(60)):
        assert isinstance(answer, EncodeReply)
        assert answer.stored


def test_encoder_equal_class_does_not_overtake(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], long_pass: LongPass
) -> None:
    encoder = make_encoder(classes=classes())
    first = encoder.submit(request_for(llava_pair[0], 1, app="checkout"))
    assert long_pass.entered.wait(30)
    others = [encoder.submit(request_for(llava_pair[0], 2, app=app)) for app in ("checkout", "albums")]
    eventually(lambda: encoder.count_waiting() == 3)
    assert not any(other.done() for other in others)
    long_pass.until = lambda: True
    assert isinstance(first.result(60), EncodeReply)
    assert all(isinstance(other.result(60), EncodeReply) for other in others)


def test_encoder_paused_pass_keeps_its_share(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], long_pass: LongPass
) -> None:
    """A better class that never stops asking does not starve the pass that it overtook."""
    encoder = make_encoder(classes=classes())
    nightly = encoder.submit(request_for(llava_pair[0], 1, app="albums"))
    assert long_pass.entered.wait(30)
    turns = 0

    def twenty() -> bool:
        nonlocal turns
        turns += 1
        return turns > 20

    long_pass.until = twenty
    asked = 0
    while not nightly.done() and asked < 2000:
        asked += 1
        request = request_for(llava_pair[0], 2, app="checkout", cache_salt=str(asked))
        assert isinstance(encoder.submit(request).result(60), EncodeReply)
    assert isinstance(nightly.result(60), EncodeReply)


def test_encoder_pass_ends_when_its_caller_has_gone(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], long_pass: LongPass
) -> None:
    """Before: the tower computed to the end for a connection that was closed."""
    encoder = make_encoder()
    gone = encoder.submit(request_for(llava_pair[0], 1))
    assert long_pass.entered.wait(30)
    gone.cancel()
    assert long_pass.left.wait(60)
    assert long_pass.ended_early
    assert isinstance(encoder.submit(request_for(llava_pair[0], 2)).result(60), EncodeReply)
    assert encoder.count_waiting() == 0


def test_encoder_pass_goes_on_for_a_joined_caller(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], long_pass: LongPass
) -> None:
    encoder = make_encoder()
    gone = encoder.submit(request_for(llava_pair[0], 1))
    assert long_pass.entered.wait(30)
    stays = encoder.submit(request_for(llava_pair[0], 1))
    eventually(lambda: joined(encoder, 2))
    gone.cancel()
    long_pass.until = lambda: True
    assert isinstance(stays.result(60), EncodeReply)
    assert not long_pass.ended_early


def test_encoder_close_ends_pass_and_refuses_queue(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], long_pass: LongPass
) -> None:
    """Before: it computed its whole queue first, for as long as that took."""
    encoder = make_encoder(max_batch_items=1)
    asked = [encoder.submit(request_for(llava_pair[0], seed)) for seed in range(6)]
    assert long_pass.entered.wait(30)
    assert encoder.close()
    assert long_pass.ended_early
    for one in asked:
        answer = one.result(0)
        assert isinstance(answer, EncodeRefusal)
        assert answer.reason == "overloaded"
    late = encoder.submit(request_for(llava_pair[0], 9)).result(0)
    assert isinstance(late, EncodeRefusal)
    assert encoder.close()
