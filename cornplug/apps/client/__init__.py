"""OpenAI client of an application. It sends each request directly to the engine that can begin first.

    openai.OpenAI ──> RoutedTransport ──> RoutedCall: chooses the engine, repeats requests, continues streams
                                            │         (no I/O, also used by AsyncRoutedTransport)
                                            ├─> EngineChooser: prefixes, queues and pauses of each engine
                                            └─> StreamContinuation: text so far, and the request for the rest

`Application.client()` of `cornplug.apps` creates a client, and only then imports this package.
"""

from cornplug.apps.client.engine_choice import MissPrice
from cornplug.apps.client.transports import AsyncRoutedTransport, RoutedTransport

__all__ = ["AsyncRoutedTransport", "MissPrice", "RoutedTransport"]
