"""What an object is made of, for tests that reach no further than its collaborators' public names."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


def kept(root: object, kind: type[T], beyond: tuple[type, ...] = ()) -> list[T]:
    """Objects of a kind that `root` keeps alive, once for each reference, not through objects of `beyond`."""
    stops = (kind, type, ModuleType, FunctionType, *beyond)
    left, seen, found = [root], set[int](), list[T]()
    while left:
        here = left.pop()
        # The garbage collector does not visit the keys of a dictionary that are all strings.
        for one in [*list(here), *list(here.values())] if isinstance(here, dict) else gc.get_referents(here):
            if isinstance(one, kind):
                found.append(one)
            if id(one) not in seen and not isinstance(one, stops):
                seen.add(id(one))
                left.append(one)
    return found


@contextmanager
def recorded(module: ModuleType, name: str) -> Iterator[list[Any]]:
    """Objects of a class of this name in `module` that are created meanwhile."""
    made, kind = list[Any](), getattr(module, name)
    begin = kind.__init__

    def init(one: Any, *args: Any, **kwargs: Any) -> None:
        begin(one, *args, **kwargs)
        made.append(one)

    with mock.patch.object(kind, "__init__", init):
        yield made
