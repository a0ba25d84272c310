"""What every test stands on: settings of its own, short socket paths, marks by folder."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import support_results
from time_limits import TimeLimits

import devkit.engines_in_use
import devkit.processes  # notes the environment before a test imports an engine, which changes it
from cornplug.config import StoreConfig
from cornplug.host import has_gpu
from cornplug.store.client import PoolStore

# The two engines pin other versions of the same libraries: each has an environment of its own.
collect_ignore = [
    folder
    for folder, engine in (("vllm_connector", "vllm"), ("sglang_hooks", "sglang"))
    if importlib.util.find_spec(engine) is None
]
# The profile `ci` with other examples in each run, for script/test-more. A failed example is kept in
# .hypothesis, so the second try runs it again.
hypothesis.settings.register_profile(
    "random",
    hypothesis.settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
gc.disable()
_TESTS = Path(__file__).parent
_ENGINE_TEST_S = 900
_results: list[support_results.Result] = []


def pytest_configure() -> None:
    """A cancelled CI job ends by SIGTERM: unwind then, so that no engine is left running."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder and fixture, give engines time, skip GPU tests without a GPU; long tests come first."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder == "integration":
            item.add_marker("more")
        if "within" in getattr(item, "fixturenames", ()):
            item.add_marker("timed")
        slow = folder == "promises" or item.get_closest_marker("more") is not None
        if slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_ENGINE_TEST_S))
        if item.get_closest_marker("gpu") is not None and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Leave imported modules out of garbage collections.

    Engines and torch are half a million objects, and a full collection that visits them takes half a second.
    """
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the tables that tests have recorded (`record_property("table", ...)`)."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "table" and report.when == "call":
                    terminalreporter.write_line(f"\n{report.nodeid}\n{value}")


def pytest_runtest_logstart() -> None:
    """Forget the engines of the test before."""
    devkit.engines_in_use.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a test's results to its report, which xdist carries to the process that keeps them."""
    report = yield
    if support_results.wanted():
        found = support_results.results_of_report(item, report)
        report.user_properties += [(support_results.PROPERTY, list(result)) for result in found]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect results."""
    for name, value in report.user_properties:
        if name == support_results.PROPERTY:
            _results.append(support_results.Result(*value))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep results of this run; a worker of xdist leaves that to its leader."""
    if _results and not hasattr(session.config, "workerinput"):
        support_results.keep(_results)


@pytest.fixture(scope="session", autouse=True)
def own_settings() -> Iterator[Path]:
    """No test reads this user's settings, secret, sockets or fingerprint cache."""
    home = Path(tempfile.mkdtemp(prefix="cornplug-"))
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("CORNPLUG_"):
                patch.delenv(name)
        patch.setenv("CORNPLUG_RUNTIME_DIR", str(home / "run"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        (home / "run").mkdir(mode=0o700)
        _keep_model_infos(home / "cache")
        yield home
    shutil.rmtree(home, ignore_errors=True)


def _keep_model_infos(cache: Path) -> None:
    """Keep vLLM's descriptions of its model classes from run to run: each costs it a process of ten seconds.

    vLLM compares them with the classes' sources.
    """
    kept = Path(__file__).parents[1] / ".cache" / "vllm-modelinfos" / Path(sys.prefix).name
    kept.mkdir(parents=True, exist_ok=True)
    (cache / "vllm").mkdir(parents=True)
    (cache / "vllm" / "modelinfos").symlink_to(kept)


class LoggedStore:
    """A real daemon with an access log, and a client of it."""

    def __init__(self, folder: Path) -> None:
        config = StoreConfig(socket=folder / "s.sock", secret_file=folder / "secret", autostart=False)
        self._log = folder / "puts.jsonl"
        self._daemon = devkit.processes.StoreProcess(
            config.socket,
            "--secret-file",
            str(config.secret_file),
            env={"CORNPLUG_STORE_ACCESS_LOG": str(self._log)},
        )
        self._daemon.start()
        self.client = PoolStore(config, connect_timeout_s=20)
        devkit.processes.wait_until(lambda: self.client.is_connected, deadline_s=30, what="a connection")

    def costs(self) -> list[float]:
        """Seconds of recomputation of each entry, as the daemon has them, in the order of writing.

        Ends the daemon, which then writes its log."""
        self.close()
        calls = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [cost_s for call in calls if call["op"] == "put" for _, _, cost_s in call["entries"]]

    def close(self) -> None:
        """End client and daemon."""
        self.client.close()
        self._daemon.stop()


@pytest.fixture
def logged_store(short_path: Path) -> Iterator[LoggedStore]:
    """A store of which a test reads what the daemon was told of each entry."""
    made = LoggedStore(short_path)
    yield made
    made.close()


@pytest.fixture
def within() -> TimeLimits:
    """Upper bounds on durations; script/test-more checks them (tests/time_limits.py)."""
    return TimeLimits.from_environment()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name: those end at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="cp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
