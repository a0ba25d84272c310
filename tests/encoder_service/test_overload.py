"""Three times a tower's capacity, from three apps: guarantees are kept, the rest is refused at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Self

import pytest
import torch

from cornplug import identity
from cornplug.config import QosConfig
from cornplug.encoder_service.batcher import EncodeResult
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.executor import BatchResult, EncodeBatch
from cornplug.encoder_service.formats.messages import EncodeRefusal, EncodeReply, EncodeRequest
from cornplug.encoder_service.model_registry import LoadedModel
from cornplug.qos import QosClasses

from .conftest import SECRET, MakeEncoder, Requests

PASS_S, ITEM_S, MAX_ITEMS = 0.01, 0.02, 4
CAPACITY = MAX_ITEMS / (PASS_S + MAX_ITEMS * ITEM_S)
"""Items a second."""
SECONDS = 5.0
CLASSES = QosClasses(
    QosConfig.model_validate(
        {
            "default": "bulk",
            "classes": {
                "premium": {"share": 0.5, "priority": 10, "apps": ["checkout"]},
                "standard": {"share": 0.25, "apps": ["search"]},
                "bulk": {"share": 0.15, "priority": -1},
            },
        }
    )
)
OFFERED = {"checkout": (0.4, 1.0), "search": (1.6, 1.3), "albums": (1.0, 2.0)}
"""By app: load as a part of capacity, deadline in seconds."""


class StandIn:
    """An executor of known speed, which computes nothing. It makes up for a busy machine's oversleeping."""

    lanes = 1

    def __init__(self) -> None:
        self.passes: list[tuple[int, float]] = []
        self._behind_s = 0.0

    def is_ready(self) -> bool:
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        return True

    def load(self, models: Sequence[LoadedModel]) -> None: ...

    def unload(self, models: Sequence[LoadedModel]) -> None: ...

    def close(self) -> None: ...

    def run(self, task: EncodeBatch) -> BatchResult:
        began = time.monotonic()
        due_s = PASS_S + ITEM_S * len(task.items)
        time.sleep(max(0.0, due_s - self._behind_s))
        took_s = time.monotonic() - began
        self._behind_s = max(0.0, self._behind_s + took_s - due_s)
        self.passes.append((len(task.items), took_s))
        return BatchResult(features={}, embeddings=tuple(torch.zeros(1, 4) for _ in task.targets))


@dataclass
class Asked:
    """One request, and its outcome."""

    app: str
    deadline_s: float
    sent_s: float
    answer: EncodeReply | EncodeRefusal | None = None
    seconds: float = 0.0

    @property
    def in_time(self) -> bool:
        return isinstance(self.answer, EncodeReply) and self.seconds <= self.deadline_s

    @property
    def accepted(self) -> bool:
        """Not refused at arrival: an admitted request that is late counts as missed."""
        return not (
            isinstance(self.answer, EncodeRefusal) and self.answer.reason in ("overloaded", "over_share")
        )


def arrivals(seed: int) -> Iterator[tuple[float, str, float]]:
    """(when, app, deadline): Poisson, all apps together in order."""
    draw = random.Random(seed)
    come = []
    for app, (load, deadline_s) in OFFERED.items():
        at = 0.0
        while (at := at + draw.expovariate(load * CAPACITY)) < SECONDS:
            come.append((at, app, deadline_s))
    return iter(sorted(come))


class Storm:
    """Sends the requests of `arrivals`, and keeps their outcomes."""

    def __init__(self, encoder: EncoderCore, request: Callable[..., EncodeRequest]) -> None:
        self._encoder = encoder
        self._request = request
        self._left = threading.Semaphore(0)
        self._futures: list[Future[EncodeResult]] = []
        self.asked: list[Asked] = []

    def ask(self, app: str, deadline_s: float) -> None:
        """One new medium."""
        salt = str(len(self.asked))
        request = self._request(cache_salt=salt, app=app, deadline_s=deadline_s)
        one = Asked(app, deadline_s, time.monotonic())
        self.asked.append(one)
        future = self._encoder.submit(request)
        self._futures.append(future)

        def done(_: Future[EncodeResult]) -> None:
            one.seconds = time.monotonic() - one.sent_s
            self._left.release()

        future.add_done_callback(done)

    def collect(self) -> list[Asked]:
        """Wait for the answers of all that was asked since the last time."""
        asked, self.asked = self.asked, []
        futures, self._futures = self._futures, []
        for one, future in zip(asked, futures, strict=True):
            assert self._left.acquire(timeout=30)
            one.answer = future.result(30)
        return asked


class Pauses:
    """Notes how long the machine kept a thread of this process from running."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        before = time.monotonic()
        while not self._done.wait(0.005):
            now = time.monotonic()
            self.longest_s, before = max(self.longest_s, now - before), now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.more
def test_encoder_at_triple_load_keeps_class_guarantees(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    """Again, up to three times, where the machine stood still for longer than a pass takes."""
    for attempt in range(3):
        with Pauses() as pauses:
            try:
                return keeps_class_guarantees(make_encoder, request_for, llava_pair)
            except AssertionError:
                if attempt == 2 or pauses.longest_s < PASS_S + MAX_ITEMS * ITEM_S:
                    raise


def keeps_class_guarantees(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    tower = StandIn()
    encoder = make_encoder(executors=[tower], classes=CLASSES, max_batch_items=MAX_ITEMS)
    identity_ = request_for(llava_pair[0], 1).identity

    def request(**fields: Any) -> EncodeRequest:
        key = identity.embedding_key(
            SECRET, identity_, bytes(32), f"{len(tower.passes)}-{fields['cache_salt']}"
        )
        return request_for(llava_pair[0], 1, key=key, **fields)

    storm = Storm(encoder, request)
    for _ in range(6):  # so that a pass has been measured
        storm.ask("checkout", 5.0)
    assert all(one.in_time for one in storm.collect())
    tower.passes.clear()
    began = time.monotonic()
    for at, app, deadline_s in arrivals(1):
        time.sleep(max(0.0, began + at - time.monotonic()))
        storm.ask(app, deadline_s)
    asked = storm.collect()

    by_app = {app: [one for one in asked if one.app == app] for app in OFFERED}
    premium = by_app["checkout"]
    assert sum(one.in_time for one in premium) >= 0.95 * len(premium)
    for app, mine in by_app.items():
        accepted = [one for one in mine if one.accepted]
        assert len(accepted) >= 5, f"{app} is starved"
        late = sum(not one.in_time for one in accepted)
        assert late <= max(1, 0.05 * len(accepted)), f"{late} of {len(accepted)} of {app} were late"
    # Whatever this machine makes of the stand-in's sleeping is what it can do.
    full = [seconds for items, seconds in tower.passes if items == MAX_ITEMS]
    good = sum(one.in_time and one.sent_s + one.seconds < began + SECONDS for one in asked)
    assert good / SECONDS >= 0.88 * MAX_ITEMS / mean(full)
    refused = [one for one in asked if isinstance(one.answer, EncodeRefusal)]
    assert len(refused) > len(asked) / 2
    assert median(one.seconds for one in refused) < 0.02
    precheck = [one.answer for one in refused if not one.accepted and isinstance(one.answer, EncodeRefusal)]
    assert all(answer.retry_after_s is not None and 0 < answer.retry_after_s < 5 for answer in precheck)
    assert {answer.reason for answer in precheck} >= {"over_share"}
