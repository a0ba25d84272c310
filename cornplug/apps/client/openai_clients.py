"""Creates `openai.OpenAI` and `openai.AsyncOpenAI` clients that use the routed transports."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import httpx

from cornplug.apps.client.engine_choice import EngineChooser, LoadPoller, MissPrice
from cornplug.apps.client.routed_call import CallRouter, Routes
from cornplug.apps.client.transports import AsyncRoutedTransport, RoutedTransport
from cornplug.errors import ConfigError

if TYPE_CHECKING:
    import openai

_BASE_URL: Final = "http://routed.invalid/v1"
"""Base URL of the client. The transport replaces it by an engine's address."""
_NO_KEY: Final = "none"
"""API key that is sent by default, because an `OPENAI_API_KEY` in the environment is for another service."""
_TAKEN: Final = ("base_url", "http_client")


def router_of(routes: Routes, price: MissPrice | None, retry_s: float) -> CallRouter:
    """Return the router of one client. Raises ConfigError("retry_s")."""
    if not 0 <= retry_s < float("inf"):
        raise ConfigError("retry_s", f"{retry_s} is not a valid time", "Set seconds, or 0 for no retries.")
    chooser = EngineChooser(price)
    poller = LoadPoller(chooser.loaded)
    return CallRouter(routes, chooser, retry_s=retry_s, poke=poller.poke)


def sync_client(router: CallRouter, arguments: dict[str, Any]) -> openai.OpenAI:
    """Create a client with these arguments of `openai.OpenAI`. Raises ConfigError."""
    package = _package()
    http = httpx.Client(transport=RoutedTransport(router), trust_env=False, **_http(package, arguments))
    made: openai.OpenAI = package.OpenAI(http_client=http, **_defaults(arguments))
    return made


def async_client(router: CallRouter, arguments: dict[str, Any]) -> openai.AsyncOpenAI:
    """Create a client with these arguments of `openai.AsyncOpenAI`. Raises ConfigError."""
    package = _package()
    transport = AsyncRoutedTransport(router)
    http = httpx.AsyncClient(transport=transport, trust_env=False, **_http(package, arguments))
    made: openai.AsyncOpenAI = package.AsyncOpenAI(http_client=http, **_defaults(arguments))
    return made


def _package() -> ModuleType:
    try:
        import openai
    except ModuleNotFoundError as e:
        raise ConfigError(
            "client", f"the package {e.name} is not installed", "Run: pip install 'cornplug[client]'"
        ) from e
    return openai


def _http(package: ModuleType, arguments: dict[str, Any]) -> dict[str, Any]:
    for name in _TAKEN:
        if name in arguments:
            raise ConfigError(
                name, "not supported by this client", "Remove it, and pass addresses as `routes`."
            )
    # openai sets the timeout of each request, and uses this value as its default.
    seconds = package.DEFAULT_TIMEOUT
    timeout = httpx.Timeout(
        connect=seconds.connect, read=seconds.read, write=seconds.write, pool=seconds.pool
    )
    return {"timeout": timeout, "follow_redirects": False}


def _defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add default arguments of the client.

    The openai package's own retries are off, because they would repeat requests that must not be repeated.
    """
    return {"api_key": _NO_KEY, "max_retries": 0, "base_url": _BASE_URL, **arguments}
