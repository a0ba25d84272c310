"""`POST /v1/reload`: load the weights that are on disk now. Only the operator may use it.

Without `encoder.admin_key`, callers on this host are the operator. With it, callers that send the key are.
Only JSON is accepted, so that a web page in a browser on this host cannot send the request.
"""

from __future__ import annotations

import asyncio
import hmac
from ipaddress import ip_address
from typing import Final

import pydantic
from fastapi import APIRouter, Request

from cornplug.config import EncoderConfig
from cornplug.encoder_service.access.policy import AuditLog
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.http import openapi
from cornplug.encoder_service.http.models import ModelList, ModelsRoute
from cornplug.errors import CheckpointError, EncoderRefused

_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class ReloadBody(pydantic.BaseModel):
    """Name of the model to reload, or null for all models."""

    model_config = pydantic.ConfigDict(extra="forbid")
    model: str | None = pydantic.Field(default=None, max_length=1024)


def router(encoder: EncoderCore, models: ModelsRoute, config: EncoderConfig, audit: AuditLog) -> APIRouter:
    """Return the operator's routes."""
    routes = APIRouter()
    key = config.admin_key.get_secret_value()

    @routes.post("/v1/reload", responses=openapi.RELOAD, openapi_extra=openapi.json_body(ReloadBody))
    async def reload(request: Request) -> ModelList:
        """Reload changed weights from disk and return the models that changed."""
        _allow(request, key)
        name = await _model(request)
        # On a thread, so that requests do not wait while weights load.
        try:
            changed = await asyncio.to_thread(encoder.reload, name)
        except CheckpointError as e:
            audit.did("reload", request, model=name, failed=str(e))
            raise EncoderRefused(f"{e} The previous weights stay in use.", reason="not_reloaded") from e
        audit.did("reload", request, model=name, changed=[model.name for model in changed])
        return await asyncio.to_thread(models.of, changed)

    return routes


def _allow(request: Request, key: str) -> None:
    """Check that the caller is the operator. Raises EncoderRefused("forbidden")."""
    if key:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise EncoderRefused(
                "authorization: the operator's key (encoder.admin_key) is required", reason="forbidden"
            )
        return
    # Requests that a proxy on this host forwards also come from this host.
    passed_on = any(name in request.headers for name in _FORWARDED)
    if passed_on or request.client is None or not _is_here(request.client.host):
        raise EncoderRefused(
            "only callers on this host may reload; set encoder.admin_key to allow callers with that key",
            reason="forbidden",
        )


def _is_here(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback


async def _model(request: Request) -> str | None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise EncoderRefused("content-type: send application/json", reason="media_type")
    try:
        return ReloadBody.model_validate_json(await request.body(), strict=True).model
    except pydantic.ValidationError as e:
        raise EncoderRefused(f"body: {e.errors()[0]['msg'][:200]}", reason="bad_input") from None
