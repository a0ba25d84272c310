"""Results of marked tests become docs/support-matrix.md, with each supported release and no line by hand."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import support_results
from reference_docs import support_matrix
from support_results import Result, exists, keep, read, results_of, results_of_report

from cornplug.commands.engine_checks import SGLANG, VLLM, CheckedEngine
from devkit import engines
from devkit.engines import VllmServer
from devkit.engines_in_use import UsedEngine, begin_test, in_use, names_cornplug

TREE = Path(__file__).parents[1]
THIS = "tests/test_support_results.py::test_support_results_of_one_test_are_replaced"


def release_of(engine: str, python: Path) -> str:
    return "0.5.23" if engine == "sglang" else "0.33.0" if "next" in str(python) else "0.32.0"


def made(
    mark: tuple[str, str], engines: str = "vllm", used: Sequence[UsedEngine] = (), **params: object
) -> list[Result]:
    return results_of(THIS, mark, engines, params, passed=True, used=used, release=release_of)


def columns(results: Iterable[Result]) -> list[tuple[str, str, str]]:
    return [(result.engine, result.release, result.bed) for result in results]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_results, "has_gpu", lambda: False)
    monkeypatch.setattr(support_results, "vllm_command", lambda: ".venv/bin/vllm")
    monkeypatch.setattr(support_results.vllm_beds, "next_vllm", lambda: Path(".venv-vllm-next/bin/vllm"))
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


def test_support_results_bed_is_that_of_the_used_engine() -> None:
    """tests/integration/test_pauses.py starts V2 in a run on V1."""
    stock = UsedEngine("vllm", "v1", Path(".venv/bin/python"), "float32", False)
    ours = UsedEngine("vllm", "v2", Path(".venv-vllm-next/bin/python"), "float32", True)
    beside = UsedEngine("sglang", "", Path(".venv-sglang/bin/python"), "float32", True)
    assert columns(made(("Pauses", "sleep"), used=[stock, ours, beside])) == [("vllm", "0.33.0", "v2")]
    assert columns(made(("Pauses", "sleep"), used=[stock, beside])) == [("vllm", "0.32.0", "v1")]
    both = made(("Pauses", "sleep"), "vllm sglang", used=[ours, ours._replace(bed="v2-gpu"), beside])
    assert columns(both) == [("sglang", "0.5.23", ""), ("vllm", "0.33.0", "v2"), ("vllm", "0.33.0", "v2-gpu")]


def test_engine_server_is_in_use_once_its_url_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(support_results.vllm_beds.VARIABLE, "v1")
    begin_test()
    server = VllmServer(
        "m", "--kv-connector", "cornplug", "--dtype=bfloat16", log=tmp_path / "log", vllm=Path("/v/bin/vllm")
    )
    VllmServer("m", log=tmp_path / "cornplug" / "log")
    assert in_use() == set()
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert in_use() == {UsedEngine("vllm", "v1", Path("/v/bin/python"), "bfloat16", True)}
    begin_test()
    assert in_use() == set()


def test_engine_server_that_is_only_started_is_not_in_use(tmp_path: Path) -> None:
    """Tests start engines two by two, and ask one of them."""
    begin_test()
    server = VllmServer("m", log=tmp_path / "log", vllm=tmp_path / "vllm")
    assert not server.is_ready()
    with pytest.raises(FileNotFoundError):
        server.spawn()
    assert in_use() == set()


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ((), "float32"),
        (("--dtype", "bfloat16"), "bfloat16"),
        (("--dtype=float16", "--dtype-of-something", "x"), "float16"),
    ],
)
def test_engine_server_dtype_is_its_last_flag(words: Sequence[str], dtype: str, tmp_path: Path) -> None:
    begin_test()
    server = VllmServer("m", *words, log=tmp_path / "log", vllm=tmp_path / "vllm", bed="v1")
    assert server.url
    assert [engine.dtype for engine in in_use()] == [dtype]


def test_engine_server_keeps_packages_of_its_bed_beside_a_given_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "bed_environment", lambda *_: {"PYTHONPATH": "/bed:/tree"})
    server = VllmServer("m", log=tmp_path / "log", env={"PYTHONPATH": "/trial:/tree"})
    assert server.env["PYTHONPATH"] == "/trial:/tree:/bed:/tree"


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ("cornplug", True),
        ("--cornplug-store", True),
        ("--kv-connector=cornplug", True),
        ('{"kv_connector":"CornplugConnector"}', True),
        ("/home/cornplug/model", False),
        ("/tmp/my-cornplug", False),
    ],
)
def test_names_cornplug_by_flag_and_not_by_path(argument: str, found: bool) -> None:
    assert names_cornplug(["serve", argument]) == found


def test_support_results_engine_is_parameter_or_both() -> None:
    (one,) = made(("Faults", "{subject}'s store"), "{subject}", subject="sglang")
    assert one == Result("Faults", "sglang's store", "sglang", "0.5.23", "float32", "", THIS, True)
    assert columns(made(("Sharing", "both"), "vllm sglang")) == [
        ("sglang", "0.5.23", ""),
        ("vllm", "0.32.0", "v1"),
    ]


def test_support_results_of_one_test_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (first,) = made(("Sharing", "pages"))
    other = first._replace(bed="v2")
    keep([first._replace(passed=False), other], file)
    keep([first], file)
    assert [result._replace(commit="", date="") for result in read(file)] == [first, other]
    assert {result.commit for result in read(file)} == {support_results.commit()}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", result.date) for result in read(file))


def test_support_results_keep_each_dtype(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    exact = UsedEngine("vllm", "v1", Path(".venv/bin/python"), "float32", True)
    results = made(("Sharing", "pages"), used=[exact, exact._replace(dtype="bfloat16")])
    keep([results[1]], file)
    keep([results[0]], file)
    assert [result.dtype for result in read(file)] == ["bfloat16", "float32"]


def test_support_results_of_removed_test_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (here,) = made(("Sharing", "pages"))
    gone = here._replace(test="tests/test_support_results.py::test_of_yesterday[v2]")
    keep([here, gone], file)
    assert [result.test for result in read(file)] == [THIS]


def test_support_matrix_cell_is_of_a_release_and_names_dtypes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (good,) = made(("Sharing", "pages"))
    results = [
        good,
        good._replace(bed="v2-gpu"),
        good._replace(test=THIS + "[2]", bed="v2-gpu", passed=False),
        good._replace(dtype="bfloat16"),
        good._replace(promise="salts", release="0.33.0"),
        good._replace(promise="salts", engine="sglang", release="0.5.23", bed=""),
        good._replace(promise="tenants", release="0.33.0"),
        good._replace(promise="tenants", engine="sglang", release="0.5.23", bed=""),
        good._replace(section="Families: images", promise="llava"),
    ]
    file.write_text(json.dumps([result._asdict() for result in results]))
    page = support_matrix.page(file)
    head = "|  | vLLM 0.32.0 | vLLM 0.33.0 | SGLang 0.5.23 |\n| --- | --- | --- | --- |\n"
    assert (
        f"{head}"
        "| **Families: images** |  |  |  |\n"
        "| llava | f32 |  |  |\n"
        "| **Sharing** |  |  |  |\n"
        "| pages | f32 **fails**, bf16 |  |  |\n"
        "| salts<br>tenants |  | f32 | f32 |\n"
    ) in page


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_mark_old_counts_commits_to_code_beside_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support_matrix, "OLD_AFTER", 1)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "cornplug/planner").mkdir(parents=True)
    commits = []
    for name in ("cornplug/a", "cornplug/b", "cornplug/planner/c", "d", "cornplug/e"):
        (tmp_path / name).touch()
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "--quiet", "-m", name)
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
    file = tmp_path / "results.json"
    (one,) = made(("Sharing", "pages"))
    results = [one._replace(commit=commit) for commit in [*commits, "", "0" * 12]]
    file.write_text(json.dumps([result._asdict() for result in results]))
    support_matrix.mark_old(file, tmp_path)
    # The last result's commit is not in this clone.
    assert [result.old for result in read(file)] == [True, False, False, False, False, True, False]
    assert "| pages | f32† |" in support_matrix.page(file)


def test_mark_old_outside_git_keeps_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    (one,) = made(("Sharing", "pages"))
    results = [one._replace(commit="abc", old=True), one._replace(commit="abc")]
    file.write_text(json.dumps([result._asdict() for result in results]))
    support_matrix.mark_old(file, tmp_path)
    assert read(file) == results


def test_support_matrix_results_have_commit_and_date() -> None:
    assert all(result.commit and result.date for result in read())


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
    monkeypatch.setattr(support_results, "installed", release_of)
    monkeypatch.setattr(support_results, "in_use", frozenset)
    report = pytest.TestReport(THIS, ("", 0, ""), {}, outcome, None, when)
    item = Item(pytest.mark.support("Sharing", "pages").mark)
    assert [result.passed for result in results_of_report(item, report)] == (
        [] if passed is None else [passed]
    )
    assert results_of_report(Item(None), report) == []


def test_support_results_of_missing_engine_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the hook would end the whole run."""

    def missing(engine: str, python: Path) -> str:
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
