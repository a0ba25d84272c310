"""`cornplug replay`: its table, its plot, its settings and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cornplug import cli
from cornplug.replay import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two apps of one size: `text` reads ten entries again and again, `file` reads each entry once."""
    lines = []
    for turn in range(60):
        common = {"chat_id": turn, "parent_chat_id": -1, "timestamp": float(turn), "turn": 1}
        lines.append(common | {"type": "text", "hash_ids": [turn % 10]})
        lines.append(common | {"type": "file", "hash_ids": [1000 + turn * 5 + i for i in range(5)]})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of the table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_replay_prints_hits_and_seconds_of_each_size_and_app(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "20MiB,24MiB"
    assert main([str(trace), "--store", sizes, "--token-bytes", "65536", "--token-us", "1000"]) == 0
    text = capsys.readouterr().out
    assert "120 requests, 360 accesses" in text
    small, large = [row for row in rows(text) if row[1] == "all"]
    assert small == ["0.02 GiB", "all", "360", "0.00%", "0.00%", "0.00", "0.00%"], "60 entries pass, 20 fit"
    assert large[2] == "360"
    assert [row[1] for row in rows(text)] == ["all", "file", "text"] * 2


def test_replay_runs_the_namespaces_of_the_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "cornplug.toml"
    settings.write_text("[store.namespaces.text]\nshare = 0.5\n")
    monkeypatch.setenv("CORNPLUG_CONFIG", str(settings))
    assert main([str(trace), "--store", "20MiB", "--token-bytes", "65536", "--token-us", "1000"]) == 0
    whole, _, of_text = rows(capsys.readouterr().out)
    assert whole[3] == "13.89%", "50 of 360"
    assert of_text == ["", "text", "60", "83.33%", "83.33%", "0.80", "83.33%"]


def test_replay_takes_percentages_and_draws(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "saved.svg"
    assert main([str(trace), "--store", "10%,50%", "--plot", str(plot)]) == 0
    assert "<svg" in plot.read_text()
    text = capsys.readouterr().out
    assert [row[0] for row in rows(text) if row[1] == "all"] == ["0.06 GiB", "0.30 GiB"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--store", "many"], "not a size"),
        (["--store", "0%"], "not a size"),
        (["--store", "1GiB", "--format", "oracle"], "whole number"),
        (["--store", "1GiB", "--requests", "0"], "no request"),
    ],
)
def test_replay_wrong_argument_names_the_remedy(
    trace: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(trace), *arguments]) == 2
    assert said in capsys.readouterr().err
