"""Time to first token of a second app that asks about an image another app has asked about.

The measurement is that of benchmarks/second_app.py, with the machine's dtype.
"""

from __future__ import annotations

import json
from typing import Final

import second_app
from driver import models
from driver.table import Report

from devkit.checkpoints import CLIP_L_336, TINY_CLIP
from gpu_sections import sides
from gpu_sections.figures import Figures
from gpu_sections.sides import Size

_SIZE: Final = Size(tokens=1024, kv_gib=2, requests=4)
_LLM: Final = {"hidden_size": 1024, "layers": 8, "heads": 8}
_TINY_LLM: Final = {"hidden_size": 64, "layers": 2, "heads": 2}


def measure(figures: Figures) -> None:
    """Add the row of both sides' times, and the facts beside it."""
    llm, vision, count = (_TINY_LLM, TINY_CLIP, 1) if figures.rehearse else (_LLM, CLIP_L_336, 10)
    stored = sides.dtype(figures)
    app_a, app_b = (models.llava(**llm, vision=dict(vision), llm_seed=seed, dtype=stored) for seed in (1, 2))
    report = Report(name="second_app", title="", quick=True)
    with (
        sides.engines(figures, _SIZE) as here,
        here.store("512MiB"),
        here.encoder(app_a, app_b, dtype=stored) as encoder,
    ):
        second_app.measure(report, here, app_a, app_b, count)
        figures.add("tower passes of the encoder service", encoder.tower_passes())
    for row in report.rows:
        figures.add(row.name, json.loads(json.dumps(row.as_json())))
    for fact, value in report.facts.items():
        figures.add(fact, value)
