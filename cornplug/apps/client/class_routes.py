"""Engines of one request class: from `routes.json` of `cornplug launch`, or from addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cornplug.encoder_service.client import rendezvous
from cornplug.errors import ConfigError
from cornplug.planner.inputs.input_error import nearest
from cornplug.private_paths import runtime_dir

_FIELD = "routes"
Addresses = Sequence[str] | Mapping[str, float]
"""URLs of engines, or a mapping of URLs to each engine's share of the requests."""


@dataclass(frozen=True, slots=True)
class ClassRoute:
    """Destination of the requests of one class, and the fields that they carry."""

    engines: Mapping[str, float]
    """URL without a trailing slash -> weight."""
    priority: int | None = None
    cache_salt: str | None = None


Routes = Callable[[], ClassRoute]
"""Function that returns the current route."""


def routes_of(
    app: str, classes: Sequence[str], source: Path | Addresses | None, request: str | None
) -> Routes:
    """Return the routes of one request class of an application.

    Args:
        app: Name of the application.
        classes: Names of its request classes.
        source: `routes.json` or its folder, or addresses. By default this user's only launch that has the
            class.
        request: Request class. By default the application's only class.

    Raises ConfigError with the field `request` or `routes`.
    """
    if request is None and len(classes) != 1:
        raise ConfigError(
            "request",
            f"missing; {app} has the classes {', '.join(classes)}",
            "Set it to one of these classes.",
        )
    if request is not None and request not in classes:
        raise ConfigError("request", f"{app} has no class {request!r}", nearest(request, list(classes)))
    name = f"{app}/{request or classes[0]}"
    if source is None:
        return RoutesFile(_launched(name), name).current
    if isinstance(source, Path):
        return RoutesFile(source / "routes.json" if source.is_dir() else source, name).current
    fixed = ClassRoute(_engines(source))
    return lambda: fixed


class RoutesFile:
    """Route of one class in a `routes.json`, read again when the file changes."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._route = self._read()

    def current(self) -> ClassRoute:
        """Return the current route, or the last one while the file cannot be read."""
        with self._lock:
            try:
                if self._stamp_now() != self._stamp:
                    self._route = self._read()
            except (OSError, ConfigError):
                pass
            return self._route

    def _stamp_now(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> ClassRoute:
        try:
            stamp = self._stamp_now()
            table = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, Any]])
        except (OSError, msgspec.DecodeError) as e:
            remedy = "Pass the routes.json of a launch, or addresses of engines."
            raise ConfigError(_FIELD, f"{self._path} cannot be read ({e})", remedy) from e
        if self._name not in table:
            raise ConfigError(
                _FIELD, f"{self._path} has no class {self._name!r}", nearest(self._name, list(table))
            )
        entry = table[self._name]
        try:
            engines = {str(one["url"]): float(one["weight"]) for one in entry["to"]}
        except (KeyError, TypeError, ValueError) as e:
            remedy = "Pass a file written by `cornplug launch`."
            raise ConfigError(_FIELD, f"{self._path}: {self._name} has no addresses", remedy) from e
        self._stamp = stamp
        return ClassRoute(_engines(engines), entry.get("priority"), entry.get("cache_salt"))


def _engines(addresses: Addresses) -> Mapping[str, float]:
    try:
        return rendezvous.services(addresses)
    except ConfigError as e:
        raise ConfigError(_FIELD, str(e).partition(": ")[2].partition(". ")[0], e.remedy) from e


def _launched(name: str) -> Path:
    """Return the `routes.json` of this user's only launch that has the class."""
    found = []
    for path in sorted(runtime_dir().glob("plan-*/routes.json")):
        try:
            if name in msgspec.json.decode(path.read_bytes(), type=dict[str, Any]):
                found.append(path)
        except (OSError, msgspec.DecodeError):
            continue
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or f"none in {runtime_dir()}"
        problem = f"{len(found)} launches of this user have the class {name!r} ({listed})"
        raise ConfigError(_FIELD, problem, "Pass the run folder of one launch, or addresses of engines.")
    return found[0]
