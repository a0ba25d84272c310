"""`openai.OpenAI` and `openai.AsyncOpenAI` over the routed transports."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import httpx

from cornplug.apps.client.class_routes import Routes
from cornplug.apps.client.engine_choice import EngineChooser, MissPrice
from cornplug.apps.client.engine_load import LoadPoller
from cornplug.apps.client.routed_call import CallRouter
from cornplug.apps.client.transports import AsyncRoutedTransport, RoutedTransport
from cornplug.errors import ConfigError

if TYPE_CHECKING:
    import openai

_BASE_URL: Final = "http://routed.invalid/v1"
"""Of the client: the transport puts an engine's address in its place."""
_NO_KEY: Final = "none"
"""An `OPENAI_API_KEY` of the environment is for another service."""
_TAKEN: Final = ("base_url", "http_client")


def router_of(routes: Routes, price: MissPrice | None, retry_s: float) -> CallRouter:
    """The router of one client. Raises ConfigError("retry_s")."""
    if not 0 <= retry_s < float("inf"):
        raise ConfigError("retry_s", f"{retry_s} is no time", "Give seconds, 0 for no retry.")
    chooser = EngineChooser(price)
    poller = LoadPoller(chooser.loaded)
    return CallRouter(routes, chooser, retry_s=retry_s, poke=poller.poke)


def sync_client(router: CallRouter, arguments: dict[str, Any]) -> openai.OpenAI:
    """A client with these arguments of `openai.OpenAI`. Raises ConfigError."""
    package = _package()
    http = httpx.Client(transport=RoutedTransport(router), trust_env=False, **_http(package, arguments))
    made: openai.OpenAI = package.OpenAI(http_client=http, **_defaults(arguments))
    return made


def async_client(router: CallRouter, arguments: dict[str, Any]) -> openai.AsyncOpenAI:
    """As `sync_client`, of `openai.AsyncOpenAI`."""
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
            "client", f"it needs {e.name}, which is not installed", "Run: pip install 'cornplug[client]'"
        ) from e
    return openai


def _http(package: ModuleType, arguments: dict[str, Any]) -> dict[str, Any]:
    for name in _TAKEN:
        if name in arguments:
            raise ConfigError(name, "the client has its own", "Leave it out, and give addresses as `routes`.")
    # The requests' own timeouts: openai sets them on each one, and takes this one for its default.
    seconds = package.DEFAULT_TIMEOUT
    timeout = httpx.Timeout(
        connect=seconds.connect, read=seconds.read, write=seconds.write, pool=seconds.pool
    )
    return {"timeout": timeout, "follow_redirects": False}


def _defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without retries of openai's: those would repeat requests that must not be repeated."""
    return {"api_key": _NO_KEY, "max_retries": 0, "base_url": _BASE_URL, **arguments}
