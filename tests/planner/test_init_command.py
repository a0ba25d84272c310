"""`cornplug plan init`: its file is a plan's input as it is; a wrong argument is named with its remedy."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from cornplug import cli
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.component_shapes import known_models
from cornplug.planner.inputs.schema import PlanInput, plan_schema
from cornplug.planner.plan import Plan

from .inputs.test_component_shapes import GEMMA3_4B, LLAMA3_8B

VALIDATOR = Draft202012Validator(plan_schema())


def init(folder: Path, model: str, gpus: str, *flags: str) -> PlanInput:
    out = folder / "plan.toml"
    assert cli.main(["plan", "init", model, "--gpus", gpus, "-o", str(out), *flags]) == 0
    return toml_reader.read(out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["plan", "init", *argv]) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err.strip()


@pytest.mark.parametrize(
    "model", [row.ids[-1] for row in {id(r): r for r in known_models().values()}.values()]
)
def test_init_known_model_gives_input_with_its_shape(model: str, tmp_path: Path) -> None:
    plan_input = init(tmp_path, model, "B200,L4")
    row = known_models()[model]
    llm, *towers = plan_input.components
    assert (llm.model, llm.shape, len(towers)) == (model, row.llm, int(row.tower is not None))
    assert all(t.shape == row.tower and t.tower_of == llm.name for t in towers)
    assert {n.name for n in plan_input.pool} == {"b200-x8", "l4-x1", "l4-x4", "l4-x8"}
    assert row.quantisation in ("none", *llm.quantisations)
    assert VALIDATOR.is_valid(tomllib.loads((tmp_path / "plan.toml").read_text()))


def test_init_commented_keys_are_keys_of_the_schema(tmp_path: Path) -> None:
    init(tmp_path, "google/gemma-3-12b-it", "H100,L40S")
    text = (tmp_path / "plan.toml").read_text()
    keys = re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)
    assert {key.partition(" ")[0] for key in keys} >= {
        "profiles",
        "trace",
        "prefix",
        "hit_rate",
        "price_per_hour",
    }
    for line in keys:
        key = line.partition(" ")[0]
        table = text[: text.index(f"# {line}")].rpartition("\n[")[0]
        taken = [*("prompt", "output")] if key == "trace" else [key]
        head, tail = table, text[len(table) :]
        for one in taken:  # the key beside its comment goes: TOML takes one of each
            tail = re.sub(rf"^{one} = .*\n", "", tail, count=1, flags=re.MULTILINE)
        data = tomllib.loads(head + tail.replace(f"# {line}", line, 1))
        assert [error.message for error in VALIDATOR.iter_errors(data)] == [], line


@pytest.mark.more
def test_init_file_is_planned_as_it_is(tmp_path: Path) -> None:
    init(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", "L40S")
    folder = tmp_path / "out"
    flags = ["-o", str(folder), "--explain", "0", "--quiet"]
    assert cli.main(["plan", str(tmp_path / "plan.toml"), *flags]) == 0
    plan = Plan.load(folder / "plan.json")
    assert plan.groups
    assert all(f.ttft.p95 and f.slo_ttft_s and f.ttft.p95 <= f.slo_ttft_s for f in plan.latency_forecasts)


def test_init_checkpoint_folder_is_named_relative_to_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "my gemma").mkdir(parents=True)
    (tmp_path / "models" / "my gemma" / "config.json").write_text(json.dumps(GEMMA3_4B))
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    plan_input = init(Path("plans"), os.path.join("models", "my gemma"), "L40S")
    llm, tower = plan_input.components
    assert (llm.name, tower.name) == ("my-gemma", "my-gemma-tower")
    assert llm.checkpoint == Path("plans/../models/my gemma")
    assert (llm.shape, tower.shape, tower.tower_of) == (None, None, "my-gemma")
    assert plan_input.applications[0].requests[0].media[0].tokens == 256


@pytest.mark.parametrize(
    ("method", "quantisations"), [("awq", ["awq"]), ("fp8", ["fp8"]), ("mxfp4", ["none"])]
)
def test_init_quantised_checkpoint_keeps_its_quantisation(
    method: str, quantisations: list[str], tmp_path: Path
) -> None:
    config = {**LLAMA3_8B, "quantization_config": {"quant_method": method}}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    plan_input = init(tmp_path, str(tmp_path / "m"), "L40S")
    assert plan_input.components[0].quantisations == quantisations


def test_init_weights_beyond_memory_are_planned_in_fp8_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_input = init(tmp_path, "meta-llama/Llama-3.1-405B", "H100")
    capsys.readouterr()
    assert plan_input.components[0].quantisations == ["fp8"]
    assert refused(
        capsys, "meta-llama/Llama-3.1-405B", "--gpus", "L4,A100-80", "-o", f"{tmp_path}/b.toml"
    ) == (
        "cornplug plan: --gpus: weights of 756 GiB do not fit on one machine with L4, A100-80. "
        "GPUs with enough memory: H100, H200, B200."
    )
    said = refused(capsys, "Qwen/Qwen3-32B-FP8", "--gpus", "A100-80", "-o", f"{tmp_path}/b.toml")
    assert "GPUs with enough memory: L4, L40S, H100, H200, B200." in said


@pytest.mark.parametrize(
    ("model", "gpus", "said"),
    [
        ("Qwen/Qwen3-VL-8B", "H100", "Did you mean Qwen/Qwen3-VL-8B-Instruct"),
        ("LLAMA-3.1-8b-instruct", "H100", "Did you mean meta-llama/Llama-3.1-8B-Instruct"),
        ("nothing-like-it", "H100", "Known: meta-llama/Llama-3.1-8B-Instruct, "),
        ("Qwen/Qwen3-8B", "H10", "--gpus: no GPU 'H10' in the price table. Did you mean 'H100'? Known: L4, "),
        ("Qwen/Qwen3-8B", " , ", "--gpus: contains no GPU. Write, for example, --gpus H100,L40S."),
    ],
)
def test_init_unknown_name_gives_nearest_ones(
    model: str, gpus: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, model, "--gpus", gpus, "-o", f"{tmp_path}/plan.toml")
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "has no config.json"),
        ("[]", "is not a JSON object"),
        ('{"model_type": "bert"}', "MODEL: config.json of 'bert' has no hidden_size"),
    ],
)
def test_init_folder_that_is_no_model_is_refused(
    config: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    if config is not None:
        (tmp_path / "m" / "config.json").write_text(config)
    assert said in refused(capsys, str(tmp_path / "m"), "--gpus", "H100", "-o", f"{tmp_path}/plan.toml")


def test_init_present_file_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text("mine")
    said = refused(capsys, "Qwen/Qwen3-8B", "--gpus", "H100", "-o", f"{tmp_path}/plan.toml")
    assert said.endswith("plan.toml: already exists. Choose another file, or add --force.")
    assert (tmp_path / "plan.toml").read_text() == "mine"
    assert init(tmp_path, "Qwen/Qwen3-8B", "H100", "--force").name == "Qwen3-8B"


def test_init_folder_that_is_absent_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "Qwen/Qwen3-8B", "--gpus", "H100", "-o", f"{tmp_path}/no/plan.toml")
    assert "cannot be written: No such file or directory" in said
