"""Change modules right after they are imported: `sitecustomize.py` of both stand-ins uses it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Hook = Callable[[ModuleType], None]


class After(MetaPathFinder):
    """Calls each hook with its module once the module is there."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = self._hooks.get(fullname)
        spec = PathFinder.find_spec(fullname, path) if hook else None
        if hook is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(hooks: Mapping[str, Hook]) -> None:
    """Call these hooks, by name of module."""
    sys.meta_path.insert(0, After(hooks))


def activate_triton(driver: ModuleType) -> None:
    """Triton's CUDA driver calls itself active: kernels are decorated, never launched."""
    driver.CudaDriver.is_active = staticmethod(lambda: True)
