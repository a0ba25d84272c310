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
own = validated_families.VALIDATED_OWN
validated_families.VALIDATED_OWN = {{
    engine: {{modality: names | {own!r}.get(modality, set()) for modality, names in table.items()}}
    for engine, table in own.items()
}}
"""


def trial_environment(
    folder: Path, families: Collection[str], *, own: Mapping[str, Collection[str]] | None = None
) -> Mapping[str, str]:
    """Environment of an engine whose processes share these families too. {} for none.

    `own`: modality -> families that servers of the engine share among themselves.

    Python imports `sitecustomize` in each process before anything else, so the package itself has no switch.
    """
    trials = {modality: set(names) for modality, names in (own or {}).items() if names}
    if not families and not trials:
        return {}
    place = folder / "trial"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(_CUSTOMIZE.format(families=frozenset(families), own=trials))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))}
