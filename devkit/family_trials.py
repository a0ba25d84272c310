"""Lets an engine share families that no test has compared in it yet: for the test that compares them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from devkit.injected_code import injected_environment

_CUSTOMIZE: Final = """from cornplug.checkpoints import tested_releases

recorded, trials = tested_releases.compared_families, {trials!r}


def compared_families(engine, version, dtype, kind="image"):
    return recorded(engine, version, dtype, kind) | frozenset(trials.get(kind, ()))


tested_releases.compared_families = compared_families
"""


def trial_environment(
    folder: Path, families: Collection[str], *, own: Mapping[str, Collection[str]] | None = None
) -> Mapping[str, str]:
    """Environment of an engine whose processes share these families too, in any release and dtype.

    {} for no family. `own`: modality -> families that servers of the engine share among themselves.
    """
    kinds = {"image": families, "video": families, **{f"own {m}": names for m, names in (own or {}).items()}}
    trials = {kind: sorted(names) for kind, names in kinds.items() if names}
    if not trials:
        return {}
    return injected_environment(folder, _CUSTOMIZE.format(trials=trials))
