"""Results of tests marked `support`, by engine, release, dtype and bed: docs/support-matrix.json.

`RECORD_SUPPORT=1 pytest ...` adds the results of a run to those of earlier runs; script/test-more sets it.
script/docs writes docs/support-matrix.md from the file.

    @pytest.mark.support("Faults", "{subject}'s store is killed", engine="{subject}")

A name in braces is a parameter of the test. Release, dtype and bed are those of the engines with cornplug
that the test sent requests to (`devkit/engines_in_use.py`). A test that starts engines by other means, all in
float32, is filed under its parameter `bed`, or else under the bed of the whole run. On beds "next-..." the
engine is vLLM's next release (`devkit/vllm_beds.py`).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from cornplug.errors import ProcessFailed
from cornplug.host import has_gpu
from devkit import vllm_beds
from devkit.engines import vllm_command
from devkit.engines_in_use import UsedEngine, in_use
from devkit.sglang_engine import sglang_python

VARIABLE: Final = "RECORD_SUPPORT"
PROPERTY: Final = "support"
"""Of a report: its results, as lists."""
TREE: Final = Path(__file__).parents[1]
RESULTS: Final = TREE / "docs" / "support-matrix.json"


class Result(NamedTuple):
    """One outcome of one test, in the order in which the file is sorted."""

    section: str
    promise: str
    engine: str
    release: str
    dtype: str
    """torch's name without "torch."."""
    bed: str
    """Empty for SGLang: it has one."""
    test: str
    passed: bool
    commit: str = ""
    """The tested commit; empty outside git."""
    date: str = ""
    """Date of the run: "2026-11-28"."""
    old: bool = False
    """Whether the code has changed a lot since `commit`; script/docs sets it."""


def results_of(
    test: str,
    mark: Sequence[str],
    engines: str,
    params: Mapping[str, object],
    *,
    passed: bool,
    used: Collection[UsedEngine],
    release: Callable[[str, Path], str],
) -> list[Result]:
    """A test's results: one for each release, dtype and bed of each of its engines.

    Args:
        test: The test's node id.
        mark: Section and promise, with names of parameters in braces.
        engines: "vllm", "sglang" or both words.
        used: The engines that the test used.
        release: (engine, interpreter) -> the release that is installed there.
    """
    section, promise = (words.format(**params) for words in mark)
    found = set()
    for engine in engines.format(**params).split():
        of_kind = [one for one in used if one.engine == engine]
        # A stock engine counts only if there is no other.
        for one in [one for one in of_kind if one.with_cornplug] or of_kind or [declared(engine, params)]:
            bed = "GPU" if one.bed and has_gpu() else one.bed
            installed = release(engine, one.python)
            found.add(Result(section, promise, engine, installed, one.dtype, bed, test, passed))
    return sorted(found)


def declared(engine: str, params: Mapping[str, object]) -> UsedEngine:
    """The engine that a test with these parameters uses by default."""
    if engine == "sglang":
        return UsedEngine(engine, "", sglang_python() or Path(), "float32", True)
    name = str(params.get("bed") or vllm_beds.bed_of_this_run())
    command = vllm_beds.next_vllm() if name.startswith("next-") else Path(vllm_command())
    return UsedEngine(engine, name.removeprefix("next-"), command.with_name("python"), "float32", True)


def results_of_report(item: Any, report: pytest.TestReport) -> list[Result]:
    """Results of a pytest item at one of its reports: none without the mark, before the end or if skipped."""
    mark = item.get_closest_marker("support")
    if mark is None or report.skipped or not (report.when == "call" or report.failed):
        return []
    params = item.callspec.params if hasattr(item, "callspec") else {}
    engines = mark.kwargs.get("engine", "vllm")
    try:
        return results_of(
            item.nodeid, mark.args, engines, params, passed=report.passed, used=in_use(), release=installed
        )
    except (OSError, ProcessFailed, subprocess.CalledProcessError):
        return []  # The engine is not installed, so it has no release to name.


@cache
def installed(engine: str, python: Path) -> str:
    """The release of an engine that is installed for an interpreter, without a local part: "0.33.0"."""
    ask = f"import importlib.metadata as m; print(m.version({engine!r}))"
    done = subprocess.run([str(python), "-P", "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.strip().partition("+")[0]


def read(file: Path = RESULTS) -> list[Result]:
    """The results of earlier runs."""
    return [Result(**line) for line in json.loads(file.read_text())] if file.exists() else []


def keep(new: Iterable[Result], file: Path = RESULTS, tree: Path = TREE) -> None:
    """Write new results, with commit and date, in the place of older ones of the same test, release, dtype
    and bed.

    Results of tests that are no more in the tree are left out.
    """

    def place(result: Result) -> tuple[str, ...]:
        return result.test, result.engine, result.release, result.dtype, result.bed

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    stamped = [result._replace(commit=commit(tree), date=today) for result in new]
    merged = {place(result): result for result in (*read(file), *stamped)}
    lines = [json.dumps(result._asdict()) for result in sorted(merged.values()) if exists(result.test, tree)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def commit(tree: Path = TREE) -> str:
    """The checked-out commit; empty outside git."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""  # no git on this machine
    return done.stdout.strip() if done.returncode == 0 else ""


def exists(test: str, tree: Path = TREE) -> bool:
    """Whether the function of a node id is in its file."""
    file, _, name = test.partition("::")
    path, function = tree / file, re.escape(name.partition("[")[0])
    return path.exists() and re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE) is not None


def wanted() -> bool:
    """Whether this run's results are kept."""
    return bool(os.environ.get(VARIABLE))
