"""Expected errors of cornplug: a test compares an error's attributes, and not the sentences of its message.

with expect_error(ConfigError, field="store.metrics"):
    start_store(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from cornplug.errors import CornplugError

E = TypeVar("E", bound=CornplugError)


@contextmanager
def expect_error(
    error: type[E], *, match: str | None = None, **attributes: object
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error whose attributes, such as `field` or `reason`, have these values.

    Args:
        error: Class of the error.
        match: Pattern for values in the message that the test itself chose, such as a path or a number.
        attributes: Expected attributes of the error.
    """
    __tracebackhide__ = True
    with pytest.raises(error, match=match or None) as caught:
        yield caught
    found = {name: getattr(caught.value, name, None) for name in attributes}
    assert found == attributes, f"another error was raised: {caught.value}"
