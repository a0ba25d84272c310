"""SGLang still has the metric names that `cornplug replan` reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cornplug.planner.replan import observed_load


def test_sglang_metric_names_of_replan_exist() -> None:
    spec = importlib.util.find_spec("sglang.srt")
    assert spec is not None
    (root,) = spec.submodule_search_locations or []
    source = (Path(root) / "observability" / "metrics_collector.py").read_text()
    read = (
        observed_load.FINISHED
        + observed_load.PRESENT
        + observed_load.PROMPT
        + observed_load.OUTPUT
        + observed_load.TTFT
    )
    names = [n for n in read + observed_load.CACHED + observed_load.LOOKED_UP if n.startswith("sglang:")]
    assert [n for n in names if f'"{n}"' not in source] == []
