"""HTTP requests that a service has received and not answered yet, for tests of its end."""

from __future__ import annotations

import select
from collections.abc import Iterable
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any, Self
from urllib.parse import urlsplit

import httpx


class OpenRequests:
    """POST requests, each on its own connection. `send` them, then read the `statuses`."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._url, self._headers = url, headers or {}
        self._connections: list[HTTPConnection] = []
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def send(self, path: str, forms: Iterable[dict[str, Any]]) -> None:
        """Send a request for each form (`data` and `files` of httpx) and return when the service has received
        all of them."""
        parts = urlsplit(self._url)
        host, port = str(parts.hostname), parts.port
        for form in forms:
            request = httpx.Request("POST", f"{self._url}{path}", headers=self._headers, **form)
            connection = HTTPConnection(host, port, timeout=60)
            self._closing.callback(connection.close)
            connection.request("POST", path, body=request.read(), headers=dict(request.headers))
            self._connections.append(connection)
        # The service's event loop reads its connections in turn: with the second answer to a later request,
        # it has begun with all of the earlier ones.
        with httpx.Client(timeout=60, trust_env=False) as http:
            for _ in range(2):
                http.get(f"{self._url}/health").raise_for_status()

    def answered(self) -> int:
        """Number of requests whose answer has arrived."""
        return len(select.select([each.sock for each in self._connections], [], [], 0)[0])

    def statuses(self) -> list[int]:
        """Wait for the answers and return their statuses. A connection that is cut off raises an error."""
        found = []
        for connection in self._connections:
            answer = connection.getresponse()
            answer.read()
            found.append(answer.status)
        return found
