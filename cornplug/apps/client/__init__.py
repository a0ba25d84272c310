"""OpenAI client of an application. Without a router, it sends each request to the engine that responds first.

    openai.OpenAI ──> RoutedTransport ──> RoutedCall: the engine, whether to send again, the rest of a stream
                                            │         (no I/O, the same for AsyncRoutedTransport)
                                            ├─> EngineChooser: prefixes, queues and pauses of each engine
                                            └─> StreamContinuation: text so far, and the request for the rest

`Application.client()` of `cornplug.apps` creates a client, and only then imports this package.
"""

from cornplug.apps.client.engine_choice import MissPrice
from cornplug.apps.client.transports import AsyncRoutedTransport, RoutedTransport

__all__ = ["AsyncRoutedTransport", "MissPrice", "RoutedTransport"]
