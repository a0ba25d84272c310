"""Folder into which a plan is written. A later run replaces only files of earlier runs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError
from cornplug.planner.launch import command_list
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Plan
from cornplug.planner.report import html_report, prometheus_files

WRITTEN: Final = ".cornplug-plan.json"
"""File with the names of the files that a run has written."""


def write(plan: Plan, folder: Path, *, transfer: Transfer = "nixl") -> tuple[list[Path], str]:
    """Write plan.json, report.html, commands.txt with its files, and the files for Prometheus.

    Returns their paths, and the reason if commands are missing. Raises ConfigError if a file with such a name
    exists that no earlier run wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Written next to their final location, so that each file is moved in one step and a failure leaves the
    # old plan intact.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as made:
        new = Path(made)
        plan.save(new / "plan.json")
        (new / "report.html").write_text(html_report.html(plan), encoding="utf-8")
        without = ""
        try:
            command_list.write(plan, new, transfer=transfer)
            prometheus_files.write(plan, new)
        except ConfigError as e:
            without = str(e)
        return _replace(folder, new), without


def _replace(folder: Path, new: Path) -> list[Path]:
    before = _written(folder)
    names = sorted(path.name for path in new.iterdir())
    for name in names:
        if (folder / name).exists() and name not in before:
            raise ConfigError(
                f"-o {folder}",
                f"{name} already exists and was not written by a plan",
                "Choose another folder.",
            )
    (folder / WRITTEN).write_text(json.dumps(sorted({*before, *names})) + "\n", encoding="utf-8")
    for name in names:
        os.replace(new / name, folder / name)
    for name in before - set(names):
        (folder / name).unlink(missing_ok=True)
    (folder / WRITTEN).write_text(json.dumps(names) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _written(folder: Path) -> set[str]:
    path = folder / WRITTEN
    if not path.exists():
        return set()
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"-o {folder}", f"{WRITTEN} cannot be read ({e})", "Choose another folder.") from e
    # cornplug never writes a name that contains a path.
    return {name for name in names if Path(name).name == name}
