"""Route `POST /v1/encode`, which fetches, preprocesses and submits a media item. The route also serves
engines without a tower.

If a client disconnects, this module cancels the work on its request, because uvicorn does not do so.

    read ─> fetch or decode base64 ─> MediaIntake: prepare ─> EncoderCore.submit ─> Outcome

The module also has the route `POST /v1/engine`, for engines on other hosts that have the secret. Its requests
and replies are sealed (`formats.messages`), and `access_control` has checked the proof in their headers. The
service trusts the embedding keys that these engines send. The reply contains the embedding itself, because
the engines use another store. Engines without a tower send the media item and receive the handle and the
embedding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from cornplug.config import EncoderConfig
from cornplug.encoder_service.access import effective_salt
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.media_intake import MediaIntake, cap_deadline_s
from cornplug.encoder_service.formats import messages
from cornplug.encoder_service.formats.engine_seal import (
    HANDLE_LIFETIME_S,
    MEDIA_TYPE,
    EmbeddingHandle,
    EngineSeal,
    InvalidSeal,
)
from cornplug.encoder_service.formats.messages import (
    PROTOCOL_VERSION,
    Decoding,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeReply,
    EncodeRequest,
    MediaRefusal,
    MediaReply,
    MediaRequest,
)
from cornplug.encoder_service.http import requests, responses
from cornplug.encoder_service.http.access_control import ENGINE_CLASS, SEAL_SCOPE_KEY
from cornplug.encoder_service.http.requests import BodyParser, ParsedRequest, RequestMediaItem
from cornplug.encoder_service.http.responses import EncodedMedia, HttpRefusal, Outcome
from cornplug.encoder_service.http.url_fetcher import UrlFetcher
from cornplug.encoder_service.preprocess.decode_lanes import BudgetShare, ByteBudget
from cornplug.encoder_service.preprocess.preparer import (
    DEFAULT_SAMPLING,
    HTTP_APP,
    MediaPreparer,
    MediaSource,
    PreprocessedMediaItem,
    unknown_model_error,
)
from cornplug.errors import EncoderRefused, MediaError
from cornplug.qos import QosCaller

ResultT = TypeVar("ResultT")
_MARGIN_S: Final = 1.0
"""Seconds after the deadline during which work that started in time may still finish."""


async def run_unless_disconnected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` and return its result. If the client disconnects, cancel `work` and raise
    ClientDisconnect."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _HttpRequest:
    """One request in flight. `end` is its deadline on the monotonic clock."""

    parsed: ParsedRequest
    caller: QosCaller
    salt: str | None
    end: float
    decoding: Decoding


class EncodeRoute:
    """Route `POST /v1/encode`. Use it from one event loop."""

    def __init__(
        self,
        encoder: EncoderCore,
        preparer: MediaPreparer,
        parser: BodyParser,
        config: EncoderConfig,
        intake: MediaIntake,
        body_budget: ByteBudget,
        *,
        secret: bytes,
    ) -> None:
        """Create the route. `body_budget` is the budget for request bodies, which also counts fetched
        media."""
        self._body_budget = body_budget
        self._encoder = encoder
        self._intake = intake
        self._secret = secret
        self._preparer = preparer
        self._parser = parser
        self._config = config
        self._fetcher = UrlFetcher.from_config(config, encoder.classes.ranked_classes())

    async def aclose(self) -> None:
        """Close the connections to hosts from which media were fetched."""
        await self._fetcher.close()

    async def __call__(self, request: Request) -> Response:
        """Return the reply to a request.

        Raises EncoderRefused or MediaError if the request is invalid, and ClientDisconnect. For an error in
        the media item, the result is a reply.
        """
        caller = self._encoder.classes.identify_caller(request.headers)
        asked = await requests.read_request(request, self._parser, caller.qos)
        if self._encoder.registry.find_by_name(asked.model) is None:
            raise unknown_model_error(asked.model)
        salt = effective_salt(caller, asked.cache_salt, self._config)
        wanted_s = asked.deadline_s or caller.qos.deadline_s or self._config.deadline_s
        deadline_s = cap_deadline_s(wanted_s)
        decoding = _parse_decoding(request.headers.get(messages.DECODING_HEADER, messages.DEFAULT_DECODING))
        end = time.monotonic() + deadline_s
        job = _HttpRequest(parsed=asked, caller=caller, salt=salt, end=end, decoding=decoding)
        outcome = await run_unless_disconnected(request, self._encode_in_time(job))
        return responses.build_response(outcome, request.headers.get("accept", ""))

    async def handle_engine_request(self, request: MediaRequest) -> MediaReply | MediaRefusal:
        """Return the reply to an engine that has proved that it has the secret. The engine's `cache_salt` is
        trusted."""
        loaded = self._encoder.registry.find_by_identity(request.identity)
        if loaded is None:
            served = ", ".join(model.name for model in self._encoder.registry.served_models())
            return MediaRefusal(
                reason="unknown_model",
                message=f"no tower has the identity {request.identity.hex()[:12]}; this service has {served}",
            )
        decoding = messages.parse_decoding(request.decoding)
        if decoding is None:
            # The item may be valid, and another service may support this decoding rule.
            return MediaRefusal(
                reason="unknown_model",
                message=f"unknown image decoding {request.decoding[:100]}; update this service",
            )
        source = RequestMediaItem(
            modality=request.modality, suffix="_url", content=request.url or request.data
        )
        caller = QosCaller(qos=self._encoder.classes.class_of_app(request.app), app=request.app)
        deadline_s = cap_deadline_s(request.deadline_s)
        parsed = ParsedRequest(
            model=loaded.served.name,
            media=source,
            cache_salt=request.cache_salt,
            inline=True,
            deadline_s=deadline_s,
            sampling=DEFAULT_SAMPLING,
        )
        end = time.monotonic() + deadline_s
        job = _HttpRequest(parsed=parsed, caller=caller, salt=request.cache_salt, end=end, decoding=decoding)
        outcome = await self._encode_in_time(job)
        if isinstance(outcome, HttpRefusal):
            return MediaRefusal(
                reason=outcome.reason, message=outcome.message, retry_after_s=outcome.retry_after_s
            )
        if outcome.handle is None or outcome.reply.tensor is None:
            return MediaRefusal(reason="overloaded", message="the model was reloaded during the request")
        return MediaReply(handle=outcome.handle, tensor=outcome.reply.tensor, decoding=decoding)

    async def _encode_in_time(self, job: _HttpRequest) -> Outcome:
        try:
            async with asyncio.timeout(max(job.end - time.monotonic(), 0.0) + _MARGIN_S):
                return await self._encode_media(job)
        except (EncoderRefused, MediaError) as e:
            failed = HttpRefusal.from_error(e)
        except TimeoutError:
            failed = HttpRefusal(
                reason="too_late", message=f"{job.parsed.media.field}: no result before the deadline"
            )
        # The encoder counts its own refusals. Count refusals that occur before an item is submitted to it.
        self._encoder.metrics.count_refusal(failed.reason, job.caller.qos.name)
        return failed

    async def _encode_media(self, job: _HttpRequest) -> Outcome:
        source = job.parsed.media
        with self._encoder.budget.open_share(job.caller.qos) as budget_share:
            if source.remote_url() is not None:
                self._intake.check_admission(job.caller.qos, job.end)
            prepared = await self._fetch_and_prepare(job, source, budget_share)
            if prepared.cached_reply is not None:
                handle = self._sign_handle(source, prepared)
                return EncodedMedia(reply=prepared.cached_reply, dtype=prepared.dtype, handle=handle)
            left = max(job.end - time.monotonic(), 0.001)
            submitted = self._encoder.submit(
                msgspec.structs.replace(prepared.request, deadline_s=left),
                inputs=prepared.inputs,
                inline=job.parsed.inline,
                caller=job.caller,
                budget_share=budget_share,
            )
            prepared = _without_pixels(prepared)
            # Cancelling this task cancels the future, so that no tower runs for a client that has
            # disconnected.
            reply = await asyncio.wrap_future(submitted)
        if isinstance(reply, EncodeRefusal):
            return HttpRefusal.from_error(reply)
        return EncodedMedia(reply=reply, dtype=prepared.dtype, handle=self._sign_handle(source, prepared))

    def _sign_handle(self, media: RequestMediaItem, prepared: PreprocessedMediaItem) -> str | None:
        request = prepared.request
        loaded = self._encoder.registry.find_by_identity(request.identity)
        if loaded is None:
            return None
        grid = prepared.inputs.get(f"{media.modality}_grid_thw")
        handle = EmbeddingHandle(
            family=loaded.served.family,
            modality=media.modality,
            identity=request.identity,
            media=prepared.media_digest,
            key=request.key,
            dtype=prepared.dtype,
            grid=() if grid is None else tuple(grid.flatten().tolist()),
            expires=time.time() + HANDLE_LIFETIME_S,
        )
        return handle.to_signed_text(self._secret)

    async def _fetch_and_prepare(
        self, job: _HttpRequest, media: RequestMediaItem, budget_share: BudgetShare
    ) -> PreprocessedMediaItem:
        left = job.end - time.monotonic()
        if left <= 0:
            raise EncoderRefused(f"{media.field}: the deadline passed before decoding", reason="too_late")
        with self._body_budget.open_share(job.caller.qos) as held:
            fetched = None
            if (url := media.remote_url()) is not None:
                fetched = await self._fetcher.fetch(
                    media.field, url, qos=job.caller.qos, deadline_s=left, budget_share=held
                )
            return await self._prepare_media(job, media, fetched, budget_share)

    async def _prepare_media(
        self, job: _HttpRequest, media: RequestMediaItem, fetched: bytes | None, budget_share: BudgetShare
    ) -> PreprocessedMediaItem:
        asked = job.parsed
        # Whether the item is a video that was sent as images.
        as_frames = media.modality == "video" and media.is_frames

        def read() -> MediaSource:
            came = [fetched] if fetched is not None else None
            parts = came or (media.read_frames() if as_frames else [media.read_bytes()])
            return MediaSource(
                model=asked.model,
                modality=media.modality,
                form="images" if as_frames else "file",
                contents=parts,
                salt=job.salt,
                deadline_s=max(job.end - time.monotonic(), 0.001),
                sampling=asked.sampling if media.modality == "video" else DEFAULT_SAMPLING,
                decoding=job.decoding,
            )

        with self._encoder.observer.record_preprocessing():
            return await self._intake.prepare(
                self._preparer,
                read,
                caller=job.caller,
                app=HTTP_APP,
                inline=asked.inline,
                end_s=job.end,
                budget_share=budget_share,
            )


def _parse_decoding(name: str) -> Decoding:
    found = messages.parse_decoding(name)
    if found is None:
        raise EncoderRefused(
            f"{messages.DECODING_HEADER}: {name[:100]!r} is unknown; "
            f"use one of {', '.join(messages.DECODINGS)}",
            reason="bad_input",
        )
    return found


def _without_pixels(prepared: PreprocessedMediaItem) -> PreprocessedMediaItem:
    """Return the media item with only its grid, so that the encoder can free the pixels when it is done."""
    kept = {name: tensor for name, tensor in prepared.inputs.items() if name.endswith("_grid_thw")}
    return replace(prepared, inputs=kept)


class EngineRoute:
    """Route `POST /v1/engine`, for engines on other hosts. Use it from one event loop."""

    def __init__(
        self,
        encoder: EncoderCore,
        threads: Executor,
        parser: BodyParser,
        encode_route: EncodeRoute,
    ) -> None:
        self._encoder = encoder
        self._threads = threads
        self._parser = parser
        self._encode_route = encode_route
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(messages.HttpRequest).decode

    async def __call__(self, request: Request) -> Response:
        """Return the sealed reply. Raises EncoderRefused if the seal is invalid, and ClientDisconnect."""
        seal: EngineSeal = request.scope[SEAL_SCOPE_KEY]
        asked = await self._parser.parse(request, partial(self._open_request, seal), ENGINE_CLASS)
        reply: messages.HttpReply | None = None
        if isinstance(asked, EncodeRequest):
            reply = await run_unless_disconnected(request, self._encode_request(asked))
        elif isinstance(asked, MediaRequest):
            reply = await run_unless_disconnected(request, self._encode_route.handle_engine_request(asked))
        elif isinstance(asked, DescribeRequest):
            reply = DescribeReply(version=PROTOCOL_VERSION, models=self._encoder.registry.served_models())
        elif asked is not None:
            reply = asked
        sealed = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._seal_reply, seal, reply
        )
        return Response(sealed, media_type=MEDIA_TYPE)

    async def _encode_request(self, request: EncodeRequest) -> messages.Reply:
        deadline_s = cap_deadline_s(request.deadline_s)
        request = msgspec.structs.replace(request, deadline_s=deadline_s)
        # Cancelling this task cancels the future, so that no tower runs for an engine that has disconnected.
        reply = await asyncio.wrap_future(self._encoder.submit(request, inline=True))
        # `stored` refers to this host's store. The engine saves the rows in its own store.
        return msgspec.structs.replace(reply, stored=False) if isinstance(reply, EncodeReply) else reply

    def _open_request(self, seal: EngineSeal, body: bytes) -> messages.HttpRequest | EncodeRefusal | None:
        """Decode a sealed request. Return None if the engine uses another protocol version, in which case the
        engine gets an empty reply."""
        try:
            message = seal.open_request(body)
        except InvalidSeal as e:
            raise EncoderRefused(f"body: {e}", reason="unauthorized") from e
        try:
            return None if message is None else self._decode(message)
        except (msgspec.MsgspecError, RecursionError) as e:
            return EncodeRefusal(id=0, reason="bad_input", message=f"body: {e}")

    def _seal_reply(self, seal: EngineSeal, reply: messages.HttpReply | None) -> bytes:
        return seal.seal_reply(b"" if reply is None else self._encode(reply))
