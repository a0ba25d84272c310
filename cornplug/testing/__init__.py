"""Tools for authors of a store: contract tests that every store must pass, and a store with injected faults.

Modules are imported lazily, because only `StoreContract` needs pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cornplug.testing.faulty import FaultyStore
    from cornplug.testing.store import StoreContract

__all__ = ["FaultyStore", "StoreContract"]


def __getattr__(name: str) -> object:
    if name == "FaultyStore":
        return import_module("cornplug.testing.faulty").FaultyStore
    if name == "StoreContract":
        return import_module("cornplug.testing.store").StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
