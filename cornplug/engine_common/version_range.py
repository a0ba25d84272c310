"""The releases of an engine that cornplug's tests run on."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A half-open range of releases of one engine."""

    engine: str
    """The engine's name in messages."""
    package: str
    """The engine's distribution."""
    low: tuple[int, ...]
    high: tuple[int, ...]
    """As many numbers as `low`: further numbers of a version do not count."""

    def __str__(self) -> str:
        """As pip writes it: ">=0.32,<0.33"."""
        low, high = (".".join(map(str, bound)) for bound in (self.low, self.high))
        return f">={low},<{high}"

    def __contains__(self, version: str) -> bool:
        found = re.match(r"\.".join([r"(\d+)"] * len(self.low)), version)
        return found is not None and self.low <= tuple(map(int, found.groups())) < self.high

    def installed(self) -> str | None:
        """The installed engine's version, None if it is not installed. Imports no engine."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def refusal(self) -> str:
        """Why cornplug does not run beside the installed engine; "" for a version in the range."""
        version = self.installed()
        if version is not None and version in self:
            return ""
        found = f"{self.engine} {version}"
        return f"{found} is outside the tested range {self}; install a release of cornplug that supports it"
