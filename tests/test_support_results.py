"""Results of marked tests become docs/support-matrix.md, with each supported release and no line by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
import support_results
from reference_docs import support_matrix
from support_results import Result, exists, keep, read, results_of, results_of_report

from cornplug.commands.engine_checks import SGLANG, VLLM, CheckedEngine

TREE = Path(__file__).parents[1]
THIS = "tests/test_support_results.py::test_support_results_of_one_test_are_replaced"
INSTALLED = {("vllm", False): "0.32.0", ("vllm", True): "0.33.0", ("sglang", False): "0.5.23"}


def made(mark: tuple[str, str], engines: str = "vllm", **params: object) -> list[Result]:
    return results_of(
        THIS, mark, engines, params, passed=True, release=lambda engine, coming: INSTALLED[engine, coming]
    )


def columns(results: Iterable[Result]) -> list[tuple[str, str, str]]:
    return [(result.engine, result.release, result.bed) for result in results]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_results, "has_gpu", lambda: False)
    monkeypatch.delenv(support_results.vllm_beds.VARIABLE, raising=False)


def test_support_results_bed_is_parameter_or_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = ("Sharing", "pages")
    assert columns(made(mark)) == [("vllm", "0.32.0", "v1")]
    assert columns(made(mark, bed="v2-gpu")) == [("vllm", "0.32.0", "v2-gpu")]
    assert columns(made(mark, bed="next-v2")) == [("vllm", "0.33.0", "v2")]
    monkeypatch.setenv(support_results.vllm_beds.VARIABLE, "v2")
    assert columns(made(mark)) == [("vllm", "0.32.0", "v2")]
    monkeypatch.setattr(support_results, "has_gpu", lambda: True)
    assert columns(made(mark)) == [("vllm", "0.32.0", "GPU")]


def test_support_results_engine_is_parameter_or_both() -> None:
    (one,) = made(("Faults", "{subject}'s store"), "{subject}", subject="sglang")
    assert one == Result("Faults", "sglang's store", "sglang", "0.5.23", "", THIS, True)
    assert columns(made(("Sharing", "both"), "vllm sglang")) == [
        ("vllm", "0.32.0", "v1"),
        ("sglang", "0.5.23", ""),
    ]


def test_support_results_of_one_test_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (first,) = made(("Sharing", "pages"))
    other = first._replace(bed="v2")
    keep([first._replace(passed=False), other], file)
    keep([first], file)
    assert read(file) == [first, other]


def test_support_results_of_removed_test_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (here,) = made(("Sharing", "pages"))
    gone = here._replace(test="tests/test_support_results.py::test_of_yesterday[v2]")
    keep([here, gone], file)
    assert read(file) == [here]


def test_support_matrix_cell_is_yes_only_if_all_tests_passed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (good,) = made(("Sharing", "pages"))
    bad = good._replace(test=THIS + "[2]", passed=False)
    elsewhere = good._replace(promise="salts", bed="v2-gpu")
    file.write_text(json.dumps([result._asdict() for result in (good, bad, elsewhere)]))
    lines = [
        line for line in support_matrix.page(file).splitlines() if "vLLM 0.32" in line or "| pages" in line
    ]
    assert lines == ["|  | vLLM 0.32.0 v1 | vLLM 0.32.0 v2-gpu |", "| pages | **no** | - |"]
    file.write_text(json.dumps([result._asdict() for result in (good, elsewhere)]))
    assert "| pages | yes | - |\n| salts | - | yes |" in support_matrix.page(file)


class Item:
    """A test with the mark, or without."""

    nodeid = THIS

    def __init__(self, mark: pytest.Mark | None) -> None:
        self._mark = mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._mark if name == "support" else None


@pytest.mark.parametrize(
    ("when", "outcome", "passed"),
    [
        ("setup", "passed", None),
        ("setup", "failed", False),
        ("setup", "skipped", None),
        ("call", "passed", True),
        ("call", "failed", False),
        ("call", "skipped", None),
        ("teardown", "passed", None),
        ("teardown", "failed", False),
    ],
)
def test_support_results_of_report_follow_its_outcome(
    when: Literal["setup", "call", "teardown"],
    outcome: Literal["passed", "failed", "skipped"],
    passed: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support_results, "installed", lambda engine, coming: INSTALLED[engine, coming])
    report = pytest.TestReport(THIS, ("", 0, ""), {}, outcome, None, when)
    item = Item(pytest.mark.support("Sharing", "pages").mark)
    assert [result.passed for result in results_of_report(item, report)] == (
        [] if passed is None else [passed]
    )
    assert results_of_report(Item(None), report) == []


def test_support_results_of_missing_engine_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the hook would end the whole run."""

    def missing(engine: str, coming: bool) -> str:
        raise FileNotFoundError("bin/vllm is missing. Run: script/setup")

    monkeypatch.setattr(support_results, "installed", missing)
    report = pytest.TestReport(THIS, ("", 0, ""), {}, "failed", None, "setup")
    assert results_of_report(Item(pytest.mark.support("Sharing", "pages").mark), report) == []


def test_support_matrix_results_are_of_marked_tests_that_exist() -> None:
    for result in read():
        assert exists(result.test), result.test
        file = TREE / result.test.partition("::")[0]
        assert "mark.support(" in file.read_text()


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_support_matrix_names_each_supported_release(engine: CheckedEngine) -> None:
    installed = re.findall(
        rf"\b{engine.name.upper()}(?:_NEXT)?=(\d\S*)",
        "".join(file.read_text() for file in sorted((TREE / "script").glob("setup*"))),
    )
    named = {result.release for result in read() if result.engine == engine.name}
    assert set(installed) <= named
    assert all(release in engine.supported for release in named)
