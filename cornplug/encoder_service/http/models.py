"""Route `GET /v1/models`, which lists the served models and the fingerprints of their parts. Also the route
`POST /v1/reload`, which loads the weights that are now on disk.

Only the operator may reload weights. If `encoder.admin_key` is set, a caller that sends this key counts as
the operator. Otherwise any caller on this host counts as the operator. The route accepts only JSON, so that a
web page in a browser on this host cannot send the request.

`GET /v1/status` returns the service's current state, and the page at `/` displays it. The page consists of
static files, without a build step and without external resources. Names that clients choose are inserted only
as text nodes, and the content security policy forbids inline scripts.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Request, Response
from PIL import Image

from cornplug import __version__
from cornplug.checkpoints.families import Modality
from cornplug.config import EncoderConfig
from cornplug.encoder_service.access import AuditLog
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.messages import ServedModality, ServedModel
from cornplug.encoder_service.http import openapi
from cornplug.encoder_service.http.access_control import DrainState
from cornplug.encoder_service.http.requests import MODALITIES
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer, MediaSource, PreprocessedMediaItem
from cornplug.encoder_service.service_metrics import counter_totals
from cornplug.errors import CheckpointError, CornplugError, EncoderRefused

Rows = Literal["fixed", "by medium"]
_PROBE_SIZES: Final = ((224, 224), (896, 224))
_FORWARDING_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
State = Literal["serving", "draining", "down"]
MAX_APPS_SHOWN: Final = 20
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STATIC_FOLDER: Final = Path(__file__).with_name("static")
_STATIC_CONTENT_TYPES: Final[Mapping[str, str]] = {
    "index.html": "text/html; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
    "status.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_STATIC_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class ModalityRow(pydantic.BaseModel):
    """One modality of a model, with its preprocessing."""

    name: Modality
    identity: str
    tower_fp: str
    """Fingerprint of the tower that computes this modality. If a model has two towers, the modalities have
    different fingerprints."""
    spec_fp: str
    rows: Rows
    """Whether all items of this modality have embeddings with the same number of rows."""


class ModelRow(pydantic.BaseModel):
    """One served model, with fingerprints in hex. Its embeddings have shape (rows, hidden_size)."""

    name: str
    family: str
    modalities: list[Modality]
    media: list[ModalityRow]
    """Details of each entry in `modalities`."""
    identity: str
    tower_fp: str
    projector_fp: str
    spec_fp: str
    dtype: str
    hidden_size: int
    epoch: int
    """Number of reloads of the weights since the service started."""


class ModelList(pydantic.BaseModel):
    models: list[ModelRow]


class Status(pydantic.BaseModel):
    status: str = pydantic.Field(examples=["ok"])


class ModelsRoute:
    """Builds the list of served models. It determines once per model, with two blank images, whether all
    images have the same number of rows."""

    def __init__(self, registry: ModelRegistry, preparer: MediaPreparer) -> None:
        self._registry = registry
        self._preparer = preparer
        self._rows_by_identity: dict[bytes, Rows] = {}
        self.list_models()  # run the tests now, before requests arrive

    def list_models(self) -> ModelList:
        """Return all served models, in the order of the command line."""
        return self.describe_models(self._registry.served_models())

    def describe_models(self, served: tuple[ServedModel, ...]) -> ModelList:
        """Return the list entries of the given models."""
        return ModelList(models=[self._build_row(model) for model in served])

    def _build_row(self, served: ServedModel) -> ModelRow:
        taken = [m for m in served.modalities if self._preparer.accepts(m.identity)]
        return ModelRow(
            name=served.name,
            family=served.family,
            modalities=[as_modality(modality.name) for modality in taken],
            media=[self._build_modality_row(served, modality) for modality in taken],
            identity=served.identity.hex(),
            tower_fp=served.tower_fp.hex(),
            projector_fp=served.projector_fp.hex(),
            spec_fp=served.spec_fp.hex(),
            dtype=served.dtype,
            hidden_size=served.hidden_size,
            epoch=served.epoch,
        )

    def _build_modality_row(self, served: ServedModel, modality: ServedModality) -> ModalityRow:
        if modality.identity not in self._rows_by_identity:
            fixed = modality.name == "image" and self._has_fixed_rows(served.name)
            self._rows_by_identity[modality.identity] = "fixed" if fixed else "by medium"
        part = self._registry.find_by_identity(modality.identity)
        return ModalityRow(
            name=as_modality(modality.name),
            identity=modality.identity.hex(),
            tower_fp=(served.tower_fp if part is None else part.tower_fp).hex(),
            spec_fp=modality.spec_fp.hex(),
            rows=self._rows_by_identity[modality.identity],
        )

    def _has_fixed_rows(self, model: str) -> bool:
        """Return whether images of different sizes produce tower inputs of the same shapes and grids."""
        try:
            square, wide = (self._prepare_blank_image(model, sides) for sides in _PROBE_SIZES)
        except CornplugError:
            return False
        return _input_geometry(square) == _input_geometry(wide)

    def _prepare_blank_image(self, model: str, sides: tuple[int, int]) -> PreprocessedMediaItem:
        out = io.BytesIO()
        Image.new("RGB", sides).save(out, "BMP")
        source = MediaSource(
            model=model, modality="image", contents=[out.getvalue()], salt=None, deadline_s=1.0
        )
        return self._preparer.prepare(source)


def as_modality(name: str) -> Modality:
    """Return a modality's name as a `Modality`. On the wire, the name is a plain string."""
    return next(modality for modality in MODALITIES if modality == name)


