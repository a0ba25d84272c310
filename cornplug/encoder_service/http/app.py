"""HTTP API that returns embeddings of media. The service computes every digest and key itself.

    POST /v1/encode   one media item: see `requests`, `responses`
    POST /v1/engine   sealed requests from engines of other hosts that have the secret: see `encode`
    POST /v1/reload   for the operator: see `models`
    GET  /v1/models   GET /health   GET /ready   GET /metrics   GET /openapi.json
    GET  /            status page: see `models`   GET /v1/status
    POST /encode ...  SGLang's language-only servers, with `encoder.sglang`: see `sglang_server`

Clients send no ids. Media are fetched only from hosts that the operator allows (see `url_fetcher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cornplug import __version__
from cornplug.config import EncoderConfig
from cornplug.encoder_service import sglang_server
from cornplug.encoder_service.access import AuditLog
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.media_intake import MediaIntake
from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.formats.engine_seal import SealChecker
from cornplug.encoder_service.formats.messages import INTERNAL_ERROR_MESSAGE
from cornplug.encoder_service.http import openapi
from cornplug.encoder_service.http.access_control import (
    DRAINING_REFUSAL,
    AccessControlMiddleware,
    DrainMiddleware,
    DrainState,
    require_json,
)
from cornplug.encoder_service.http.encode import EncodeRoute, EngineRoute
from cornplug.encoder_service.http.models import (
    ModelList,
    ModelsRoute,
    Status,
    StatusReport,
    reload_router,
    status_router,
)
from cornplug.encoder_service.http.requests import BodyLimitMiddleware, BodyParser, body_budget
from cornplug.encoder_service.http.responses import EncodeAnswer, HttpRefusal, refusal_response
from cornplug.encoder_service.preprocess.preparer import MediaPreparer
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.encoder_service.request_observer import TracingMiddleware
from cornplug.errors import EncoderRefused, MediaError


def create_app(
    encoder: EncoderCore, config: EncoderConfig, *, secret: bytes, drain_state: DrainState | None = None
) -> FastAPI:
    """Create the ASGI application for an encoder, with the limits in `config`. When `drain_state` is closed,
    the application drains."""
    drain_state = drain_state or DrainState()
    preparer = MediaPreparer(encoder.registry, secret=secret, limits=MediaLimits.from_config(config))
    # These threads parse JSON, base64 and headers. Longer work runs in the decode lanes, after admission.
    threads = ThreadPoolExecutor(config.prepare_threads, "cornplug-read")
    parser = BodyParser(threads)
    door = MediaIntake(encoder, threads, config)
    served = ModelsRoute(encoder.registry, preparer)
    held = body_budget(encoder.classes, config)
    encodes = EncodeRoute(encoder, preparer, parser, config, door, held, secret=secret)
    audit = AuditLog()
    parts = sglang_server.SglangPartEncoder(encoder, preparer, threads, config, door, secret=secret)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # Start the processes before the port is open, so that the first media items do not wait for them.
        await asyncio.to_thread(encoder.start_decoding)
        async with (
            parts.open_sockets() if config.sglang else contextlib.nullcontext(),
            contextlib.aclosing(encodes),
        ):
            yield

    # FastAPI's own pages load third-party scripts, which could call /v1/reload from this origin.
    app = FastAPI(
        title="cornplug encoder",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(require_json)],
    )
    if config.sglang:
        app.include_router(sglang_server.router(parts, encoder, parser, audit))
    app.include_router(status_router(StatusReport(encoder, drain_state, served)))
    app.include_router(reload_router(encoder, served, config, audit))
    app.add_middleware(
        BodyLimitMiddleware,
        classes=encoder.classes,
        max_bytes=config.max_body_bytes,
        held=held,
        count=encoder.metrics.count_refusal,
    )
    # Receivers register at this path while a part is in flight, so the path stays open during a drain.
    app.add_middleware(
        DrainMiddleware,
        gate=drain_state,
        exempt_suffixes=("/scheduler_receive_url",),
        count=encoder.metrics.count_refusal,
    )
    app.add_middleware(TracingMiddleware, tracing=encoder.observer.tracing)
    # The middleware that is added last is the outermost.
    app.add_middleware(
        AccessControlMiddleware,
        config=config,
        classes=encoder.classes,
        audit=audit,
        engines=SealChecker(secret),
        count=encoder.metrics.count_refusal,
    )
    _add_error_handlers(app, encoder, audit)

    @app.post(
        "/v1/encode", response_model=EncodeAnswer, responses=openapi.ENCODE, openapi_extra=openapi.ENCODE_BODY
    )
    async def encode(request: Request) -> Response:
        """Return the embedding of one media item."""
        return await encodes(request)

    # Without the package cryptography, the path does not exist. An engine's client then reports which package
    # to install.
    if importlib.util.find_spec("cryptography") is not None:
        route = EngineRoute(encoder, threads, parser, encodes)

        @app.post(engine_seal.ENGINE_PATH, response_class=Response, include_in_schema=False)
        async def engine(request: Request) -> Response:
            return await route(request)

    @app.get("/v1/models")
    async def models() -> ModelList:
        """Return the served models, with the fingerprints of their parts."""
        return served.list_models()

    @app.get("/health", response_model=Status, responses={503: {"model": Status}})
    @app.get("/sglang/{model:path}/health", include_in_schema=False)
    async def health() -> Response:
        """Liveness check. Status 503 means that the service should be restarted."""
        up = encoder.is_healthy()
        return JSONResponse({"status": "ok" if up else "down"}, status_code=200 if up else 503)

    @app.get("/ready", response_model=Status, responses=openapi.NOT_READY)
    async def ready() -> Response:
        """Readiness check. Status 503 means that requests should go to another service."""
        if drain_state.is_closed:
            return refusal_response(DRAINING_REFUSAL)
        if not encoder.is_healthy():
            return refusal_response(
                HttpRefusal(reason="down", message="no tower can run; see the log of the service")
            )
        if not encoder.is_decoding_ready():
            problem = "no recent medium could be decoded; see the log of the service"
            return refusal_response(HttpRefusal(reason="stuck", message=problem))
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response, responses=openapi.METRICS)
    async def metrics() -> Response:
        return Response(encoder.metrics.render_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    openapi.complete_schema(app)
    return app


def _add_error_handlers(app: FastAPI, encoder: EncoderCore, audit: AuditLog) -> None:
    """Register handlers that convert every exception to an `ErrorAnswer`."""

    @app.exception_handler(EncoderRefused)
    @app.exception_handler(MediaError)
    async def refusal(request: Request, e: EncoderRefused | MediaError) -> Response:
        encoder.metrics.count_refusal(e.reason, encoder.classes.identify_caller(request.headers).qos.name)
        audit.log_refusal(request, e.reason)
        return refusal_response(HttpRefusal.from_error(e))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, e: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client has disconnected

    @app.exception_handler(HTTPException)
    async def http(_: Request, e: HTTPException) -> Response:
        reason = {404: "not_found", 405: "method_not_allowed"}.get(e.status_code, "bad_input")
        response = refusal_response(HttpRefusal(reason=reason, message=str(e.detail)))
        headers: Mapping[str, Any] = e.headers or {}
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def fault(_: Request, e: Exception) -> Response:
        # Starlette raises the exception again after this reply, so that the server logs the exception.
        return refusal_response(HttpRefusal(reason="internal", message=INTERNAL_ERROR_MESSAGE))
