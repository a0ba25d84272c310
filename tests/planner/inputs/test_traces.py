"""Traces of three formats, and what is said of a bad line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs import request_sampling

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:01.009930+00:00,2162,5
2024-05-10 00:00:00.009930+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14]}

"""
CSV = "prompt_tokens,at_s,output_tokens\n100,1.5,20\n200,2.25,30\n"


def _file(folder: Path, content: str) -> Path:
    path = folder / "trace"
    path.write_text(content)
    return path


def test_traces_azure_2023_is_read(tmp_path: Path) -> None:
    trace = request_sampling.read_trace(_file(tmp_path, AZURE), "azure")
    assert trace.at_s == pytest.approx([0, 4.314579, 4.541977], abs=1e-5)
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 1], "an answer has at least one token"


def test_traces_azure_2024_is_sorted(tmp_path: Path) -> None:
    trace = request_sampling.read_trace(_file(tmp_path, AZURE_2024), "azure")
    assert trace.at_s == pytest.approx([0, 1])
    assert trace.prompt_tokens.tolist() == [2399, 2162]


def test_mooncake_counts_milliseconds(tmp_path: Path) -> None:
    trace = request_sampling.read_trace(_file(tmp_path, MOONCAKE), "mooncake")
    assert trace.at_s == pytest.approx([0, 3.052])
    assert trace.prompt_tokens.tolist() == [6758, 7319]


def test_traces_csv_in_any_column_order_with_bom_is_read(tmp_path: Path) -> None:
    trace = request_sampling.read_trace(_file(tmp_path, "\ufeff" + CSV), "csv")
    assert trace.at_s == pytest.approx([0, 0.75])
    assert trace.output_tokens.tolist() == [20, 30]


def test_traces_changed_file_is_read_again(tmp_path: Path) -> None:
    path = _file(tmp_path, CSV)
    first = request_sampling.read_trace(path, "csv")
    assert request_sampling.read_trace(path, "csv") is first
    path.write_text(CSV.replace("200", "900"))
    os.utime(path, ns=(1, 1))
    assert request_sampling.read_trace(path, "csv").prompt_tokens.tolist() == [100, 900]


@pytest.mark.parametrize(
    ("format", "content", "message"),
    [
        ("azure", CSV, ":1: no column TIMESTAMP, ContextTokens, GeneratedTokens; the first line has prompt_"),
        ("azure", AZURE.replace("374", "many"), ":2 ContextTokens: 'many' is not a number of tokens. "),
        ("azure", AZURE.replace("2023-11-16 18:15:50", "noon"), ":3 TIMESTAMP: 'noon.9951690' is not a time"),
        ("azure", AZURE + "2023-11-16 18:16:00,5\n", ":5 GeneratedTokens: None is not a number of tokens"),
        ("csv", CSV.replace("200", "-1"), ":3 prompt_tokens: '-1' is not a number of tokens"),
        ("csv", CSV.splitlines()[0], ": the trace has no requests. Use a file with at least one request."),
        ("mooncake", MOONCAKE + "{", ":4: invalid JSON: Expecting property name"),
        ("mooncake", "[1]", ":1: not a JSON object. Mooncake traces contain one JSON object per line."),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 5}',
            ":1 output_length: missing. Write a number of tokens",
        ),
    ],
)
def test_traces_bad_content_names_file_line_and_column(
    tmp_path: Path, format: request_sampling.TraceFormat, content: str, message: str
) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        request_sampling.read_trace(path, format)
    assert str(raised.value).startswith(f"{path}{message}")


def test_traces_absent_or_binary_file_is_refused(tmp_path: Path) -> None:
    with expect_error(ConfigError, field=str(tmp_path / "absent.csv")):
        request_sampling.read_trace(tmp_path / "absent.csv", "csv")
    packed = tmp_path / "trace.gz"
    packed.write_bytes(b"\x1f\x8b\x08\xff")
    with expect_error(ConfigError, field=str(packed)):
        request_sampling.read_trace(packed, "csv")
