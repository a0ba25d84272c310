"""Modules of an example's folder: each example has its own, some by the same names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@contextmanager
def example_modules(
    monkeypatch: pytest.MonkeyPatch, folder: Path, names: Sequence[str]
) -> Iterator[list[ModuleType]]:
    """The folder's modules of these names, in order; forgotten on leaving."""
    monkeypatch.syspath_prepend(str(folder))
    for name in names:
        sys.modules.pop(name, None)
    yield [import_module(name) for name in names]
    for name in names:
        sys.modules.pop(name, None)
