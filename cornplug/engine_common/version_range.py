"""Range of engine releases with which cornplug is tested."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Half-open range of versions of one engine, from `low` up to but not including `high`."""

    engine: str
    """Name of the engine, for messages."""
    package: str
    """Name of the engine's distribution package."""
    low: tuple[int, ...]
    high: tuple[int, ...]
    """Upper bound (exclusive), with as many numbers as `low`. Further numbers of a version are ignored."""

    def __str__(self) -> str:
        """Format the range like pip: ">=0.32,<0.33"."""
        low, high = (".".join(map(str, bound)) for bound in (self.low, self.high))
        return f">={low},<{high}"

    def __contains__(self, version: str) -> bool:
        found = re.match(r"\.".join([r"(\d+)"] * len(self.low)), version)
        return found is not None and self.low <= tuple(map(int, found.groups())) < self.high

    def installed(self) -> str | None:
        """Return the version of the installed engine, or None if it is not installed. Does not import the
        engine.
        """
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def refusal(self) -> str:
        """Return the reason why cornplug does not run with the installed engine, or "" if the engine's
        version is in the range."""
        version = self.installed()
        if version is not None and version in self:
            return ""
        found = f"{self.engine} {version}"
        return f"{found} is outside the tested range {self}; install a release of cornplug that supports it"
