"""Import every module of the installed cornplug and check where each came from.

Usage: import_all.py SITE_PACKAGES. Exits 1 naming each module that does not import, or that
was found outside the folder given.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path


def main(site: Path) -> int:
    import cornplug

    names = ["cornplug", *(m.name for m in pkgutil.walk_packages(cornplug.__path__, "cornplug."))]
    # Each engine has a separate environment.
    for engine, room in (("vllm", "cornplug.vllm_connector."), ("sglang", "cornplug.sglang_hooks.")):
        if importlib.util.find_spec(engine) is None:
            names = [name for name in names if not name.startswith(room)]
    strays = []
    for name in names:
        module = importlib.import_module(name)
        if not Path(module.__file__ or "").resolve().is_relative_to(site.resolve()):
            strays.append(f"{name}: {module.__file__}")
    for stray in strays:
        print(f"not from the wheel: {stray}", file=sys.stderr)
    print(f"{len(names)} modules import from the wheel")
    return 1 if strays else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
