"""The drill's judgement can fail, and its clients find the other engine. No engine starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest
from example_modules import example_modules
from rich.console import Console

from cornplug.host import free_port
from devkit.processes import wait_until

FOLDER: Final = Path(__file__).parents[1] / "examples" / "fault_drill"


class Drill(NamedTuple):
    clients: ModuleType
    parts: ModuleType
    demo: ModuleType


@pytest.fixture
def drill(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drill]:
    with example_modules(monkeypatch, FOLDER, Drill._fields) as modules:
        yield Drill(*modules)


@contextmanager
def server(status: int, text: str = "") -> Iterator[str]:
    """Address of a server that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """No line for each request."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()


def dead() -> str:
    """An address at which no server listens."""
    return f"http://127.0.0.1:{free_port()}"


def asked(
    drill: Drill, folder: Path, own: str, other: str, until: Callable[[Any], bool], patience_s: float = 60
) -> Any:
    """Clients of two classes, stopped once `until` holds for them."""
    routes = folder / "routes.json"
    routes.write_text(json.dumps({"a/p": {"to": [{"url": own}]}, "b/p": {"to": [{"url": other}]}}))
    clients = drill.clients.PacedClients(routes, pause_s=0.01, patience_s=patience_s)
    clients.start()
    try:
        wait_until(lambda: until(clients), deadline_s=60, what="answers and failures")
    finally:
        clients.stop()
    return clients


def test_fault_drill_request_to_a_dead_engine_goes_to_the_other_one(drill: Drill, tmp_path: Path) -> None:
    def both(clients: Any) -> bool:
        return {answer.elsewhere for answer in clients.answers} == {True, False}

    with server(200) as alive:
        clients = asked(drill, tmp_path, dead(), alive, both)
    assert clients.failures == []
    assert {answer.url for answer in clients.answers} == {alive}


def test_fault_drill_request_that_no_engine_answers_has_failed(drill: Drill, tmp_path: Path) -> None:
    with server(503, "starting") as busy:
        clients = asked(drill, tmp_path, dead(), busy, lambda clients: clients.failures, patience_s=0.3)
    assert clients.answers == []
    assert all("no answer in 0.3 s" in reason for _, reason in clients.failures)


def test_fault_drill_request_that_is_refused_is_not_sent_again(drill: Drill, tmp_path: Path) -> None:
    with server(400, "too long") as refusing, server(200) as alive:
        clients = asked(drill, tmp_path, refusing, alive, lambda clients: clients.failures)
    assert any("a/p: " in reason and "status 400, too long" in reason for _, reason in clients.failures)
    assert not any("b/p: " in reason for _, reason in clients.failures)


def test_fault_drill_pictures_differ_and_are_repeatable(drill: Drill) -> None:
    assert drill.clients.picture(1) == drill.clients.picture(1) != drill.clients.picture(2)


def test_fault_drill_child_is_found_by_its_words_while_it_runs(drill: Drill) -> None:
    mark = f"drill-{os.getpid()}"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", mark, "--port", "1"])
    try:
        began_s = time.monotonic()
        while drill.parts.child(os.getpid(), [mark, "--port"]) is None and time.monotonic() - began_s < 60:
            time.sleep(0.01)
        assert drill.parts.child(os.getpid(), [mark, "--port"]) == process.pid
        assert drill.parts.child(os.getpid(), [mark, "--socket"]) is None
        assert drill.parts.child(1, [mark]) is None
    finally:
        process.kill()
        wait_until(
            lambda: drill.parts.child(os.getpid(), [mark]) is None,
            deadline_s=60,
            what="the end of the child, which no parent has waited for",
        )
        process.wait(60)


def test_fault_drill_metric_is_summed_by_its_labels(drill: Drill) -> None:
    with server(200, '# TYPE n counter\nn_total{outcome="written"} 2\nn_total{outcome="lost"} 3\n') as url:
        assert drill.parts.total(url, "n_total") == 5
        assert drill.parts.total(url, "n_total", outcome="written") == 2
    assert drill.parts.total(dead(), "n_total") == 0


def lost(drill: Drill, *, works: bool, failed: bool = False, answered: bool = True) -> Any:
    """A drill of one part, a process of this test."""
    processes = [subprocess.Popen(["sleep", "60"])]

    class Clients:
        answers: list[Any] = []  # noqa: RUF012
        failures: list[tuple[float, str]] = []  # noqa: RUF012

    def restart() -> None:
        processes[0].wait(60)
        processes.append(subprocess.Popen(["sleep", "60"]))
        if answered:
            Clients.answers.append(drill.clients.AnsweredRequest(time.monotonic(), 0.5, "u", True))
        if failed:
            Clients.failures.append((time.monotonic(), "a/p: late"))

    part = drill.parts.DeploymentPart(
        title="store", pid=lambda: processes[-1].pid, works=lambda _: works, restart=restart
    )
    run = drill.demo.FaultDrill(Clients(), Console(file=StringIO()), time.monotonic(), back_s=0.5)
    try:
        run.lose(part)
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
    assert processes[0].returncode == -9
    return run


def test_fault_drill_part_that_returns_is_a_line_of_the_timeline(drill: Drill) -> None:
    run = lost(drill, works=True)
    assert run.faults() == []
    (line,) = run.losses
    assert (line.title, line.answered, line.elsewhere, line.failed) == ("store", 1, 1, 0)
    assert line.back_s is not None
    assert line.back_s >= line.lost_s
    out = StringIO()
    Console(file=out, width=120).print(drill.demo.table(run.losses))
    assert "store" in out.getvalue()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"works": False}, "store was not back in 0.5 s"),
        ({"works": True, "failed": True}, "request failed: a/p: late"),
        ({"works": True, "answered": False}, "no request was answered while store was lost"),
    ],
)
def test_fault_drill_each_broken_promise_is_a_fault(
    drill: Drill, changes: dict[str, Any], fault: str
) -> None:
    assert lost(drill, **changes).faults() == [fault]
