"""A plan's file: what a good one gives, and the exact words about bad ones (`bad_inputs/`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.schema import LLMShape, LogNormal, TowerShape

HERE = Path(__file__).parents[1]
GOOD = (HERE / "good_input.toml").read_text()
BAD = sorted((HERE / "bad_inputs").glob("*.toml"))


def _read(folder: Path, text: str) -> str:
    """What is said of it; "" where it is good."""
    path = folder / "plan.toml"
    path.write_bytes(text.encode())
    try:
        toml_reader.read(path)
    except ConfigError as e:
        return str(e).replace(f"{folder}/", "")
    return ""


def test_toml_reader_good_file_is_parsed() -> None:
    given = toml_reader.read(HERE / "good_input.toml")
    assert isinstance(given.components_by_name["vit"].shape, TowerShape)
    assert isinstance(given.components_by_name["llm7"].shape, LLMShape)
    photo = given.applications[0].requests[0]
    assert photo.prompt == LogNormal(mean=300, cv=1.0)
    assert photo.media[0].tokens == 256
    assert given.pool[0].gpus == 8


@pytest.mark.parametrize("bad", BAD, ids=lambda path: path.stem)
def test_toml_reader_bad_files_match_golden_messages(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bad.parent)
    with pytest.raises(ConfigError) as raised:
        toml_reader.read(Path(bad.name))
    assert f"{raised.value}\n" == bad.with_suffix(".txt").read_text()


def test_toml_reader_several_errors_give_field_of_first() -> None:
    with pytest.raises(ConfigError) as raised:
        toml_reader.read(HERE / "bad_inputs" / "unknown_names.toml")
    assert raised.value.field.endswith("unknown_names.toml:6 components[0].tower_of")
    assert raised.value.remedy.startswith("Did you mean 'llm7'?")


def test_toml_reader_paths_are_relative_to_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "t.csv").write_text("at_s,prompt_tokens,output_tokens\n0,10,20\n")
    text = GOOD.replace("prompt = { mean = 300, cv = 1.0 }\noutput = 200", 'trace = "t.csv"')
    text = text.replace('kind = "llm"', 'kind = "llm"\nmodel = "./tiny"')
    text = text.replace('kind = "encoder"', 'kind = "encoder"\nmodel = "someone/tiny"')
    (folder / "plan.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    given = toml_reader.read(Path("plans/plan.toml"))
    assert [c.model for c in given.components] == ["someone/tiny", "plans/tiny"]
    assert given.applications[0].requests[0].trace == Path("plans/t.csv")


def test_toml_reader_bad_trace_line_names_both_files(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("at_s,prompt_tokens,output_tokens\n0,ten,20\n")
    text = GOOD.replace("prompt = { mean = 300, cv = 1.0 }\noutput = 200", 'trace = "t.csv"')
    said = "plan.toml:29 applications[0].requests[0].trace: t.csv:2 prompt_tokens: 'ten' is not a number of"
    assert _read(tmp_path, text).startswith(said)


def test_toml_reader_offline_application_needs_no_slo(tmp_path: Path) -> None:
    slo = "slo = { ttft_s = 1.0, tpot_s = 0.05 }"
    assert _read(tmp_path, GOOD.replace(slo, 'workload = "offline"')) == ""
    assert _read(tmp_path, GOOD.replace(slo, "").replace("rate = 4.0", f"rate = 4.0\n{slo}")) == ""


def test_toml_reader_crlf_keeps_line_numbers(tmp_path: Path) -> None:
    assert _read(tmp_path, GOOD.replace("\n", "\r\n")) == ""
    bad = GOOD.replace("rate = 4.0", "rat = 4.0").replace("\n", "\r\n")
    assert "plan.toml:28 applications[0].requests[0].rat: " in _read(tmp_path, bad)


def test_toml_reader_checkpoint_replaces_shape(tmp_path: Path) -> None:
    head, tail = GOOD.split("[components.shape]")
    text = f'{head}checkpoint = "m"\n\n[[applications]]{tail.split("[[applications]]")[1]}'
    said = (
        "plan.toml:13 components[1].checkpoint: no config.json in m. Set it to a checkpoint's folder, or add"
    )
    assert _read(tmp_path, text).startswith(said)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("[]")
    said = "plan.toml:13 components[1].checkpoint: m/config.json is not a JSON object: "
    assert _read(tmp_path, text).startswith(said)
    config = {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert _read(tmp_path, text) == (
        "plan.toml:9 components[1].quantisations: ['none'] for a checkpoint whose weights are awq. "
        'Write quantisations = ["awq"].'
    )
    assert _read(tmp_path, text.replace("checkpoint", 'quantisations = ["awq"]\ncheckpoint')) == ""


def test_toml_reader_sparse_attention_has_no_prefill_context_parallelism(tmp_path: Path) -> None:
    head, tail = GOOD.split("[components.shape]")
    text = f'{head}checkpoint = "m"\npcp = [1, 2]\n\n[[applications]]{tail.split("[[applications]]")[1]}'
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v32", "index_topk": 2048})
    )
    said = "components[1].pcp: vLLM 0.32 runs models with sparse attention without CUDA"
    assert said in _read(tmp_path, text)


def test_toml_reader_broken_checkpoint_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("[]")
    head, tail = GOOD.split("[components.shape]")
    text = f'{head}model = "./m"\n\n[[applications]]{tail.split("[[applications]]")[1]}'
    text = "\n".join(line for line in text.splitlines() if not line.startswith("shape = "))
    said = _read(tmp_path, text)
    assert said.startswith("plan.toml:12 components[1].model: m/config.json is not a JSON object: ")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "components[1].shape: the size of 'llm7' is unknown, but its profile needs it"),
        (", kv_tokens = 9", ""),
    ],
)
def test_toml_reader_table_profile_needs_shape_or_kv_tokens(tmp_path: Path, more: str, said: str) -> None:
    head, tail = GOOD.split("[components.shape]")
    table = f'kind = "table", gpu = "H100", decode_requests = [1], decode_s = [0.01]{more}'
    text = f"{head}profiles = [{{ {table} }}]\n\n[[applications]]" + tail.split("[[applications]]")[1]
    assert (said in _read(tmp_path, text)) if said else (_read(tmp_path, text) == "")


def test_toml_reader_throughput_profile_needs_no_shape(tmp_path: Path) -> None:
    head, tail = GOOD.split("[components.shape]")
    profile = 'profiles = [{ kind = "throughput", gpu = "H100", requests_per_s = { "chat/photo" = 2 } }]'
    assert _read(tmp_path, f"{head}{profile}\n\n[[applications]]{tail.split('[[applications]]')[1]}") == ""


def test_toml_reader_absent_or_binary_file_is_refused(tmp_path: Path) -> None:
    with expect_error(ConfigError, field=str(tmp_path / "absent.toml")):
        toml_reader.read(tmp_path / "absent.toml")
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    with expect_error(ConfigError, field=str(tmp_path / "plan.toml")):
        toml_reader.read(tmp_path / "plan.toml")


@pytest.mark.parametrize(("good", "bad"), [("gpus = 8", "gpus = true"), ("gpus = 8", "stock = 8.5")])
def test_toml_reader_truth_value_or_fraction_is_no_whole_number(tmp_path: Path, good: str, bad: str) -> None:
    said = _read(tmp_path, GOOD.replace(good, bad))
    assert said.startswith(f"plan.toml:39 pool[0].{bad.partition(' ')[0]}: ")


def test_toml_reader_n_plus_one_is_truth_value_or_node(tmp_path: Path) -> None:
    for value in ("true", "false", '"node"'):
        assert _read(tmp_path, f"{GOOD}\n[rules]\nn_plus_one = {value}\n") == ""
    assert _read(tmp_path, f'{GOOD}\n[rules]\nn_plus_one = "rack"\n') == (
        'plan.toml:42 rules.n_plus_one: "rack" is not true or false. '
        'Write, for example, n_plus_one = true, false or "node".'
    )
