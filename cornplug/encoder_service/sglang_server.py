"""Encoder for SGLang's `--language-only` servers, on the service's HTTP port. `--sglang` enables it.

    cornplug encoder --model MODEL --port 8750 --sglang
    python -m sglang.launch_server --model-path MODEL --language-only \
        --encoder-urls http://HOST:8750 --encoder-transfer-backend zmq_to_scheduler

If the service has several models, the URL selects a model: http://HOST:8750/sglang/NAME. NAME is the hub id,
or the last component of a folder. Both of SGLang's ZMQ backends are supported. mooncake is not supported.

    server ── POST encode {mm_items, req_id, part ...} ──> decode, tower or store, one part
           ── POST scheduler_receive_url {host:port} ──>   (zmq_to_scheduler: where to send)
           <── ZMQ: header, rows ──                        then the reply to `encode`

Images are sent as bytes in the request. The service fetches no URLs and reads no files for this protocol. A
refusal is a reply with an error status and {"message"}, which SGLang forwards to its client. With
`zmq_to_scheduler`, however, the scheduler of SGLang 0.5.23 crashes if an encoder returns an error for a text
prompt. cornplug's plugin prevents the crash, and encodes refused images in the server. Without the plugin,
use `zmq_to_tokenizer`.

SGLang's protocol has no tenants. A server with cornplug's plugin adds the request's salt, and a proof that
the server has the secret. Embeddings for a server without the plugin have no salt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cornplug.checkpoints.tested_releases import compared_families
from cornplug.config import EncoderConfig
from cornplug.encoder_service import sglang_delivery
from cornplug.encoder_service.access import AuditLog, effective_salt
from cornplug.encoder_service.client.endpoints import url_name
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.media_intake import MediaIntake, cap_deadline_s
from cornplug.encoder_service.formats.engine_seal import SignedClaim, is_salt_proved
from cornplug.encoder_service.formats.messages import (
    EncodeRefusal,
    EncodeReply,
    ServedModel,
    WireTensor,
    status_of,
)
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.preprocess.preparer import (
    SGLANG_APP,
    MediaPreparer,
    MediaSource,
    PreprocessedMediaItem,
    media_bytes,
)
from cornplug.encoder_service.sglang_delivery import ReceiverGuard, ReceiverRendezvous, ZmqSender
from cornplug.errors import EncoderRefused, MediaError
from cornplug.qos import APP_HEADER, QosCaller

if TYPE_CHECKING:
    from cornplug.encoder_service.http.requests import BodyParser


_DECODING: Final = "sglang-0.5.23"
_RELEASE: Final = _DECODING.removeprefix("sglang-")
"""Release of SGLang whose protocol this server implements."""
_SUPPORTED_FAMILIES: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Families that this release of SGLang supports with `--language-only`, and whose embeddings fit SGLang's
protocol."""
_GRID_INPUT: Final = "image_grid_thw"
_MAX_CONCURRENT_IMAGES: Final = 2
"""Maximum number of images in one part that are prepared concurrently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedImage:
    """Embedding of one image in a part. `media` is the media digest."""

    grid: Sequence[int]
    media: bytes
    tensor: WireTensor


class SglangPartEncoder:
    """Encodes parts and sends their embeddings to receivers. Use it from one event loop.

    A part consists of the images of a request that a server sends to one encoder.
    """

    def __init__(
        self,
        encoder: EncoderCore,
        preparer: MediaPreparer,
        threads: Executor,
        config: EncoderConfig,
        intake: MediaIntake,
        *,
        secret: bytes,
    ) -> None:
        self._encoder = encoder
        self._intake = intake
        self._preparer = preparer
        self._threads = threads
        self._config = config
        self._timeout_s = config.language_only_timeout_s
        self._secret = secret
        self._guard = ReceiverGuard(config.receiver_networks())
        self._rendezvous = ReceiverRendezvous(ttl_s=2 * config.language_only_timeout_s)
        self._sender: ZmqSender | None = None

    @contextlib.asynccontextmanager
    async def open_sockets(self) -> AsyncIterator[None]:
        """Keep the sockets open during the context."""
        self._sender = ZmqSender()
        try:
            yield
        finally:
            await asyncio.to_thread(self._sender.close)
            self._guard.close()

    def resolve_salts(
        self, part: sglang_delivery.EncodePart, caller: QosCaller
    ) -> sglang_delivery.EncodePart:
        """Check the salts of the part's images, and return the part with the salts to use.

        A salt without a valid proof is handled like the `cache_salt` of an HTTP request
        (`access.effective_salt`). Raises EncoderRefused("forbidden_salt") if the caller may not set the salt.
        """

        def of(item: sglang_delivery.MediaItem) -> sglang_delivery.MediaItem:
            salt = item.cornplug_salt
            if salt is None or not is_salt_proved(item.cornplug_salt_proof, self._secret, salt):
                salt = effective_salt(caller, salt, self._config)
            return msgspec.structs.replace(item, cornplug_salt=salt)

        return msgspec.structs.replace(part, mm_items=[of(item) for item in sglang_delivery.items_of(part)])

    async def encode(
        self,
        model: LoadedModel,
        part: sglang_delivery.EncodePart,
        *,
        caller: QosCaller,
        requester: str | None,
    ) -> None:
        """Encode a part's images, and send the embeddings to the part's receivers.

        Raises EncoderRefused or MediaError.
        """
        end = time.monotonic() + cap_deadline_s(self._timeout_s)
        known = None
        if part.prefill_host is not None and part.embedding_port is not None:
            known = await self._guard.resolve_endpoint(
                part.prefill_host, part.embedding_port, requester=requester
            )
        frames = await self._build_frames(model, part, caller, end)
        left = max(end - time.monotonic(), 0.0)
        endpoints = (
            [known]
            if known is not None
            else await self._rendezvous.wait_receivers(
                part.req_id, self._guard.group_of(requester), deadline_s=left
            )
        )
        left = max(end - time.monotonic(), 0.1)
        if self._sender is None:
            raise EncoderRefused("the service is not running", reason="internal")
        await asyncio.gather(*(self._sender.send(e, frames, deadline_s=left) for e in endpoints))

    async def add_receiver(
        self,
        receiver: sglang_delivery.ReceiverRegistration,
        address: tuple[str, int],
        *,
        requester: str | None,
    ) -> None:
        """Add a receiver for a part. The part is sent to the receiver when it has been encoded. Raises
        EncoderRefused."""
        endpoint = await self._guard.resolve_endpoint(*address, requester=requester)
        group = self._guard.group_of(requester)
        self._rendezvous.register(receiver.req_id, group, receiver.receive_count, endpoint)

    async def _build_frames(
        self, model: LoadedModel, part: sglang_delivery.EncodePart, caller: QosCaller, end: float
    ) -> list[bytes]:
        turn = asyncio.Semaphore(_MAX_CONCURRENT_IMAGES)
        tasks = [
            asyncio.create_task(self._encode_image(model, item, turn, caller, end))
            for item in sglang_delivery.items_of(part)
        ]
        try:
            rows = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._pack, model, part, rows)

    async def _encode_image(
        self,
        model: LoadedModel,
        item: sglang_delivery.MediaItem,
        slots: asyncio.Semaphore,
        caller: QosCaller,
        end: float,
    ) -> _EncodedImage:
        """Encode one image. It is admitted in the same way as an image for `/v1/encode`."""

        def read() -> MediaSource:
            return MediaSource(
                model=model.served.name,
                modality="image",
                decoding=_DECODING,
                app=SGLANG_APP,
                contents=[media_bytes("image", item.url)],
                salt=item.cornplug_salt,
                deadline_s=self._timeout_s,
            )

        with self._encoder.budget.open_share(caller.qos) as budget_share:
            async with slots:
                with self._encoder.observer.record_preprocessing():
                    prepared = await self._intake.prepare(
                        self._preparer,
                        read,
                        caller=caller,
                        app=SGLANG_APP,
                        inline=True,
                        end_s=end,
                        budget_share=budget_share,
                    )
            grid, media = _patch_grid(model, prepared), prepared.media_digest
            if prepared.cached_reply is not None:
                return _EncodedImage(grid=grid, media=media, tensor=_require_tensor(prepared.cached_reply))
            left = max(end - time.monotonic(), 0.001)
            request = msgspec.structs.replace(prepared.request, deadline_s=left)
            submitted = self._encoder.submit(
                request, inputs=prepared.inputs, inline=True, caller=caller, budget_share=budget_share
            )
            del prepared, request  # From here on, only the encoder needs the inputs.
            # Cancelling this task cancels the future.
            return _EncodedImage(
                grid=grid, media=media, tensor=_require_tensor(await asyncio.wrap_future(submitted))
            )

    def _pack(
        self,
        model: LoadedModel,
        part: sglang_delivery.EncodePart,
        rows: Sequence[_EncodedImage],
    ) -> list[bytes]:
        payload = b"".join(row.tensor.data for row in rows)
        shape = sum(row.tensor.shape[0] for row in rows), model.served.hidden_size
        grid = [row.grid for row in rows]
        statement = SignedClaim.sign(
            self._secret,
            identity=model.served.identity,
            media=[row.media for row in rows],
            dtype=model.served.dtype,
            shape=shape,
            grid=grid,
            payload=payload,
        )
        head = sglang_delivery.pickle_header(
            part, dtype=model.served.dtype, shape=shape, grid=grid, claim=statement
        )
        return [head, payload]


def router(
    part_encoder: SglangPartEncoder, encoder: EncoderCore, parser: BodyParser, audit: AuditLog
) -> APIRouter:
    """Return the routes of the protocol, at the root and below /sglang/NAME.

    The routes are not in `/openapi.json`, because SGLang defines them.
    """
    routes = APIRouter(include_in_schema=False)

    async def encode(request: Request, model: str | None = None) -> Response:
        try:
            # SGLang's servers send no app header. Their requests are counted under this app.
            caller = encoder.classes.identify_caller({APP_HEADER: SGLANG_APP, **request.headers})
            part = part_encoder.resolve_salts(
                await parser.parse(request, sglang_delivery.parse_encode_part, caller.qos), caller
            )
            named = find_model(encoder.registry, model)
            await part_encoder.encode(named, part, caller=caller, requester=_peer_address(request))
        except (EncoderRefused, MediaError) as e:
            audit.log_refusal(request, e.reason)
            return _refusal_response(encoder, e)
        return JSONResponse(None)

    async def receive_at(request: Request) -> Response:
        try:
            receiver, address = sglang_delivery.parse_registration(await request.body())
            await part_encoder.add_receiver(receiver, address, requester=_peer_address(request))
        except EncoderRefused as e:
            audit.log_refusal(request, e.reason)
            return _refusal_response(encoder, e)
        return JSONResponse(None)

    async def mooncake() -> Response:
        problem = "only ZMQ is supported: set --encoder-transfer-backend zmq_to_scheduler or zmq_to_tokenizer"
        return _refusal_response(encoder, EncoderRefused(problem, reason="transfer"))

    for prefix in ("", "/sglang/{model:path}"):
        routes.add_api_route(f"{prefix}/encode", encode, methods=["POST"])
        routes.add_api_route(f"{prefix}/scheduler_receive_url", receive_at, methods=["POST"])
        for path in ("scheduler_receive_meta_data", "send"):
            routes.add_api_route(f"{prefix}/{path}", mooncake, methods=["POST"])
    return routes


def language_only_urls(served: Sequence[ServedModel], port: int) -> list[str]:
    """Return URLs for SGLang's `--encoder-urls`, one for each model that this release of SGLang supports in
    its dtype.
    """
    models = [
        model
        for model in served
        if model.family in _SUPPORTED_FAMILIES & compared_families("sglang", _RELEASE, model.dtype)
    ]
    if len(models) == len(served) == 1:
        return [f"http://HOST:{port}"]
    return [f"http://HOST:{port}/sglang/{url_name(model.name)}" for model in models]


def find_model(registry: ModelRegistry, name: str | None) -> LoadedModel:
    """Return the model that NAME in a URL selects. Without a name, return the only served model.

    Raises EncoderRefused("unknown_model") with the available names.
    """
    fitting = {
        loaded.served.identity: loaded
        for loaded in registry.loaded_models()
        if name is None or name.strip("/") in (loaded.served.name.strip("/"), url_name(loaded.served.name))
    }
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    names = ", ".join(url_name(model.name) for model in registry.served_models())
    problem = "several models are served" if name is None else f"{name!r} matches {len(fitting)} models"
    raise EncoderRefused(
        f"{problem}; append /sglang/NAME to the encoder's URL, where NAME is one of: {names}",
        reason="unknown_model",
    )


def _patch_grid(model: LoadedModel, prepared: PreprocessedMediaItem) -> list[int]:
    grid = prepared.inputs.get(_GRID_INPUT)
    if grid is None:
        raise EncoderRefused(
            f"SGLang's encoder protocol does not serve the family {model.served.family}", reason="bad_input"
        )
    return [int(number) for number in grid.flatten()]


def _require_tensor(reply: EncodeReply | EncodeRefusal) -> WireTensor:
    if isinstance(reply, EncodeRefusal):
        raise EncoderRefused(reply.message, reason=reply.reason)
    if reply.tensor is None:
        raise EncoderRefused("the reply contains no rows", reason="internal")
    return reply.tensor


def _peer_address(request: Request) -> str | None:
    return request.client.host if request.client is not None else None


def _refusal_response(encoder: EncoderCore, error: EncoderRefused | MediaError) -> JSONResponse:
    encoder.metrics.count_refusal(error.reason, encoder.classes.class_of_app(SGLANG_APP).name)
    return JSONResponse(
        {"status": "error", "reason": error.reason, "message": str(error)},
        status_code=status_of(error.reason),
    )
