"""An application's OpenAI client: each request goes to the engine that answers it first, without a router.

    openai.OpenAI ──> RoutedTransport ──> RoutedCall: the engine, whether to send again, the rest of a stream
                                            │         (no I/O, the same for AsyncRoutedTransport)
                                            ├─> EngineChooser: prefixes, queues and pauses of each engine
                                            └─> StreamContinuation: text so far, and the request for the rest

`Application.client()` of `cornplug.apps` makes one. Nothing here is imported before.
"""

from cornplug.apps.client.engine_choice import MissPrice
from cornplug.apps.client.transports import AsyncRoutedTransport, RoutedTransport

__all__ = ["AsyncRoutedTransport", "MissPrice", "RoutedTransport"]
