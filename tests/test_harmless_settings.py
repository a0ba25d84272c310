"""The check of tests/harmless_settings/, and the paths in its reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harmless_settings import Run, sglang, unexplained, vllm

TREE = Path(__file__).parents[1]
REASONS = {"one reason": "port log_level", "another": "log_*"}


@pytest.mark.parametrize(
    ("harmless", "in_runs", "defects"),
    [
        ({"seed", "port", "log_level", "log_color"}, {"seed"}, {}),
        ({"seed", "port", "log_level", "log_color"}, {"seed", "log_color"}, {}),
        ({"port", "log_level", "seed"}, set(), {"seed": "in no run, and without a reason"}),
        ({"port", "log_level"}, {"port"}, {"port": "in a run AND one reason"}),
        ({"log_level"}, set(), {"port": "has a reason, but is not harmless"}),
        ({"port", "log_level"}, {"dtype"}, {"dtype": "in a run, but not harmless"}),
    ],
)
def test_unexplained_names_each_defect(
    harmless: set[str], in_runs: set[str], defects: dict[str, str]
) -> None:
    assert unexplained(harmless, in_runs, REASONS, listed=harmless) == defects


def test_run_fills_in_the_folder_and_reads_quotes() -> None:
    run = Run(flags='--a \'{"b": "{given}/c"}\'', variables="D={given} E='f g'") + Run("--h")
    assert run.arguments(Path("/x")) == ["--a", '{"b": "/x/c"}', "--h"]
    assert run.environment(Path("/x")) == {"D": "/x", "E": "f g"}


def test_reasons_name_files_that_exist() -> None:
    reasons = [*vllm.FIELDS, *vllm.VARIABLES, *sglang.FIELDS, *sglang.VARIABLES]
    named = {path for why in reasons for path in re.findall(r"(?:tests|cornplug)/\S+\.py", why)}
    assert named
    assert [path for path in named if not (TREE / path).exists()] == []
