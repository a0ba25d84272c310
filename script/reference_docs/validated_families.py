"""cornplug/checkpoints/validated_families.py, from the results of tests in docs/support-matrix.json."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from .support_matrix import LABELS, RESULTS

SECTION: Final = "Families: embeddings equal the engine's"
"""Section of the tests that compare a family in an engine (`tests/integration/test_families.py`)."""
VIDEOS: Final = "Families: videos equal the engine's"
"""Section of `tests/integration/test_family_videos.py`."""
OWN: Final = "Families: stored embeddings equal the engine's"
"""Section of `tests/integration/test_own_towers.py`; its promises read "FAMILY, MODALITY"."""
MODALITIES: Final = ("audio", "image", "video")
_INTRO: Final = '''"""Families that a test has compared in each engine.

Written by script/docs from docs/support-matrix.json, where runs of tests/integration/test_families.py,
tests/integration/test_family_videos.py and tests/integration/test_own_towers.py keep their results: a family
is here if it passed, and failed in no release and on no bed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

'''


def page(file: Path = RESULTS) -> str:
    """The module's text."""
    results = json.loads(file.read_text())
    images = _table("VALIDATED", "Engine -> `model_type`s.", results, SECTION)
    videos = _table(
        "VALIDATED_OF_VIDEO", "Engine -> `model_type`s whose videos were compared.", results, VIDEOS
    )
    return _INTRO + images + videos + _own_table(results)


def _passed(results: list[dict[str, Any]], section: str) -> dict[str, dict[str, bool]]:
    """Engine -> promise of a section -> whether every result of it is a pass."""
    passed: dict[str, dict[str, bool]] = defaultdict(dict)
    for result in results:
        if result["section"] == section:
            promises = passed[result["engine"]]
            promise = result["promise"]
            promises[promise] = promises.get(promise, True) and result["passed"]
    return passed


def _own_table(results: list[dict[str, Any]]) -> str:
    lines = []
    for engine, promises in sorted({"sglang": {}, **_passed(results, OWN)}.items()):
        lines.append(f'    "{engine}": {{\n')
        for modality in MODALITIES:
            ends = f", {modality}"
            names = [p.removesuffix(ends) for p, fine in promises.items() if fine and p.endswith(ends)]
            inner = "".join(f'                "{one}",\n' for one in sorted(names))
            inside = f"\n            {{\n{inner}            }}\n        " if names else ""
            lines.append(f'        "{modality}": frozenset({inside}),\n')
        lines.append("    },\n")
    words = "Engine -> modality -> `model_type`s whose embeddings its servers share among themselves."
    head = "VALIDATED_OWN: Final[Mapping[str, Mapping[str, frozenset[str]]]]"
    return f'{head} = {{\n{"".join(lines)}}}\n"""{words}"""\n'


def _table(name: str, words: str, results: list[dict[str, Any]], section: str) -> str:
    """One table of the module, with its docstring."""
    passed = _passed(results, section)
    lines = []
    for engine in sorted(LABELS):
        names = sorted(family for family, fine in passed[engine].items() if fine)
        if names:
            inner = "".join(f'            "{one}",\n' for one in names)
            lines.append(f'    "{engine}": frozenset(\n        {{\n{inner}        }}\n    ),\n')
        else:
            lines.append(f'    "{engine}": frozenset(),\n')
    return f'{name}: Final[Mapping[str, frozenset[str]]] = {{\n{"".join(lines)}}}\n"""{words}"""\n'
