"""cornplug/checkpoints/validated_families.py, from the results of tests in docs/support-matrix.json."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Final

from .support_matrix import LABELS, RESULTS

SECTION: Final = "Families: embeddings equal the engine's"
"""Section of the tests that compare a family in an engine (`tests/integration/test_families.py`)."""
_INTRO: Final = '''"""Families that a test has compared in each engine.

Written by script/docs from docs/support-matrix.json, where runs of tests/integration/test_families.py keep
their results: a family is here if it passed, and failed in no release and on no bed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VALIDATED: Final[Mapping[str, frozenset[str]]] = {
'''


def page(file: Path = RESULTS) -> str:
    """The module's text."""
    passed: dict[str, dict[str, bool]] = defaultdict(dict)
    for result in json.loads(file.read_text()):
        if result["section"] == SECTION:
            families = passed[result["engine"]]
            name = result["promise"]
            families[name] = families.get(name, True) and result["passed"]
    lines = []
    for engine in sorted(LABELS):
        families = passed[engine]
        names = "".join(f'            "{name}",\n' for name in sorted(families) if families[name])
        lines.append(f'    "{engine}": frozenset(\n        {{\n{names}        }}\n    ),\n')
    return f'{_INTRO}{"".join(lines)}}}\n"""Engine -> `model_type`s."""\n'
