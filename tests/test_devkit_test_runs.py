"""script/test-more: its units, their shards, and what a change selects."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from time_limits import CHECK_VARIABLE

from devkit.test_runs import more, path_map
from devkit.test_runs.outcomes import CollectedTest, Outcomes
from devkit.test_runs.path_map import NoBaseError, PathMap, changed_paths
from devkit.test_runs.shards import expected_s, pack, read_durations, record_durations, total_s
from devkit.test_runs.units import (
    ANYWHERE,
    BEDS,
    SGLANG,
    VLLM,
    VLLM_NEXT,
    Unit,
    split_paths,
    units_of,
)

TREE = Path(__file__).parents[1]
SHARING = "tests/integration/test_sharing.py"
PAUSES = "tests/integration/test_pauses.py"
ORACLE = "tests/oracle/test_oracle.py"
FAULTS = "tests/integration/test_survives_faults.py"


def collected(*nodeids: str, alone: bool = False) -> list[CollectedTest]:
    markers = frozenset({"more", "sglang_alone"} if alone else {"more"})
    return [CollectedTest(nodeid, markers) for nodeid in nodeids]


COLLECTED = {
    VLLM: [
        *collected(f"{SHARING}::test_a", f"{SHARING}::test_b", f"{PAUSES}::test_c", f"{ORACLE}::test_d"),
        *collected(f"{FAULTS}::test_e[sglang]", alone=True),
    ],
    SGLANG: collected(f"{ORACLE}::test_d"),
}


def units(*, beds: bool = True) -> list[Unit]:
    return units_of(COLLECTED, beds=beds, installed=lambda environment: True)


def test_units_of_integration_are_on_one_bed_and_sharing_on_each() -> None:
    on_beds = [f"{environment} {bed} {SHARING}" for environment, bed in BEDS[SHARING]]
    assert len(on_beds) == 3
    assert [unit.name for unit in units()] == sorted(
        [
            *on_beds,
            f".venv v1-one {SHARING}",
            f".venv v1-one {PAUSES}",
            f".venv v1-one {FAULTS}",
            f".venv {ORACLE}",
            f".venv-sglang {ORACLE}",
        ]
    )
    assert {unit.tests for unit in units() if unit.file == SHARING} == {2}


def test_units_of_machine_with_gpu_have_no_bed() -> None:
    assert {unit.bed for unit in units(beds=False)} == {""}


def test_units_of_bed_leave_out_tests_without_vllm() -> None:
    markers = {unit.bed: unit.markers for unit in units() if unit.file == SHARING}
    assert markers["v1-one"] == "more or timed"
    assert markers["v2-gpu"] == "(more or timed) and not sglang_alone"


def test_split_paths_options_and_their_values_are_kept() -> None:
    words = ["-k", "tests_of_mine", f"{ORACLE}::test_x[1]", "-x", "tests/store"]
    assert split_paths(words) == (["-k", "tests_of_mine", "-x"], [f"{ORACLE}::test_x[1]", "tests/store"])


def test_pack_is_even_and_holds_each_unit_once() -> None:
    made = [Unit(VLLM, "", f"tests/test_{n}.py", 1) for n in range(40)]
    durations = {unit.name: 10.0 * n for n, unit in enumerate(made)}
    packed = pack(made, durations, 6)
    assert sorted(unit for shard in packed for unit in shard) == sorted(made)
    loads = [total_s(shard, durations) for shard in packed]
    assert max(loads) - min(loads) <= 30


def test_pack_of_recorded_durations_takes_an_hour_a_shard() -> None:
    durations = read_durations()
    known = [Unit("", "", name, 1) for name in durations]
    packed = pack([*known, Unit("", "", ANYWHERE, 0)], durations, 6)
    assert max(total_s(shard, durations) for shard in packed) <= 3600


def test_expected_s_of_unknown_unit_grows_with_its_tests() -> None:
    assert expected_s(Unit(VLLM, "v1-one", SHARING, 3), {}) == 180
    assert expected_s(Unit(VLLM, "", ORACLE, 3), {}) == 60


def test_record_durations_replaces_and_drops_removed_files(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    record_durations({f".venv {ORACLE}": 10.4, ".venv tests/test_gone.py": 1}, file)
    record_durations({f".venv-sglang {ORACLE}": 20.6}, file)
    assert read_durations(file) == {f".venv {ORACLE}": 10, f".venv-sglang {ORACLE}": 21}


def selected(*paths: str) -> set[str]:
    return {unit.name for unit in PathMap.read().select(units(), paths)}


EVERYTHING = {unit.name for unit in units()}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("docs/index.md", set()),
        ("cornplug/planner/plan.py", set()),
        ("cornplug/codec.py", EVERYTHING),
        ("Makefile", EVERYTHING),
        ("devkit/new_module.py", EVERYTHING),
        ("tests/conftest.py", EVERYTHING),
        (PAUSES, {f".venv v1-one {PAUSES}"}),
        ("tests/oracle/changes.py", {f".venv {ORACLE}", f".venv-sglang {ORACLE}"}),
        ("cornplug/sglang_hooks/flags.py", {f".venv-sglang {ORACLE}", f".venv v1-one {FAULTS}"}),
        ("cornplug/vllm_connector/compat.py", EVERYTHING - {f".venv-sglang {ORACLE}"}),
        ("tests/integration/stack.py", {name for name in EVERYTHING if "integration" in name}),
        ("script/setup-vllm-next", {name for name in EVERYTHING if "integration" in name}),
        ("script/setup", EVERYTHING),
    ],
)
def test_path_map_selects_what_a_path_affects(path: str, expected: set[str]) -> None:
    assert selected("README.md", path) == expected


def test_path_map_helper_selects_the_files_that_import_it() -> None:
    targets = PathMap.read().targets("tests/encoder_service/hostile_images.py")
    assert "tests/encoder_service/test_bad_input.py" in targets
    assert not {"tests/", "tests/encoder_service/", "*"} & set(targets)


def test_path_map_each_package_of_cornplug_has_a_row() -> None:
    found = {f"{file.parent.relative_to(TREE)}/" for file in (TREE / "cornplug").glob("*/__init__.py")}
    assert found - set(PathMap.read().paths) == set()


def test_path_map_rows_and_targets_exist() -> None:
    table = PathMap.read()
    environments = {f"{environment} " for environment in (VLLM, SGLANG, VLLM_NEXT)}
    for row in table.paths:
        assert (TREE / row).exists(), row
    for target in {
        target for targets in (*table.paths.values(), *table.groups.values()) for target in targets
    }:
        words = target.removeprefix("!")
        if words == "*" or words in environments:
            continue
        if words.startswith("@"):
            assert words[1:] in table.groups
            continue
        begin = words.split()[-1]
        assert list(TREE.glob(f"{begin}*")), target


@pytest.mark.parametrize(
    ("group", "signs"), [("sglang", ("SglangServer", ".sglang(")), ("vllm", ("VllmServer", ".vllm("))]
)
def test_path_map_groups_hold_tests_that_start_the_engine(group: str, signs: Sequence[str]) -> None:
    table = PathMap(PathMap.read().groups, {"x": [f"@{group}"]})
    starting = [
        Unit(VLLM, "v1-one", str(file.relative_to(TREE)), 1)
        for file in (TREE / "tests/integration").glob("test_*.py")
        if any(sign in file.read_text() for sign in signs)
    ]
    assert set(starting) - set(table.select(starting, ["x"])) == set()


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True)


def test_changed_paths_hold_commits_edits_and_new_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    for name in ("edited", "same", "old"):
        (tmp_path / name).write_text(name)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    git(tmp_path, "checkout", "--quiet", "-b", "topic")
    git(tmp_path, "mv", "old", "new")
    git(tmp_path, "commit", "--quiet", "-m", "second")
    git(tmp_path, "checkout", "--quiet", "main")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "main goes on")
    git(tmp_path, "checkout", "--quiet", "topic")
    (tmp_path / "edited").write_text("edited twice")
    (tmp_path / "untracked").touch()
    assert changed_paths(tree=tmp_path) == ["edited", "new", "old", "untracked"]
    with pytest.raises(NoBaseError, match="--changed compares with branch absent"):
        changed_paths("absent", tmp_path)


class FakeRuns:
    """Runs of units that end as a test says, and `only` runs of single tests."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, failing: Sequence[str], again: str = "passed"
    ) -> None:
        self.ran: list[str] = []
        self._failing, self._again = failing, again
        monkeypatch.setattr(more, "collect", lambda rest, scratch: COLLECTED)
        monkeypatch.setattr(more, "has_beds", lambda: True)
        monkeypatch.setattr(more, "run_unit", self._run)
        monkeypatch.setattr(more.subprocess, "run", lambda *args, **options: None)  # script/docs
        monkeypatch.setattr(more, "record_durations", self._record)
        monkeypatch.setattr(path_map, "changed_paths", lambda: [])
        self.recorded: list[str] = []

    def _run(self, unit: Unit, rest: Sequence[str], only: str | None = None) -> Outcomes:
        self.ran.append(only or unit.name)
        outcome = self._again if only else "failed" if unit.name in self._failing else "passed"
        return Outcomes(int(outcome == "failed"), {only or f"{unit.file}::test_x": outcome})

    def _record(self, measured: dict[str, float]) -> None:
        self.recorded += measured


