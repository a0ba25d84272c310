"""Import every module of the installed cornplug and check where each came from.

Usage: import_all.py SITE_PACKAGES. Exits 1 naming each module that does not import, or that comes from
another folder. A module that stands on an extra's package may fail for that package alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

OF_AN_EXTRA = {
    "cornplug.store.far.mooncake_client": "mooncake",
    "cornplug.store.far.object_store": "obstore",
    "cornplug.store.far.valkey_store": "valkey",
}
"""Imported for a URL that names them only (`store/far/open_far.py`)."""


def main(site: Path) -> int:
    import cornplug

    names = ["cornplug", *(m.name for m in pkgutil.walk_packages(cornplug.__path__, "cornplug."))]
    # Each engine has a separate environment.
    for engine, room in (("vllm", "cornplug.vllm_connector."), ("sglang", "cornplug.sglang_hooks.")):
        if importlib.util.find_spec(engine) is None:
            names = [name for name in names if not name.startswith(room)]
    strays, absent = [], []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or e.name != OF_AN_EXTRA.get(name):
                raise
            absent.append(name)
            continue
        if not Path(module.__file__ or "").resolve().is_relative_to(site.resolve()):
            strays.append(f"{name}: {module.__file__}")
    for stray in strays:
        print(f"not from the wheel: {stray}", file=sys.stderr)
    print(f"{len(names) - len(absent)} modules import from the wheel")
    if absent:
        print(f"of extras that are not installed here: {', '.join(absent)}")
    return 1 if strays else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
