"""The demo's own judgement: it must be able to fail, and to clean up. Its engines are not started here."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from example_modules import example_modules

from cornplug.config import EncoderConfig, StoreConfig
from devkit.engines import Answer, wait_until

FOLDER = Path(__file__).parents[1] / "examples" / "two_apps_one_encoder"


class Demo(NamedTuple):
    host: ModuleType
    ledger: ModuleType
    questions: ModuleType
    checkpoints: ModuleType


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Demo]:
    with example_modules(monkeypatch, FOLDER, Demo._fields) as modules:
        yield Demo(*modules)


def answer(**changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "text": "a",
        "token_ids": tuple(range(16)),
        "logprobs": (-1.0,) * 16,
        "prompt_tokens": 900,
        "finish_reason": "length",
        "ttft_s": 1.0,
        "total_s": 2.0,
        "top_logprobs": ((-1.0, -2.0, -3.0, -4.0, -5.0),) * 16,
    }
    return Answer(**{**fields, **changes})


def rows(demo: Demo, **changes: Any) -> list[Any]:
    """Every request of the demo, as if the service had run each tower once; the last row changed."""
    app = demo.checkpoints.App
    apps = demo.checkpoints.Apps(
        **{name: app(name=name, model=Path(name)) for name in ("helpdesk", "catalogue", "archive")}
    )
    seen: set[tuple[bool, str]] = set()
    made = []
    for request in (r for sitting in demo.questions.sittings(apps) for r in sitting.requests):
        image = (request.act == demo.questions.OTHER_FAMILY, request.image.name)
        made.append(
            demo.ledger.Row(
                request=request,
                answer=answer(ttft_s=0.5),
                stock=answer(),
                embedding="store",
                service_passes=int(image not in seen),
                engine_passes=0,
                kv_own=0,
                kv_store=64,
            )
        )
        seen.add(image)
    made[-1] = dataclasses.replace(made[-1], **changes)
    return made


def ledger(demo: Demo, monkeypatch: pytest.MonkeyPatch, passes: int = 8, **changes: Any) -> Any:
    """A ledger with these rows, beside an encoder that counted two passes in the warm-up."""
    monkeypatch.setattr(demo.ledger.Ledger, "tower_passes", lambda self: passes)
    made = demo.ledger.Ledger("http://127.0.0.1:9")
    made.rows, made.warm_up_passes = rows(demo, **changes), 2
    return made


def test_demo_run_that_went_well_has_no_fault(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ledger(demo, monkeypatch)
    assert good.faults() == []
    assert (good.passes, good.distinct) == (6, 6)
    assert good.saved_s == pytest.approx(0.5 * len(good.rows))


CLOSE = ((-1.00005, -2.0, -3.0, -4.0, -5.0),) * 16
FAR = ((-1.0, -2.0, -3.0, -4.0, -5.0),) * 15 + ((-1.0, -2.0, -3.0, -4.0, -5.001),)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"answer": answer(token_ids=(*range(15), 99))}, "another answer than stock's"),
        ({"answer": answer(top_logprobs=FAR)}, "another answer than stock's"),
        ({"answer": answer(top_logprobs=())}, "another answer than stock's"),
        ({"embedding": "?"}, "no counter says whence"),
        ({"engine_passes": 1}, "7 tower passes for 6 distinct images"),
        ({"service_passes": 1}, "7 tower passes for 6 distinct images"),
    ],
)
def test_demo_each_broken_promise_is_a_fault(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], fault: str
) -> None:
    assert any(fault in line for line in ledger(demo, monkeypatch, **changes).faults())


def test_passes_that_no_request_asked_for_are_a_fault(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("no request asked for" in fault for fault in ledger(demo, monkeypatch, passes=9).faults())


def test_demo_log_probabilities_within_tolerance_are_the_same(demo: Demo) -> None:
    assert demo.ledger.same_output(answer(top_logprobs=CLOSE), answer())


def test_kv_that_a_fresh_engine_had_to_compute_is_a_fault(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ledger(demo, monkeypatch)
    bad.rows = [dataclasses.replace(row, kv_store=0) for row in bad.rows]
    assert any("the store should have had" in fault for fault in bad.faults())


def test_warm_up_shares_nothing_with_what_is_counted(demo: Demo) -> None:
    questions = demo.questions
    counted = {*questions.IMAGES, *questions.ARCHIVED}
    assert counted.isdisjoint(questions.WARM_UP)
    assert questions.PREAMBLE[:16] != questions.WARM_UP_PREAMBLE[:16]


def test_demo_every_process_of_the_folder_is_ended(demo: Demo, tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    marked = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    ours = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=marked),
        subprocess.Popen([sys.executable, "-c", stubborn, str(tmp_path)], start_new_session=True),
    ]
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        wait_until(lambda: len(demo.host._carrying(os.fsencode(tmp_path))) == 2, deadline_s=60, what="both")
        demo.host.end_all(tmp_path)
        assert [process.wait(5) != 0 for process in ours] == [True, True]
        assert other.poll() is None
    finally:
        for process in (*ours, other):
            process.kill()
            process.wait(5)


def test_demo_store_socket_is_where_engines_start_it(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's name has the protocol's number in it: the demo once asked at an older one."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = signal.getsignal(signal.SIGTERM)
    with demo.host.Host() as host:
        assert StoreConfig().socket == host.store_socket
        assert EncoderConfig().socket == host.encoder_socket
    assert signal.getsignal(signal.SIGTERM) == before  # all processes of later tests would ignore it
