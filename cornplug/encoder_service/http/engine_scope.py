"""Names by which middleware and routes recognise engines of other hosts that have proved the secret."""

from __future__ import annotations

from typing import Final

from cornplug.qos import ServiceClass

SEAL: Final = "cornplug.engine_seal"
"""Key of a request's ASGI scope: its seal, once its proof was checked."""
ENGINES: Final = ServiceClass(name="/v1/engine")
"""The class of such engines until their sealed body is open and names the app."""
