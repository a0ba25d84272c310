"""Facts of a release, from pyproject.toml, and checks of its archives: for script/release and its tests.

release_checks.py tools | version | sdist ARCHIVE | sbom FILE OUT
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

TREE: Final = Path(__file__).parents[1]
_WRITTEN_BY_HATCHLING: Final = ("PKG-INFO", "pyproject.toml", ".gitignore")


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((TREE / "pyproject.toml").read_text())


def version() -> str:
    """The version, which stands in cornplug/__init__.py only."""
    path = TREE / project()["tool"]["hatch"]["version"]["path"]
    found = re.search(r'^__version__ = "(.+)"$', path.read_text(), re.MULTILINE)
    assert found is not None, f"{path} has no __version__"
    return found[1]


def tools() -> list[str]:
    """Requirements of the extra "release", and those of a build."""
    data = project()
    return [*data["project"]["optional-dependencies"]["release"], *data["build-system"]["requires"]]


def unlisted(names: Iterable[str]) -> list[str]:
    """Paths of an sdist (relative to its folder) that pyproject's list of the sdist does not include."""
    listed = [
        entry.lstrip("/") for entry in project()["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    ]
    folders = tuple(f"{entry}/" for entry in listed if (TREE / entry).is_dir())
    files = {path.name for entry in listed for path in TREE.glob(entry) if path.is_file()}
    files.update(_WRITTEN_BY_HATCHLING)
    return [name for name in names if name not in files and not name.startswith(folders)]


def check_sdist(archive: Path) -> list[str]:
    """Problems of an sdist: files that are not listed, and listed folders that are missing."""
    with tarfile.open(archive) as tar:
        names = [member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()]
    missing = {path.name for path in TREE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    missing -= {name.partition("/")[0] for name in names}
    return [
        *(f"{name} is not listed" for name in unlisted(names)),
        *(f"{name}/ is missing" for name in missing),
    ]


def complete_sbom(sbom: dict[str, Any]) -> dict[str, Any]:
    """The SBOM with cornplug's version. Raises ValueError where a runtime requirement is missing."""
    sbom["metadata"]["component"]["version"] = version()
    named = {canonical(component["name"]) for component in sbom["components"]}
    wanted = {canonical(re.split(r"[^\w.-]", text)[0]) for text in project()["project"]["dependencies"]}
    if missing := wanted - named:
        raise ValueError(f"the SBOM lacks {', '.join(sorted(missing))}")
    return sbom


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: list[str]) -> int:
    match argv:
        case ["tools"]:
            print("\n".join(tools()))
        case ["version"]:
            print(version())
        case ["sdist", archive]:
            problems = check_sdist(Path(archive))
            print("\n".join(problems) or "the sdist has the listed files and no others")
            return 1 if problems else 0
        case ["sbom", source, target]:
            sbom = complete_sbom(json.loads(Path(source).read_text()))
            Path(target).write_text(json.dumps(sbom, indent=1) + "\n")
            print(f"{len(sbom['components'])} components")
        case _:
            print((__doc__ or "").strip(), file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
