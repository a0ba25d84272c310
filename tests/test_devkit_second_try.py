"""Second tries: which failed tests of a run are repeated, and what the run then reports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]

# A flaky test fails while its file is absent, and makes it.
TESTS = """
from pathlib import Path
import pytest

def flaky(name):
    mark = Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    assert not first

def test_good(): pass
def test_skipped(): pytest.skip("no reason")
"""
FLAKY = """
@pytest.mark.parametrize("n", {values})
def test_flaky(n): flaky(f"flaky {{n}}")
"""
BAD = "def test_bad(): assert False\n"
FIXTURE = """
@pytest.fixture
def engine(): flaky("engine")
def test_starts(engine): pass
"""


def command(folder: Path, text: str, *args: str) -> tuple[list[str], dict[str, str]]:
    (folder / "test_made.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "devkit.test_runs.second_try", "-q", "-p", "no:cacheprovider", *args]
    return words, {**os.environ, "PYTHONPATH": str(TREE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def second_try(folder: Path, text: str, *args: str) -> tuple[int, list[str]]:
    """(exit status, lines of output) of a run of these tests."""
    words, env = command(folder, text, *args)
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()


def test_second_try_without_failure_repeats_nothing(tmp_path: Path) -> None:
    status, lines = second_try(tmp_path, TESTS)
    assert (status, lines[-1]) == (0, "1 passed, 0 failed, 1 skipped")
    assert not [line for line in lines if "second try" in line]


@pytest.mark.parametrize(
    "args",
    [
        (),
        pytest.param(("-p", "xdist", "-n", "2"), marks=pytest.mark.more),
        pytest.param(("-k", "flaky or good or skipped"), marks=pytest.mark.more),
    ],
    ids=" ".join,
)
def test_second_try_flaky_test_passes_the_run(tmp_path: Path, args: tuple[str, ...]) -> None:
    status, lines = second_try(tmp_path, TESTS + FLAKY.format(values=[1, "two words"]), *args)
    assert (status, lines[-1]) == (0, "3 passed, 0 failed, 1 skipped")
    listed = lines[lines.index("passed on the second try:") + 1 :]
    assert listed[:2] == ["  test_made.py::test_flaky[1]", "  test_made.py::test_flaky[two words]"]


def test_second_try_failed_fixture_counts_as_failed_test(tmp_path: Path) -> None:
    status, lines = second_try(tmp_path, TESTS + FIXTURE)
    assert (status, lines[-1]) == (0, "2 passed, 0 failed, 1 skipped")


def test_second_try_failing_twice_fails_the_run(tmp_path: Path) -> None:
    status, lines = second_try(tmp_path, TESTS + BAD + FLAKY.format(values=[1]))
    assert (status, lines[-1]) == (1, "2 passed, 1 failed, 1 skipped")
    assert lines[lines.index("failed:") + 1] == "  test_made.py::test_bad"
    assert lines[lines.index("passed on the second try:") + 1] == "  test_made.py::test_flaky[1]"


def test_second_try_of_more_than_two_tests_is_refused(tmp_path: Path) -> None:
    status, lines = second_try(tmp_path, TESTS + FLAKY.format(values=[1, 2, 3]))
    assert (status, lines[-1]) == (1, "1 passed, 3 failed, 1 skipped")
    assert "No second try: more than 2 tests failed." in lines


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("import absent_module\n", (), 2),
        ("import absent_module\n", ("--continue-on-collection-errors",), 1),
        (BAD, ("-x",), 1),
        ("def test_exits(): pytest.exit('stopped', 3)\n", (), 3),
        ("", ("--no-such-option",), 4),
        ("", ("-k", "nothing"), 5),
    ],
)
def test_second_try_of_incomplete_run_is_refused(
    tmp_path: Path, text: str, args: tuple[str, ...], expected: int
) -> None:
    status, lines = second_try(tmp_path, TESTS + text, *args)
    assert status == expected
    assert not [line for line in lines if line.startswith("=== second try")]


def test_second_try_terminated_run_cleans_up_once(tmp_path: Path) -> None:
    """As a cancelled CI job: its signal may reach the whole process group."""
    text = (
        "import signal, time\n"
        "def pytest_configure(): signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
    )
    (tmp_path / "conftest.py").write_text(text)
    test = (
        "import time\n@pytest.fixture\ndef engine():\n    flaky_file('started')\n    yield\n"
        "    time.sleep(0.5)\n    flaky_file('stopped')\n"
        "def flaky_file(name): Path(__file__).with_name(name).touch()\n"
        "def test_long(engine): time.sleep(30)\n"
    )
    words, env = command(tmp_path, TESTS + test)
    with subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, start_new_session=True
    ) as run:
        deadline = time.monotonic() + 30
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGTERM)
        out, _ = run.communicate(timeout=30)
    assert run.returncode == 2
    assert (tmp_path / "stopped").exists()
    assert out.decode().splitlines()[-1] == "1 passed, 0 failed, 1 skipped"
