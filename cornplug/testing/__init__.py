"""For authors of a store: the contract that every store must pass, and faults to pass it under.

Loaded when asked for: `StoreContract` needs pytest, which the other modules here do not.
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
