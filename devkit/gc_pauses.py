"""A plugin of pytest: garbage collections of tests leave imported modules out.

Engines and torch are half a million objects, which every full collection would look at.
"""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    """Leave everything that exists now out of collections, which begin again."""
    gc.freeze()
    gc.enable()
