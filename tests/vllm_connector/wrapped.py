"""cornplug's wrappers, found by the vLLM functions that they are for, and called as vLLM calls them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def wrapper_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """Wrapper that `module` registers for a vLLM function, as `Class.function`."""
    tables = [table for table_name, table in vars(module).items() if table_name.endswith("WRAPS")]
    found = {wrapper for table in tables for _, function, wrapper in table if function == name}
    (wrapper,) = found
    return wrapper
