"""cornplug's hooks, found by the SGLang functions that they are for, and called as SGLang's registry does."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def hook_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """Function that `module` registers for an SGLang function, whose dotted path ends in `name`."""
    tables = [table for table_name, table in vars(module).items() if table_name.endswith("HOOKS")]
    found = {hook.function for table in tables for hook in table if hook.target.endswith(f".{name}")}
    (function,) = found
    return function
