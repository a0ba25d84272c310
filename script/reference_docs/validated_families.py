"""cornplug/checkpoints/validated_families.py, from the results of tests in docs/support-matrix.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .support_matrix import RESULTS

SECTION: Final = "Families: embeddings equal the engine's"
"""Section of the tests that compare a family in an engine (`tests/integration/test_families.py`)."""
VIDEOS: Final = "Families: videos equal the engine's"
"""Section of `tests/integration/test_family_videos.py`."""
OWN: Final = "Families: stored embeddings equal the engine's"
"""Section of `tests/integration/test_own_towers.py`; its promises read "FAMILY, MODALITY"."""
_PAGE: Final = '''"""Families that a test has compared in an engine, by the engine's release and dtype.

Written by script/docs from docs/support-matrix.json, where runs of tests/integration/test_families.py,
tests/integration/test_family_videos.py and tests/integration/test_own_towers.py keep their results.
"""

from __future__ import annotations

from typing import Final

VALIDATED: Final[frozenset[tuple[str, str, str, str, str]]] = frozenset(
    {rows}
)
"""(engine, release, dtype, kind, `model_type`) of each family that passed, and failed on no bed.

The kinds "image" and "video" are of media that all engines and the encoder service share. "own image",
"own video" and "own audio" are of media that the servers of one engine share among themselves.
"""


def validated(engine: str, version: str | None, dtype: str, kind: str = "image") -> frozenset[str]:
    """Families that were compared in this release of an engine with this dtype.

    Args:
        engine: "vllm" or "sglang".
        version: Installed version. Its local part ("+cpu") does not count.
        dtype: torch's name without "torch.".
        kind: As in `VALIDATED`.
    """
    release = (version or "").partition("+")[0]
    return frozenset(family for *place, family in VALIDATED if place == [engine, release, dtype, kind])
'''


def page(file: Path = RESULTS) -> str:
    """The module's text."""
    passed: dict[tuple[str, ...], bool] = defaultdict(lambda: True)
    for result in json.loads(file.read_text()):
        if row := _row(result):
            passed[row] &= result["passed"]
    lines = [f"        {json.dumps(row)[1:-1].join('()')},\n" for row in sorted(passed) if passed[row]]
    rows = f"{{\n{''.join(lines)}    }}" if lines else "()"
    return _PAGE.replace("{rows}", rows)


def _row(result: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The result's row in `VALIDATED`; None if it is of another section."""
    kinds = {SECTION: "image", VIDEOS: "video", OWN: "own "}
    kind = kinds.get(result["section"])
    if kind is None:
        return None
    family, _, modality = result["promise"].partition(", ")
    return result["engine"], result["release"], result["dtype"], f"{kind}{modality}", family
