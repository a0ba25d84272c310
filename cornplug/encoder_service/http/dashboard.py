"""Route `GET /v1/status`, and the page at `/` that shows the status.

The page consists of static files, without a build step and without external resources. Names that clients
choose are inserted only as text nodes, and the content security policy forbids inline scripts.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Response

from cornplug import __version__
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.http.drain import DrainState
from cornplug.encoder_service.http.models import ModelRow, ModelsRoute
from cornplug.encoder_service.telemetry.service_metrics import totals

State = Literal["serving", "draining", "down"]
APPS_SHOWN: Final = 20
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE: Final = Path(__file__).with_name("static")
_TYPES: Final[Mapping[str, str]] = {
    "index.html": "text/html; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
    "status.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class AppRow(pydantic.BaseModel):
    """Number of results sent to one app since the start."""

    app: str
    answers: int


class RefusalRow(pydantic.BaseModel):
    """Number of refusals since the start."""

    qos: str
    reason: str
    refusals: int


class ExecutorsView(pydantic.BaseModel):
    alive: int
    total: int


class Overview(pydantic.BaseModel):
    """Current state of the service. Its history is in Prometheus."""

    instance: str = pydantic.Field(
        description="Random id that changes at each restart, when counts restart at 0."
    )
    version: str
    state: State
    now_s: float = pydantic.Field(description="Unix time of this response.")
    uptime_s: float
    executors: ExecutorsView
    store: bool = pydantic.Field(description="Whether embeddings are saved in a store of the host.")
    models: list[ModelRow]
    waiting: int = pydantic.Field(description="Requests admitted and not yet answered.")
    predicted_s: dict[str, float] = pydantic.Field(
        description="Predicted seconds until a medium like the last one of its class is answered, by class. "
        "0 if the class had no medium in the last 10 s."
    )
    answers: dict[str, int] = pydantic.Field(description="Results since the start, by origin.")
    tokens: int = pydantic.Field(description="Tokens computed by a tower since the start.")
    apps: list[AppRow] = pydantic.Field(description=f"The {APPS_SHOWN} apps with the most results.")
    refusals: list[RefusalRow]


class StatusReport:
    """Builds the `Overview` of a service's current state. Use it from one event loop."""

    def __init__(self, encoder: EncoderCore, gate: DrainState, models: ModelsRoute) -> None:
        self._encoder = encoder
        self._gate = gate
        self._models = models
        self._instance = secrets.token_hex(8)
        self._began_s = time.monotonic()

    def overview(self) -> dict[str, Any]:
        """Return the fields of an `Overview` of the current state."""
        encoder, meters = self._encoder, self._encoder.meters
        alive, total = meters.gauges.executors()
        answers = totals(meters.answers)
        apps: dict[str, int] = {}
        origins = {"computed": 0, "coalesced": 0, "cached": 0}
        for (app, origin, _), count in answers.items():
            apps[app] = apps.get(app, 0) + int(count)
            origins[origin] += int(count)
        return {
            "instance": self._instance,
            "version": __version__,
            "state": self._state(),
            "now_s": time.time(),
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "executors": {"alive": alive, "total": total},
            "store": encoder.has_store,
            "models": [row.model_dump() for row in self._models.listed().models],
            "waiting": int(meters.gauges.waiting()),
            "predicted_s": {qos: round(s, 6) for qos, s in meters.gauges.predicted().items()},
            "answers": origins,
            "tokens": int(sum(totals(meters.tower_tokens).values())),
            "apps": [{"app": app, "answers": n} for app, n in Counter(apps).most_common(APPS_SHOWN)],
            "refusals": [
                {"qos": qos, "reason": reason, "refusals": int(count)}
                for (reason, qos), count in totals(meters.refusals).items()
            ],
        }

    def _state(self) -> State:
        if self._gate.closed:
            return "draining"
        return "serving" if self._encoder.healthy() else "down"


def router(report: StatusReport) -> APIRouter:
    """Return the routes of `/v1/status` and of the page."""
    routes = APIRouter()
    files = {name: (_PAGE / name).read_bytes() for name in _TYPES}

    @routes.get("/v1/status", response_model=Overview)
    async def status() -> Response:
        """Return the current state of the service, as the page at `/` shows it."""
        body = msgspec.json.encode(report.overview())
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return _file(name) if name in files else Response(status_code=404)

    def _file(name: str) -> Response:
        return Response(files[name], headers={**_HEADERS, "content-type": _TYPES[name]})

    return routes
