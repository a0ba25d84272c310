"""SGLang still has the metric names that `cornplug replan` reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cornplug.planner import observed_load


def test_sglang_metric_names_of_replan_exist() -> None:
    spec = importlib.util.find_spec("sglang.srt")
    assert spec is not None
    (root,) = spec.submodule_search_locations or []
    source = (Path(root) / "observability" / "metrics_collector.py").read_text()
    read = (
        observed_load.FINISHED_METRICS
        + observed_load.PRESENT_METRICS
        + observed_load.PROMPT_METRICS
        + observed_load.OUTPUT_METRICS
        + observed_load.TTFT_METRICS
    )
    names = [
        n
        for n in read + observed_load.CACHED_METRICS + observed_load.LOOKUP_METRICS
        if n.startswith("sglang:")
    ]
    assert [n for n in names if f'"{n}"' not in source] == []
