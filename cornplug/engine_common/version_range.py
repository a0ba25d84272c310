"""Releases of an engine that cornplug is tested with."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A half-open range of releases of one engine."""

    engine: str
    """Name of the engine in messages."""
    package: str
    """Name of the engine's distribution package."""
    low: tuple[int, ...]
    high: tuple[int, ...]
    """Upper bound, with as many numbers as `low`. Further numbers of a version do not count."""

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
        """Return the reason why cornplug does not run with the installed engine, or "" if its version is in
        the range.
        """
        version = self.installed()
        if version is not None and version in self:
            return ""
        found = f"{self.engine} {version}"
        return f"{found} is outside the tested range {self}; install a release of cornplug that supports it"
