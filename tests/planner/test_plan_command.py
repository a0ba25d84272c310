"""`cornplug plan`, as a shell sees it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug import cli
from cornplug.planner import plan_command
from cornplug.planner.inputs.schema import plan_schema
from cornplug.planner.optimizer.optimization_problem import SolveProgress
from cornplug.planner.plan import Plan
from cornplug.planner.report import plan_folder

from .sample_plan import plan

INPUT = """
name = "small"

[[components]]
name = "llm7"
kind = "llm"
model = "org/llm7"
tp = [1]
profiles = [
  {kind = "throughput", gpu = "A10G", requests_per_s = 2.0},
  {kind = "throughput", gpu = "A100-80", requests_per_s = 10.0},
]

[[applications]]
name = "chat"
llm = "llm7"
slo = {ttft_s = 0.5}
structures = ["monolith"]
requests = [{name = "short", rate = RATE, prompt = 400, output = 60}]

[[pool]]
name = "a10g"
gpu = "A10G"
gpus = 1
price_per_hour = 1.01
stock = 8

[[pool]]
name = "a100"
gpu = "A100-80"
gpus = 1
price_per_hour = 3.67
stock = 8

[rules]
n_plus_one = false
"""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return written(tmp_path, 7.5)


def written(folder: Path, rate: float) -> Path:
    path = folder / "small.toml"
    path.write_text(INPUT.replace("RATE", str(rate)))
    return path


def test_plan_command_prints_and_writes_the_plan(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert cli.main(["plan", str(given), "-o", str(folder), "--explain", "1"]) == 0
    out = capsys.readouterr().out
    assert "small  $3.67/h: 1 × a100" in out
    saved = Plan.load(folder / "plan.json")
    assert saved.cost_per_hour == pytest.approx(3.67)
    assert saved.input_digest == hashlib.sha256(given.read_bytes()).hexdigest()
    assert [a.name for a in saved.explanation.alternatives][-1] == "without A100-80"
    assert "$3.67/h" in (folder / "report.html").read_text()


def test_json_is_the_plan_and_nothing_else(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(given), "-o", str(tmp_path / "out"), "--json", "--explain", "0"]) == 0
    assert Plan.model_validate(json.loads(capsys.readouterr().out)) == Plan.load(tmp_path / "out/plan.json")


def test_plan_command_options_override_file(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--objective",
        "goodput",
        "--time-limit",
        "5",
        "--gap",
        "0.2",
        "--no-simulate",
        "--explain",
        "0",
    ]
    assert cli.main(["plan", str(given), "-o", str(tmp_path / "out"), "--quiet", *options]) == 0
    assert capsys.readouterr().out == ""
    assert Plan.load(tmp_path / "out/plan.json").objective == "goodput"


def test_plan_command_from_throughputs_names_missing_launch_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Path(__file__).parent / "cases" / "a03_staircase.toml"
    assert cli.main(["plan", str(case), "-o", str(tmp_path / "out"), "--quiet", "--explain", "0"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "No commands.txt: groups['llama2-7b-PD-A10G" in said
    assert "llama2-7b was planned from a throughput" in said
    assert 'a profile of kind "table"' in said
    assert sorted(p.name for p in (tmp_path / "out").glob("*.*")) == [
        ".cornplug-plan.json",
        "plan.json",
        "report.html",
    ]


def test_plan_command_infeasible_exits_1_and_names_shortage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = written(tmp_path, 200)
    assert cli.main(["plan", str(given), "-o", str(tmp_path / "out")]) == 1
    assert "cornplug plan: no plan: stock[a10" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plan_command_wrong_input_exits_2_and_names_the_line(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given.write_text(given.read_text().replace('llm = "llm7"', 'llm = "llm8"'))
    assert cli.main(["plan", str(given)]) == 2
    assert "small.toml:16 applications[0].llm" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--gap", "0"], ["--time-limit", "-1"], ["--explain", "x"]])
def test_options_have_limits(given: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", str(given), *wrong])
    assert exit_.value.code == 2


def test_plan_command_second_plan_replaces_the_first_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    first, _ = plan_folder.write(plan(), tmp_path)
    (tmp_path / "gone.txt").write_text("of the first plan")
    record = tmp_path / plan_folder.MANIFEST_FILE
    record.write_text(json.dumps([*json.loads(record.read_text()), "gone.txt"]))
    second, _ = plan_folder.write(plan(name="again"), tmp_path)
    assert not (tmp_path / "gone.txt").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert Plan.load(tmp_path / "plan.json").name == "again"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in second} | {
        "notes.txt",
        plan_folder.MANIFEST_FILE,
    }
    assert len(first) >= 2


def test_plan_command_foreign_file_is_left(tmp_path: Path) -> None:
    from cornplug.errors import ConfigError

    (tmp_path / "report.html").write_text("somebody's")
    with expect_error(ConfigError, field=f"-o {tmp_path}", match=r"report\.html"):
        plan_folder.write(plan(), tmp_path)
    assert (tmp_path / "report.html").read_text() == "somebody's"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (SolveProgress(1, None, None), "solving: no plan yet, no bound yet"),
        (SolveProgress(1, 58.24, 57.9), "solving: 58.24 found, bound 57.9, gap 0.58 %"),
        (SolveProgress(1, 0.0, None), "solving: 0 found, no bound yet"),
    ],
)
def test_progress_line_shows_incumbent_bound_and_gap(at: SolveProgress, said: str) -> None:
    assert plan_command.solver_progress(at) == said


def test_plan_command_schema_prints_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == plan_schema()
