"""`cornplug profile` on this machine's cores, and a plan from its tables."""

from pathlib import Path

import pytest

from cornplug.planner import profile_command
from cornplug.planner.inputs import profile_tables, toml_reader
from cornplug.planner.pipeline.decide import decide
from devkit import checkpoints

# three minutes of engines for tables whose reading has unit tests

PLAN = """
[[components]]
name = "llm"
kind = "llm"
model = "{model}"
checkpoint = "{model}"
tp = [1]
engines = ["vllm"]
profiles = [{{ kind = "table", gpu = "cpu-core", engine = "vllm", file = "llm.csv" }}]

[[components]]
name = "tower"
kind = "encoder"
model = "{model}"
checkpoint = "{model}"
tower_of = "llm"
tp = [1]
profiles = [{{ kind = "table", gpu = "cpu-core", file = "tower.csv" }}]

[[applications]]
name = "chat"
llm = "llm"
structures = ["E+PD"]
slo = {{ percentile = "p95", ttft_s = 20.0 }}

[[applications.requests]]
name = "image"
rate = 0.5
prompt = 64
output = 16
media = [{{ encoder = "tower", tokens = 64 }}]

[[pool]]
name = "cores"
gpu = "cpu-core"
gpus = 2
price_per_hour = 0.1

[rules]
n_plus_one = false
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, llm.csv and tower.csv."""
    folder = tmp_path_factory.mktemp("profile")
    model = str(checkpoints.qwen2_vl(folder / "model", hidden_size=256, layers=4, heads=4))
    common = ["--model", model, "--gpu", "cpu-core", "--repeats", "3"]
    llm = ["llm", *common, "--prompts", "64,512", "--batches", "1,4", "--out", str(folder / "llm.csv")]
    flags = ["--enforce-eager", "--max-model-len", "2048", "--limit-mm-per-prompt", '{"image": 0}']
    assert profile_command.main([*llm, "--", *flags]) == 0
    tower = ["encoder", *common, "--edges", "112,224", "--batches", "1,2"]
    assert profile_command.main([*tower, "--out", str(folder / "tower.csv"), "--", "--dtype", "float32"]) == 0
    return folder


def seconds(path: Path) -> dict[tuple[str, float], float]:
    return {(row.kind, row.x): row.seconds or 0.0 for row in profile_tables.read(path).rows}


def test_profile_llm_table_grows_with_the_work(measured: Path) -> None:
    llm = seconds(measured / "llm.csv")

    assert 0 < llm["prefill", 64] < llm["prefill", 512]
    # Four requests in one iteration take less than four iterations: they were batched.
    assert 0 < llm["decode", 4] < 4 * llm["decode", 1]
    about = profile_tables.read(measured / "llm.csv").provenance
    assert about["measured"].startswith("vllm 0.")
    assert "cornplug profile llm" in about["command"]


def test_profile_encoder_table_counts_patches(measured: Path) -> None:
    tower = seconds(measured / "tower.csv")
    patches = sorted(x for _, x in tower)

    # 112 pixels are 8 x 8 patches of 14; two images of 224 in one pass would be 512.
    assert patches[0] == 64
    assert patches[-1] in (256, 384, 512)
    assert tower["encode", patches[0]] < tower["encode", patches[-1]]


def test_plan_from_measured_profiles_is_decided(measured: Path) -> None:
    (measured / "plan.toml").write_text(PLAN.format(model=measured / "model"))
    plan = decide(toml_reader.read(measured / "plan.toml"), digest="").plan

    assert {group.tasks for group in plan.groups} == {"E", "PD"}
    assert all("measured" in group.profile for group in plan.groups)
    (chat,) = plan.latency_forecasts
    assert chat.ttft.p95 is not None
    assert 0 < chat.ttft.p95 < 20
