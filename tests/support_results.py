"""Results of tests marked `support`, by engine, release and bed: docs/support-matrix.json.

`RECORD_SUPPORT=1 pytest ...` adds the results of a run to those of earlier runs; script/test and
script/test-more set it. script/docs writes docs/support-matrix.md from the file.

    @pytest.mark.support("Faults", "{subject}'s store is killed", engine="{subject}")

A name in braces is a parameter of the test. Without a parameter `bed` the bed is that of the whole run; on
beds "next-..." the engine is vLLM's next release (`devkit/vllm_beds.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from cornplug.errors import ProcessFailed
from cornplug.host import has_gpu
from devkit import vllm_beds
from devkit.engines import vllm_command
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
    bed: str
    """Empty for SGLang: it has one."""
    test: str
    passed: bool


def results_of(
    test: str,
    mark: Sequence[str],
    engines: str,
    params: Mapping[str, object],
    *,
    passed: bool,
    release: Callable[[str, bool], str],
) -> list[Result]:
    """A test's results: one for each of its engines.

    Args:
        test: The test's node id.
        mark: Section and promise, with names of parameters in braces.
        engines: "vllm", "sglang" or both words.
        release: (engine, whether it is vLLM's next one) -> its installed release.
    """
    section, promise = (words.format(**params) for words in mark)
    name = str(params.get("bed") or vllm_beds.bed_of_this_run())
    found = []
    for engine in engines.format(**params).split():
        coming = engine == "vllm" and name.startswith("next-")
        bed = name.removeprefix("next-") if engine == "vllm" else ""
        if bed and has_gpu():
            bed = "GPU"
        found.append(Result(section, promise, engine, release(engine, coming), bed, test, passed))
    return found


def results_of_report(item: Any, report: pytest.TestReport) -> list[Result]:
    """Results of a pytest item at one of its reports: none without the mark, before the end or if skipped."""
    mark = item.get_closest_marker("support")
    if mark is None or report.skipped or not (report.when == "call" or report.failed):
        return []
    params = item.callspec.params if hasattr(item, "callspec") else {}
    engines = mark.kwargs.get("engine", "vllm")
    try:
        return results_of(item.nodeid, mark.args, engines, params, passed=report.passed, release=installed)
    except (OSError, ProcessFailed, subprocess.CalledProcessError):
        return []  # The engine is not installed, so it has no release to name.


@cache
def installed(engine: str, coming: bool) -> str:
    """The release of an engine that devkit starts, without a local part: "0.33.0"."""
    command = vllm_beds.next_vllm() if coming else Path(vllm_command())
    python = sglang_python() if engine == "sglang" else command.with_name("python")
    ask = f"import importlib.metadata as m; print(m.version({engine!r}))"
    done = subprocess.run([str(python), "-P", "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.strip().partition("+")[0]


def read(file: Path = RESULTS) -> list[Result]:
    """The results of earlier runs."""
    return [Result(**line) for line in json.loads(file.read_text())] if file.exists() else []


def keep(new: Iterable[Result], file: Path = RESULTS, tree: Path = TREE) -> None:
    """Write new results in the place of older ones of the same test, release and bed.

    Results of tests that are no more in the tree are left out.
    """

    def place(result: Result) -> tuple[str, ...]:
        return result.test, result.engine, result.release, result.bed

    merged = {place(result): result for result in (*read(file), *new)}
    lines = [json.dumps(result._asdict()) for result in sorted(merged.values()) if exists(result.test, tree)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def exists(test: str, tree: Path = TREE) -> bool:
    """Whether the function of a node id is in its file."""
    file, _, name = test.partition("::")
    path, function = tree / file, re.escape(name.partition("[")[0])
    return path.exists() and re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE) is not None


def wanted() -> bool:
    """Whether this run's results are kept."""
    return bool(os.environ.get(VARIABLE))
