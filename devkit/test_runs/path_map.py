"""The units of script/test-more that a change affects, by the table tests/path_map.toml."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from devkit.test_runs.units import TREE, Unit

TABLE: Final = TREE / "tests" / "path_map.toml"
EVERYTHING: Final = "*"


class NoBaseError(Exception):
    """git cannot tell what the change is."""


def changed_paths(base: str = "main", tree: Path = TREE) -> list[str]:
    """Paths that differ from the merge base with `base`: committed, uncommitted and untracked ones.

    Raises NoBaseError outside git or without this branch.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoBaseError(f"--changed compares with branch {base}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    (ancestor,) = git("merge-base", base, "HEAD")
    # --no-renames: the old path of a moved file counts too.
    changed = git("diff", "--name-only", "--no-renames", ancestor)
    return sorted({*changed, *git("ls-files", "--others", "--exclude-standard")})


@dataclass(frozen=True)
class PathMap:
    """The table, and the imports among tests and devkit."""

    groups: dict[str, list[str]]
    paths: dict[str, list[str]]
    tree: Path = TREE

    @classmethod
    def read(cls, file: Path = TABLE) -> PathMap:
        return cls(**tomllib.loads(file.read_text()))

    def select(self, units: Sequence[Unit], paths: Iterable[str]) -> list[Unit]:
        """The units that these changed paths affect."""
        targets = [target for path in paths for target in self.targets(path)]
        return [unit for unit in units if any(self._matches(unit, target) for target in targets)]

    def row(self, path: str) -> str | None:
        """The longest prefix in the table that the path starts with."""
        return max((prefix for prefix in self.paths if path.startswith(prefix)), key=len, default=None)

    def targets(self, path: str) -> list[str]:
        """What a changed path affects; everything if neither the table nor an import says so."""
        if (row := self.row(path)) is not None:
            return self.paths[row]
        if path.startswith(("tests/", "devkit/")) and path.endswith(".py"):
            return self._importers(path) or [EVERYTHING]
        return [EVERYTHING]

    def _matches(self, unit: Unit, target: str) -> bool:
        if target.startswith("@"):
            members = self.groups[target[1:]]
            excluded = [member[1:] for member in members if member.startswith("!")]
            return any(unit.starts_with(member) for member in members) and not any(
                unit.starts_with(member) for member in excluded
            )
        return target == EVERYTHING or unit.starts_with(target)

    def _importers(self, path: str) -> list[str]:
        """The tests that use a file of tests/ or devkit/: itself, its folder, or the files that import it."""
        name = path.rpartition("/")[2]
        if name.startswith("test_"):
            return [path]
        if name == "conftest.py":
            return [path.removesuffix("conftest.py")]
        reached, queue = {path}, [path]
        while queue:
            for importer in _imported_by(self.tree).get(queue.pop(), ()):
                if importer not in reached:
                    reached.add(importer)
                    queue.append(importer)
        folders = [found.removesuffix("conftest.py") for found in reached if found.endswith("/conftest.py")]
        return [*folders, *(found for found in reached if found.rpartition("/")[2].startswith("test_"))]


@cache
def _imported_by(tree: Path) -> dict[str, set[str]]:
    """File of tests/ or devkit/ -> the files there that import it."""
    files = [file for root in ("tests", "devkit") for file in (tree / root).rglob("*.py")]
    modules = {_module(file.relative_to(tree)): str(file.relative_to(tree)) for file in files}
    imported_by: dict[str, set[str]] = {}
    for file in files:
        path = file.relative_to(tree)
        for module in _imports(file, _module(path)):
            if module in modules:
                imported_by.setdefault(modules[module], set()).add(str(path))
    return imported_by


def _module(path: Path) -> str:
    """Name by which tests import a file: `tests` itself is on pytest's path."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "tests" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path, module: str) -> set[str]:
    """Modules that a file imports, with the packages around them."""
    found = set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                outer = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*outer, *filter(None, [base])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    for name in list(found):
        parts = name.split(".")
        found |= {".".join(parts[:n]) for n in range(1, len(parts))}
    return found
