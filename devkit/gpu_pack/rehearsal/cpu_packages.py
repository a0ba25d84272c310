"""Packages for a folder on PYTHONPATH with which the archive's vLLM runs on a CPU.

    python cpu_packages.py OUT

vLLM takes its CPU platform if its version ends in "+cpu". Packages of dev/ give it a Triton backend, a GPU's
KV layout and native offloading. `without_c` replaces the compiled operators of vLLM's CPU build.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

_TREE: Final = Path(__file__).parents[3]
_DEV: Final = ("triton-interpreted-cpu", "gpu-like-cpu", "one-process-cpu", "host-offloading-cpu")


def main() -> int:
    """Write the packages and their metadata."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    version = distribution("vllm").version
    local = f"{version.partition('+')[0]}+cpu"
    _metadata(out, "vllm", local, {})
    for name in _DEV:
        folder = _TREE / "dev" / name
        for source in (*folder.glob("*.py"), *(path for path in folder.iterdir() if path.is_dir())):
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, out / source.name)
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        _metadata(out, project["name"], "1", project["entry-points"])
    shutil.copy(Path(__file__).with_name("without_c.py"), out)
    _metadata(out, "without-c", "1", {"vllm.general_plugins": {"without_c": "without_c:register"}})
    return 0


def _metadata(out: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    info = out / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, of in groups.items():
        lines += [f"[{group}]", *(f"{key} = {target}" for key, target in of.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    sys.exit(main())
