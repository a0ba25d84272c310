"""Rows of cornplug/checkpoints/tested_releases.py, from the results in docs/support-matrix.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .support_matrix import RESULTS, TREE

SECTION: Final = "Families: embeddings equal the engine's"
"""Section of the tests that compare a family in an engine (`tests/integration/test_families.py`)."""
VIDEOS: Final = "Families: videos equal the engine's"
"""Section of `tests/integration/test_family_videos.py`."""
OWN: Final = "Families: stored embeddings equal the engine's"
"""Section of `tests/integration/test_own_towers.py`; its promises read "FAMILY, MODALITY"."""
_MODULE: Final = TREE / "cornplug" / "checkpoints" / "tested_releases.py"
_ROWS: Final = re.compile(r"(?<=    \{\n).*?(?=    \}\n\))", re.DOTALL)


def page(file: Path = RESULTS) -> str:
    """The module's text, with the rows of these results."""
    passed: dict[tuple[str, ...], bool] = defaultdict(lambda: True)
    for result in json.loads(file.read_text()):
        if row := _row(result):
            passed[row] &= result["passed"]
    rows = "".join(f"        {json.dumps(row)[1:-1].join('()')},\n" for row in sorted(passed) if passed[row])
    return _ROWS.sub(lambda _: rows, _MODULE.read_text(), count=1)


def _row(result: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The result's row in `VALIDATED`; None if it is of another section."""
    kinds = {SECTION: "image", VIDEOS: "video", OWN: "own "}
    kind = kinds.get(result["section"])
    if kind is None:
        return None
    family, _, modality = result["promise"].partition(", ")
    return result["engine"], result["release"], result["dtype"], f"{kind}{modality}", family
