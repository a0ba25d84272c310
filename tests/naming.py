"""Finds tests whose names do not say what they test: `test_<unit>_<case>_<effect>`.

A unit is a class, function or module of the tree that the test's file mentions, the subject of that file, or
one of the parts that `PARTS` names. `python tests/naming.py [PATH...]` prints the other ones.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).parents[1]
PARTS: Final = frozenset(
    {
        "vllm",
        "sglang",
        "engine",
        "engines",
        "store",
        "encoder",
        "planner",
        "client",
        "server",
        "daemon",
        "demo",
    }
    | {
        "readme",
        "docs",
        "wheel",
        "replica",
        "tower",
        "request",
        "plan",
        "checkpoint",
        "connector",
        "scheduler",
    }
    | {"dockerfile", "compose", "manifest", "kustomize"}
    | {"worker", "page_key", "page_keys", "embedding_key", "plugin", "flags", "kv", "ec", "http", "cli"}
)
"""Units that are more than one module."""
NO_UNITS: Final = frozenset(
    {"a", "an", "the", "it", "no", "of", "some", "every", "what", "that", "and", "one"}
)
"""Words that are somewhere the name of a function, and begin a sentence everywhere else."""
MORE: Final = 2
"""Words that must follow the unit: its case and the effect."""


@cache
def defined() -> frozenset[str]:
    """Names of modules, classes and functions of the tree, in snake case and without leading underscores."""
    found = set()
    for root in ("cornplug", "devkit", "script", "benchmarks", "examples"):
        for file in (TREE / root).rglob("*.py"):
            found.add(file.stem)
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(snake(node.name))
    return frozenset(found)


def snake(name: str) -> str:
    """A name in snake case: `KVLayout` is `kv_layout`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


def units(file: Path, tree: ast.Module) -> frozenset[str]:
    """The units that tests of a file can be about."""
    mentioned = {file.stem.removeprefix("test_"), *file.relative_to(TREE / "tests").parts[:-1]}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                mentioned |= {snake(part) for part in name.split(".")}
    own = {file.stem.removeprefix("test_"), *file.stem.removeprefix("test_").split("_")}
    return frozenset((mentioned & defined()) | own | PARTS) - NO_UNITS


def misnamed(file: Path) -> list[str]:
    """The tests of a file whose names begin with no unit, or end with it."""
    tree = ast.parse(file.read_text())
    known = units(file, tree)
    tests = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [
        n.name for n in tests if n.name.startswith("test_") and not _is_named(n.name.split("_")[1:], known)
    ]


def _is_named(words: list[str], known: frozenset[str]) -> bool:
    return any("_".join(words[:n]) in known for n in range(1, len(words) - MORE + 1))


def main(paths: list[str]) -> int:
    bad = 0
    for name in paths or ["tests"]:
        path = Path(name).resolve()
        for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
            for test in misnamed(file):
                bad += 1
                print(f"{file.relative_to(TREE)}: {test}")
    print(f"{bad} names say no unit, case and effect")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
