"""Names that identify engines of other hosts which have proved that they have the secret."""

from __future__ import annotations

from typing import Final

from cornplug.qos import ServiceClass

SEAL: Final = "cornplug.engine_seal"
"""Key of a request's ASGI scope for its seal, set after the proof was checked."""
ENGINES: Final = ServiceClass(name="/v1/engine")
"""Class of such engines until the sealed body is open and contains the app."""
