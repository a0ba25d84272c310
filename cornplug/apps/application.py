"""Application with a method that creates its OpenAI client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cornplug.planner.inputs.schema import Application

if TYPE_CHECKING:
    import openai

    from cornplug.apps.client.engine_choice import MissPrice
    from cornplug.apps.client.routed_call import Addresses, CallRouter


class RoutedApplication(Application):
    """Requests to one LLM, with their latency targets."""

    def client(
        self,
        *,
        routes: Path | Addresses | None = None,
        request: str | None = None,
        retry_s: float = 30.0,
        price: MissPrice | None = None,
        **openai_arguments: Any,
    ) -> openai.OpenAI:
        """Create an `openai.OpenAI` client whose requests go to the engines of one request class.

        Needs `cornplug[client]`. Raises ConfigError.

        Args:
            routes: `routes.json` of a launch or its run folder, or the engines' URLs, optionally as a
                mapping to weights. By default the only launch of this user that has the class.
            request: Request class. By default the application's only class.
            retry_s: Time in seconds during which a request may be sent again if no engine has executed it.
            price: Speeds used to compare a cache miss with a longer queue.
            openai_arguments: Arguments for `openai.OpenAI`, such as `timeout` or `api_key`.
        """
        from cornplug.apps.client import openai_clients

        return openai_clients.sync_client(self._router(routes, request, retry_s, price), openai_arguments)

    def async_client(
        self,
        *,
        routes: Path | Addresses | None = None,
        request: str | None = None,
        retry_s: float = 30.0,
        price: MissPrice | None = None,
        **openai_arguments: Any,
    ) -> openai.AsyncOpenAI:
        """Create an `openai.AsyncOpenAI` client, with the same arguments as `client`."""
        from cornplug.apps.client import openai_clients

        return openai_clients.async_client(self._router(routes, request, retry_s, price), openai_arguments)

    def _router(
        self,
        routes: Path | Addresses | None,
        request: str | None,
        retry_s: float,
        price: MissPrice | None,
    ) -> CallRouter:
        from cornplug.apps.client import openai_clients
        from cornplug.apps.client.routed_call import routes_of

        found = routes_of(self.name, [one.name for one in self.requests], routes, request)
        return openai_clients.router_of(found, price, retry_s)
