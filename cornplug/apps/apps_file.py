"""The apps file, which is read and written as TOML: the planner's input with the resources of one host.

The pool is optional. `format_toml` writes TOML, because the standard library can only read TOML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import Field

from cornplug.apps import launch_checks
from cornplug.errors import ConfigError
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.field_types import suggest_known_name
from cornplug.planner.inputs.json_schema import plan_schema
from cornplug.planner.inputs.schema import Application, NodeClass, PlanInput

if TYPE_CHECKING:
    import openai

    from cornplug.apps.engine_choice import MissPrice
    from cornplug.apps.routed_call import Addresses, CallRouter


_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


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

        Raises ConfigError if `cornplug[client]` is not installed, or if the routes or another argument are
        invalid.

        Args:
            routes: Path of a launch's `routes.json` or run folder, or URLs of engines, optionally as a
                mapping from URLs to weights. The default is this user's only launch that has the request
                class.
            request: Name of the request class. The default is the application's only class.
            retry_s: Time in seconds during which a request may be sent again if no engine has executed it.
            price: Speeds with which the client compares a cache miss with a longer queue.
            openai_arguments: Arguments for `openai.OpenAI`, such as `timeout` or `api_key`.
        """
        from cornplug.apps import client

        return client.sync_client(self._create_router(routes, request, retry_s, price), openai_arguments)

    def async_client(
        self,
        *,
        routes: Path | Addresses | None = None,
        request: str | None = None,
        retry_s: float = 30.0,
        price: MissPrice | None = None,
        **openai_arguments: Any,
    ) -> openai.AsyncOpenAI:
        """Create an `openai.AsyncOpenAI` client. The arguments are the same as in `client`."""
        from cornplug.apps import client

        return client.async_client(self._create_router(routes, request, retry_s, price), openai_arguments)

    def _create_router(
        self,
        routes: Path | Addresses | None,
        request: str | None,
        retry_s: float,
        price: MissPrice | None,
    ) -> CallRouter:
        from cornplug.apps import client
        from cornplug.apps.routed_call import resolve_routes

        found = resolve_routes(self.name, [one.name for one in self.requests], routes, request)
        return client.create_router(found, price, retry_s)


def format_toml(data: Mapping[str, Any]) -> str:
    """Return `data` as TOML. Its values are tables, lists, strings, numbers and booleans."""
    return "\n".join(_format_table((), data)).lstrip("\n") + "\n"


def _format_table(path: tuple[str, ...], data: Mapping[str, Any]) -> Iterator[str]:
    later: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) or (isinstance(value, list) and _are_tables(value)):
            later[key] = value
        else:
            yield f"{_format_key(key)} = {_format_value(value)}"
    for key, value in later.items():
        inner = (*path, _format_key(key))
        head = ".".join(inner)
        for one in value if isinstance(value, list) else [value]:
            yield from ("", f"[[{head}]]" if isinstance(value, list) else f"[{head}]")
            yield from _format_table(inner, one)


def _are_tables(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, Mapping) for one in value)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    if isinstance(value, str):
        # JSON strings are valid TOML strings, except for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _format_value(key)


class AppsFile(PlanInput):
    """Input of `cornplug launch`."""

    pool: list[NodeClass] = Field(default_factory=list)
    """Machines that you can rent or own, for `cornplug plan`. A launch does not use them."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an apps file. Raises ConfigError with the line and the remedy of each error."""
        return toml_reader.read_as(cls, path, launch_checks.errors)

    def check(self) -> Self:
        """Check this file, which was created in Python, and return it.

        Raises ConfigError with the first error.
        """
        for error in launch_checks.errors(self):
            raise error
        return self

    def application(self, name: str) -> RoutedApplication:
        """Return the application with this name, to create a client. Raises ConfigError for an unknown
        name."""
        for one in self.applications:
            if one.name == name:
                return RoutedApplication.model_validate(one.model_dump(exclude_unset=True))
        names = [one.name for one in self.applications]
        raise ConfigError("application", f"unknown application {name!r}", suggest_known_name(name, names))

    def to_toml(self) -> str:
        """Return the file as TOML that `read` accepts.

        The text contains only values that were set. Paths are unchanged.
        """
        return format_toml(self.model_dump(mode="json", exclude_unset=True, exclude_none=True))

    @classmethod
    def schema_of_file(cls) -> dict[str, Any]:
        """Return the JSON schema (draft 2020-12) of an apps file."""
        return plan_schema(cls)
