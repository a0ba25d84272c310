"""The release's number in the files of deploy/, and the Kustomize base that its Helm chart renders."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

from cornplug import __version__

TREE: Final = Path(__file__).parents[1]
CHART: Final = TREE / "deploy" / "helm" / "cornplug"
BASE: Final = TREE / "deploy" / "kustomize" / "base"
COMPOSE: Final = TREE / "deploy" / "compose.yaml"
_NUMBERS: Final = {
    CHART / "Chart.yaml": r'^(?:appV|v)ersion: "?([\w.]+)"?$',
    COMPOSE: r"^    image: cornplug-\w+:([\w.]+)$",
}
"""File -> lines that have the number of the release."""
_HEAD: Final = "# Rendered from deploy/helm/cornplug by script/manifests: change the chart.\n"

Objects = dict[str, list[dict[str, Any]]]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as they are, and each object is written in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def render(values: Mapping[str, Any] | None = None) -> Objects:
    """File of the chart's templates -> its objects, of a release "cornplug" with `values` over the defaults.

    Raises helm_python.HelmError for values that the chart refuses.
    """
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(json.loads(json.dumps(values)) if values else None, name="cornplug")
    found = {
        Path(name).name: [one for one in yaml.safe_load_all(text) if one] for name, text in files.items()
    }
    return {name: objects for name, objects in sorted(found.items()) if objects}


def base() -> dict[str, str]:
    """Name -> text of each file of the base."""
    objects = render()
    listed = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(objects),
    }
    files = {"kustomization.yaml": [listed], **objects}
    return {
        name: _HEAD + yaml.dump_all(each, Dumper=_Dumper, sort_keys=False, width=110)
        for name, each in files.items()
    }


def numbered(file: Path) -> str:
    """The text of a file of `_NUMBERS` with this release's number."""

    def line(found: re.Match[str]) -> str:
        start = found.start(1) - found.start()
        return found[0][:start] + __version__ + found[0][start + len(found[1]) :]

    return re.sub(_NUMBERS[file], line, file.read_text(), flags=re.MULTILINE)


def main(argv: list[str]) -> int:
    """Exit status 0; with --check 1 where a file is missing, differs or is left over."""
    parser = argparse.ArgumentParser(prog="script/manifests", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, name the files that differ")
    check = parser.parse_args(argv).check
    # First: the chart's number is in what it renders.
    stale = _replaced({file: numbered(file) for file in _NUMBERS}, check=check)
    wanted: dict[Path, str | None] = {BASE / name: text for name, text in base().items()}
    left = set(BASE.glob("*.yaml")) - wanted.keys()
    stale += _replaced({**wanted, **dict.fromkeys(left)}, check=check)
    for file in sorted(stale):
        print(f"{file.relative_to(TREE)}: {'out of date: run script/manifests' if check else 'written'}")
    return int(check and bool(stale))


def _replaced(wanted: Mapping[Path, str | None], *, check: bool) -> list[Path]:
    """The files whose texts differ, None: should not be there; unless `check`, they are as wanted then."""
    stale = [file for file, text in wanted.items() if (file.read_text() if file.exists() else None) != text]
    for file in () if check else stale:
        text = wanted[file]
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
