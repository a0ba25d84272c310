"""What a package re-exports, it lists; what it lists, it has."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType

import pytest

import cornplug

# Rooms whose modules import an engine's own code are checked by the integration tests.
FOUND = [
    info
    for info in pkgutil.walk_packages(cornplug.__path__, "cornplug.")
    if not info.name.startswith(("cornplug.vllm_connector.", "cornplug.sglang_hooks."))
]
MODULES = ["cornplug", *(info.name for info in FOUND)]
PACKAGES = ["cornplug", *(info.name for info in FOUND if info.ispkg)]


def public_names(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }


@pytest.mark.parametrize("name", MODULES)
def test_listed_names_exist(name: str) -> None:
    module = import_module(name)
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert [n for n in listed if not hasattr(module, n)] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_exported_members_package_with_a_list_lists_all(name: str) -> None:
    package = import_module(name)
    ours = {
        n
        for n in public_names(package)
        if getattr(getattr(package, n), "__module__", "").startswith("cornplug.")
    }
    assert not hasattr(package, "__all__") or ours <= set(package.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_exported_members_every_module_has_a_docstring(name: str) -> None:
    assert (import_module(name).__doc__ or "").strip()