def _input_geometry(media: PreprocessedMediaItem) -> dict[str, object]:
    """Return the shapes of all inputs, and the values of integer inputs (grids, sizes, numbers of tiles)."""
    return {
        name: (tensor.shape, None if tensor.is_floating_point() else tensor.tolist())
        for name, tensor in media.inputs.items()
    }


class ReloadBody(pydantic.BaseModel):
    """Name of the model to reload, or null for all models."""

    model_config = pydantic.ConfigDict(extra="forbid")
    model: str | None = pydantic.Field(default=None, max_length=1024)


def reload_router(
    encoder: EncoderCore, models: ModelsRoute, config: EncoderConfig, audit: AuditLog
) -> APIRouter:
    """Return the route `POST /v1/reload`, which only the operator may use."""
    routes = APIRouter()
    key = config.admin_key.get_secret_value()

    @routes.post("/v1/reload", responses=openapi.RELOAD, openapi_extra=openapi.json_body(ReloadBody))
    async def reload(request: Request) -> ModelList:
        """Reload changed weights from disk and return the models that changed."""
        _check_operator(request, key)
        name = await _read_model_name(request)
        # Use a thread, so that other requests do not wait while the weights load.
        try:
            changed = await asyncio.to_thread(encoder.reload, name)
        except CheckpointError as e:
            audit.log_operation("reload", request, model=name, failed=str(e))
            raise EncoderRefused(f"{e} The previous weights stay in use.", reason="not_reloaded") from e
        audit.log_operation("reload", request, model=name, changed=[model.name for model in changed])
        return await asyncio.to_thread(models.describe_models, changed)

    return routes


