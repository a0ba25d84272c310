"""Code that every process of an engine runs before its own: delays and changes that no flag can ask for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_AFTER_IMPORT: Final = """import importlib.machinery
import sys

{code}


class _Finder:
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == {module!r} else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
"""


def injected_environment(folder: Path, code: str, *, into: str = "") -> Mapping[str, str]:
    """Environment of an engine whose processes run `code` when Python starts.

    Args:
        folder: Where the code is written, in a new folder.
        into: Name of a module. `code` then defines `change(module)`, which is called after each import of it.

    Python imports `sitecustomize` in each process before anything else, so the package itself has no switch.
    """
    place = Path(tempfile.mkdtemp(prefix="injected-", dir=folder))
    text = _AFTER_IMPORT.format(code=code, module=into) if into else code
    (place / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))}
