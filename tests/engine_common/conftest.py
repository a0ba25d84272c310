"""Each test begins with an engine whose weights are the checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cornplug.engine_common import engine_state


@pytest.fixture(autouse=True)
def original_weights() -> Iterator[None]:
    engine_state.current().mark_weights_unknown(False)
    yield
    engine_state.current().mark_weights_unknown(False)
