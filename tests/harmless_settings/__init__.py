"""Runs of engines under settings that cornplug calls harmless, and why other such settings are in no run.

tests/integration/test_harmless_flags.py starts the runs. Unit tests of both engines' rooms check that each
harmless setting is in a run or has a reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "{given}"
"""Stands in a run's settings for the folder of a test."""


@dataclass(frozen=True)
class Run:
    """The settings of one engine, as a shell reads them."""

    flags: str = ""
    variables: str = ""

    def __add__(self, more: Run) -> Run:
        """Both runs' settings."""
        return Run(f"{self.flags} {more.flags}", f"{self.variables} {more.variables}")

    def arguments(self, folder: Path) -> list[str]:
        """Return the flags as arguments of an engine."""
        return [word.replace(FOLDER, str(folder)) for word in shlex.split(self.flags)]

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the variables by name."""
        words = (word.partition("=") for word in shlex.split(self.variables))
        return {name: value.replace(FOLDER, str(folder)) for name, _, value in words}


def unexplained(
    harmless: Collection[str],
    in_runs: Collection[str],
    reasons: Mapping[str, str],
    *,
    listed: Collection[str],
) -> dict[str, str]:
    """Return setting -> defect. {} if each harmless setting is either in a run or has one reason.

    Args:
        harmless: Harmless settings that this release of the engine has.
        in_runs: Settings that a run sets.
        reasons: Reason -> names of settings that no run sets. `PREFIX*` names those that begin so and are
            neither in a run nor named in full or by a longer prefix.
        listed: Harmless settings of all releases.
    """
    wrong = dict.fromkeys(set(in_runs) - set(listed), "in a run, but not harmless")
    named = [(name, why) for why, names in reasons.items() for name in names.split()]
    for name, _ in named:
        prefix = name.removesuffix("*")
        if not any(one == name or (prefix != name and one.startswith(prefix)) for one in listed):
            wrong[name] = "has a reason, but is not harmless"
    for one in harmless:
        found = ["in a run"] if one in in_runs else []
        found += [why for name, why in named if name == one]
        begins = [(len(n), why) for n, why in named if n.endswith("*") and one.startswith(n[:-1])]
        found = found or [why for _, why in sorted(begins)[-1:]]
        if len(found) != 1:
            wrong[one] = " AND ".join(found) or "in no run, and without a reason"
    return wrong