def _check_operator(request: Request, key: str) -> None:
    """Check that the caller is the operator. Raises EncoderRefused("forbidden")."""
    if key:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise EncoderRefused(
                "authorization: the operator's key (encoder.admin_key) is required", reason="forbidden"
            )
        return
    # A request that a proxy on this host forwards may come from another host.
    passed_on = any(name in request.headers for name in _FORWARDING_HEADERS)
    if passed_on or request.client is None or not _is_loopback(request.client.host):
        raise EncoderRefused(
            "only callers on this host may reload; set encoder.admin_key to allow callers with that key",
            reason="forbidden",
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback


async def _read_model_name(request: Request) -> str | None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise EncoderRefused("content-type: send application/json", reason="media_type")
    try:
        return ReloadBody.model_validate_json(await request.body(), strict=True).model
    except pydantic.ValidationError as e:
        raise EncoderRefused(f"body: {e.errors()[0]['msg'][:200]}", reason="bad_input") from None


class AppRow(pydantic.BaseModel):
    """Number of results that were sent to one app since the start."""

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
    """Current state of the service. Prometheus has its history."""

    instance: str = pydantic.Field(
        description="Random id that changes at each restart, when counts restart at 0."
    )
    version: str
    state: State
    now_s: float = pydantic.Field(description="Unix time of this response.")
    uptime_s: float
    executors: ExecutorsView
    store: bool = pydantic.Field(description="Whether embeddings are saved in the host's store.")
    models: list[ModelRow]
    waiting: int = pydantic.Field(description="Number of admitted requests without a reply.")
    predicted_s: dict[str, float] = pydantic.Field(
        description="Predicted seconds until the reply for an item like the last item of the class, by "
        "class. 0 if the class had no item in the last 10 s."
    )
    answers: dict[str, int] = pydantic.Field(description="Number of results since the start, by origin.")
    tokens: int = pydantic.Field(description="Number of tokens that towers computed since the start.")
    apps: list[AppRow] = pydantic.Field(description=f"The {MAX_APPS_SHOWN} apps with the most results.")
    refusals: list[RefusalRow]


class StatusReport:
    """Builds the `Overview` of a service's current state. Use it from one event loop."""

    def __init__(self, encoder: EncoderCore, drain_state: DrainState, models: ModelsRoute) -> None:
        self._encoder = encoder
        self._drain_state = drain_state
        self._models = models
        self._instance = secrets.token_hex(8)
        self._started_s = time.monotonic()

    def build_overview(self) -> dict[str, Any]:
        """Return the fields of an `Overview` of the current state."""
        encoder, meters = self._encoder, self._encoder.metrics
        alive, total = meters.gauges.executors()
        replies = counter_totals(meters.replies)
        apps: dict[str, int] = {}
        origins = {"computed": 0, "coalesced": 0, "cached": 0}
        for (app, origin, _), count in replies.items():
            apps[app] = apps.get(app, 0) + int(count)
            origins[origin] += int(count)
        return {
            "instance": self._instance,
            "version": __version__,
            "state": self._current_state(),
            "now_s": time.time(),
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "executors": {"alive": alive, "total": total},
            "store": encoder.has_store,
            "models": [row.model_dump() for row in self._models.list_models().models],
            "waiting": int(meters.gauges.waiting_requests()),
            "predicted_s": {qos: round(s, 6) for qos, s in meters.gauges.predicted_s_by_class().items()},
            "answers": origins,
            "tokens": int(sum(counter_totals(meters.tower_tokens).values())),
            "apps": [{"app": app, "answers": n} for app, n in Counter(apps).most_common(MAX_APPS_SHOWN)],
            "refusals": [
                {"qos": qos, "reason": reason, "refusals": int(count)}
                for (reason, qos), count in counter_totals(meters.refusals).items()
            ],
        }

    def _current_state(self) -> State:
        if self._drain_state.is_closed:
            return "draining"
        return "serving" if self._encoder.is_healthy() else "down"


def status_router(report: StatusReport) -> APIRouter:
    """Return the routes for `/v1/status` and for the status page."""
    routes = APIRouter()
    files = {name: (_STATIC_FOLDER / name).read_bytes() for name in _STATIC_CONTENT_TYPES}

    @routes.get("/v1/status", response_model=Overview)
    async def status() -> Response:
        """Return the service's current state, which the page at `/` displays."""
        body = msgspec.json.encode(report.build_overview())
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return _file(name) if name in files else Response(status_code=404)

    def _file(name: str) -> Response:
        return Response(files[name], headers={**_STATIC_HEADERS, "content-type": _STATIC_CONTENT_TYPES[name]})

    return routes