def test_more_failure_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = f".venv v2-gpu {SHARING}"
    runs = FakeRuns(monkeypatch, [bad], again="failed")
    assert more.main(["--bed", "v2-gpu"]) == 1
    assert runs.ran == [bad, f"{SHARING}::test_x"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert f"  {bad} {SHARING}::test_x" in lines


def test_more_second_try_is_after_all_units(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = FakeRuns(monkeypatch, [f".venv {ORACLE}"])
    assert more.main(["--record"]) == 0
    assert runs.ran[-1] == f"{ORACLE}::test_x"
    assert ANYWHERE in runs.ran
    assert capsys.readouterr().out.splitlines()[-1] == "9 passed, 0 failed, 0 skipped"
    assert len(runs.recorded) == 8
    assert f".venv {ORACLE}" not in runs.recorded


def test_more_failures_of_several_units_get_no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [f".venv {ORACLE}", f".venv v1-one {PAUSES}", f".venv v1-one {FAULTS}"]
    runs = FakeRuns(monkeypatch, failing)
    assert more.main([]) == 1
    assert len(runs.ran) == 9


def test_more_shards_run_each_unit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRuns(monkeypatch, [])
    for shard in ("1/3", "2/3", "3/3"):
        assert more.main(["--shard", shard]) == 0
    assert sorted(runs.ran) == sorted([*EVERYTHING, ANYWHERE])


def test_more_list_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = FakeRuns(monkeypatch, [])
    assert more.main(["--list", "-k", "oracle"]) == 0
    assert runs.ran == []
    assert "8 units" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--shard", "7/6"], ["--shard", "0/6"], ["--shard", "two"]])
def test_more_wrong_shard_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        more.main(words)


def test_more_marker_expression_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert more.main(["-m", "gpu"]) == 2
    assert "-m and --collect-only" in capsys.readouterr().err


def test_more_unit_checks_durations_and_draws_random_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_pytest(arguments: Sequence[str], **options: Any) -> Outcomes:
        calls.append((arguments, options["env"]))
        return Outcomes(0)

    monkeypatch.setattr(more, "run_pytest", run_pytest)
    more.run_unit(Unit(VLLM, "", ORACLE, 1), ["-k", "llama"])
    [(arguments, env)] = calls
    assert env[CHECK_VARIABLE] == "1"
    assert arguments[-3:] == ["-m", "more or timed", ORACLE]
    assert "--hypothesis-profile=random" in arguments
    random = hypothesis.settings.get_profile("random")
    assert (random.derandomize, random.deadline) == (False, None)
    assert random.database is not None
