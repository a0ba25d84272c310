"""Whether the version that a trainer gave new weights may name them (`engine.trust_weight_version`).

A version names the weights at the end of an update and nothing in between: an update is one session of the
engine, of one call or of many. A trainer that gives none, or does not count, gets what it would without the
setting, until a version of its own comes with an update.
"""

from __future__ import annotations

from typing import Final

from cornplug.engine_common.engine_state import LONGEST_VERSION_BYTES

DEFAULT: Final = "default"
"""Both engines' version of weights that no trainer has named."""


def unusable(version: object, before: object) -> str:
    """The reason why `version` may not name weights that were replaced; "" if it may.

    `before` is the engine's version until then.
    """
    if not isinstance(version, str) or not version.strip():
        return "no weight_version came with the update"
    if version == DEFAULT:
        return f"{DEFAULT!r} is the version of weights that no trainer named"
    if version == before:
        return f"weight_version {version!r} is that of the weights before"
    if len(version.encode("utf-8", errors="surrogatepass")) > LONGEST_VERSION_BYTES:
        return "the weight_version is too long"
    return ""
