"""Folder to which a plan is written. A later run replaces only the files that an earlier run wrote."""

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
"""File that lists the names of the files that a run wrote."""


def write(plan: Plan, folder: Path, *, transfer: Transfer = "nixl") -> tuple[list[Path], str]:
    """Write plan.json, report.html, commands.txt with its files, and the files for Prometheus.

    Returns the paths of the files, and the reason if the commands could not be written, or "". Raises
    ConfigError if a file with one of the names already exists and no earlier run wrote it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # First written to a subfolder, so that each file is moved to its final path in one step, and a failure
    # leaves the old plan intact.
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
    # cornplug writes only plain file names. Ignore others, so that no file outside the folder is deleted.
    return {name for name in names if Path(name).name == name}
