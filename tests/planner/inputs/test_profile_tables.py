"""Tables of measured times: what is written comes back, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs import profile_tables
from cornplug.planner.inputs.profile_tables import ProfileRow, ProfileTable
from cornplug.planner.inputs.schema import MeasuredProfile

HEADER = ",".join(profile_tables.COLUMNS)


def test_profile_table_written_and_read_is_equal(tmp_path: Path) -> None:
    rows = (
        ProfileRow("prefill", "H100", 2048, 0.252, tp=8),
        ProfileRow("decode", "H100", 64, 1 / 3, tp=8, engine="vllm", quantisation="fp8"),
        ProfileRow("generate", "L4", 0.5, 1e-7),
        ProfileRow("kv_tokens", "H100", 89_235),
        ProfileRow("mixed", "H100", 1.1),
    )
    table = ProfileTable(rows, {"machine": "two cores, 24 GiB", "command": "vllm bench serve: a\nb"})
    profile_tables.write(tmp_path / "t.csv", table)
    again = profile_tables.read(tmp_path / "t.csv")
    assert again.rows == rows
    assert again.provenance == {"machine": "two cores, 24 GiB", "command": "vllm bench serve: a b"}


@pytest.mark.parametrize(
    ("line", "place", "says"),
    [
        ("prefil,H100,1,1,vllm,none,prompt_tokens,1,1", "t.csv:2 kind", "one of prefill, decode"),
        ("prefill,,1,1,vllm,none,prompt_tokens,1,1", "t.csv:2 gpu", "Write the GPU type"),
        ("prefill,H100,0,1,vllm,none,prompt_tokens,1,1", "t.csv:2 tp", "'0' is not a valid degree"),
        ("prefill,H100,1,1,trt,none,prompt_tokens,1,1", "t.csv:2 engine", "vllm, sglang, ''"),
        ("prefill,H100,1,1,vllm,int2,prompt_tokens,1,1", "t.csv:2 quantisation", "none, fp8, awq, gptq"),
        (
            "prefill,H100,1,1,vllm,none,requests,1,1",
            "t.csv:2 quantity",
            "Write prompt_tokens in rows of kind prefill",
        ),
        ("prefill,H100,1,1,vllm,none,prompt_tokens,1,nan", "t.csv:2 seconds", "not a positive number"),
        ("prefill,H100,1,1,vllm,none,prompt_tokens,-1,1", "t.csv:2 x", "not a positive number"),
        ("kv_tokens,H100,1,1,vllm,none,tokens,9,1", "t.csv:2 seconds", "Leave it empty"),
        ("prefill,H100,1", "t.csv:2", "3 columns"),
        ("", "t.csv", "has no rows"),
        ("overhead,L4,1,1,,none,requests,1,1\noverhead,L4,1,1,,none,requests,2,1", "t.csv", "occurs twice"),
    ],
)
def test_profile_tables_bad_line_names_file_line_column_and_remedy(
    tmp_path: Path, line: str, place: str, says: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n{line}\n")
    with expect_error(ConfigError, field=str(tmp_path / place), match=says):
        profile_tables.read(path)


def test_profile_tables_wrong_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("# date: today\nkind,x,seconds\n")
    with expect_error(ConfigError, field=f"{path}:2"):
        profile_tables.read(path)


def test_profile_tables_absent_file_is_named(tmp_path: Path) -> None:
    with expect_error(ConfigError, field=str(tmp_path / "gone.csv")):
        profile_tables.read(tmp_path / "gone.csv")


def test_loaded_profile_prefers_engine_rows_to_common_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = (
        ProfileRow("decode", "L4", 8, 0.03),
        ProfileRow("decode", "L4", 1, 0.02),
        ProfileRow("decode", "L4", 1, 0.01, engine="vllm"),
        ProfileRow("decode", "L4", 1, 0.05, engine="sglang"),
        ProfileRow("decode", "L4", 1, 0.09, tp=2),
        ProfileRow("kv_token", "L4", 1000, 1e-4),
        ProfileRow("overhead", "L4", 1, 0.004),
        ProfileRow("kv_tokens", "L4", 5000),
        ProfileRow("mixed", "L4", 1.1),
    )
    profile_tables.write(path, ProfileTable(rows, {"date": "2026-11-21"}))
    given = MeasuredProfile(gpu="L4", file=path, prefill_tokens=[64], prefill_s=[0.1])
    profile = profile_tables.load_points(given, "vllm")
    assert (profile.decode_requests, profile.decode_s) == ([1, 8], [0.01, 0.03])
    assert (profile.prefill_tokens, profile.prefill_s) == ([64], [0.1])
    assert profile.kv_token_s == pytest.approx(1e-7)
    assert (profile.request_overhead_s, profile.kv_tokens, profile.mixed_factor) == (0.004, 5000, 1.1)
    assert profile.source == "measured: date 2026-11-21"


def test_loaded_profile_without_matching_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    profile_tables.write(path, ProfileTable((ProfileRow("decode", "L4", 8, 0.03, engine="vllm"),)))
    with expect_error(ConfigError, field=str(path)) as caught:
        profile_tables.load_points(MeasuredProfile(gpu="L4", tp=2, file=path), "vllm")
    assert caught.value.remedy == "It has: L4 TP1 PP1 vllm none"
