"""Lets an engine share families that no test has compared in it yet: for the test that compares them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

_CUSTOMIZE: Final = """from cornplug.checkpoints import validated_families

for table in ("VALIDATED", "VALIDATED_OF_VIDEO"):
    old = getattr(validated_families, table)
    setattr(validated_families, table, {{engine: names | {families!r} for engine, names in old.items()}})
"""


def trial_environment(folder: Path, families: Collection[str]) -> Mapping[str, str]:
    """Environment of an engine whose processes share these families too. {} for none.

    Python imports `sitecustomize` in each process before anything else, so the package itself has no switch.
    """
    if not families:
        return {}
    place = folder / "trial"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(_CUSTOMIZE.format(families=frozenset(families)))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))}
