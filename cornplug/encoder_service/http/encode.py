"""Route `POST /v1/encode`, which fetches, preprocesses and submits a media item. The route also serves
engines without a tower.

If a client disconnects, this module cancels the work on its request, because uvicorn does not do so.

    read ─> fetch or decode base64 ─> MediaIntake: prepare ─> EncoderCore.submit ─> Outcome

The module also has the route `POST /v1/engine`, for engines on other hosts that have the secret. Its requests
and replies are sealed (`wire.messages`), and `access_control` has checked the proof in their headers. The
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
from cornplug.encoder_service.access import salt_of
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.media_intake import MediaIntake, limited_deadline_s
from cornplug.encoder_service.http import requests, responses
from cornplug.encoder_service.http.access_control import ENGINES, SEAL
from cornplug.encoder_service.http.requests import BodyParser, ParsedRequest, RequestMedium
from cornplug.encoder_service.http.responses import EncodedMedium, FailedMedium, Outcome
from cornplug.encoder_service.http.url_fetcher import UrlFetcher
from cornplug.encoder_service.preprocess.decode_lanes import BudgetShare, ByteBudget
from cornplug.encoder_service.preprocess.preparer import (
    APP,
    ENGINE_SAMPLING,
    MediaPreparer,
    MediumSource,
    PreprocessedMedium,
    unknown_model,
)
from cornplug.encoder_service.wire import messages
from cornplug.encoder_service.wire.embedding_file import LIFETIME_S, EmbeddingHandle
from cornplug.encoder_service.wire.engine_seal import MEDIA_TYPE, EngineSeal, SealBroken
from cornplug.encoder_service.wire.messages import (
    PROTOCOL_VERSION,
    Decoding,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeReply,
    EncodeRequest,
    MediumRefusal,
    MediumReply,
    MediumRequest,
)
from cornplug.errors import EncoderRefused, MediaError
from cornplug.qos import QosCaller

ResultT = TypeVar("ResultT")
_MARGIN_S: Final = 1.0
"""Seconds after the deadline during which work that started in time may still finish."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` and return its result. If the client disconnects, cancel `work` and raise
    ClientDisconnect."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _HttpRequest:
    """One request in flight. `end` is its deadline on the monotonic clock."""

    asked: ParsedRequest
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
        door: MediaIntake,
        held: ByteBudget,
        *,
        secret: bytes,
    ) -> None:
        """Create the route. `held` is the budget for request bodies, which also counts fetched media."""
        self._held = held
        self._encoder = encoder
        self._door = door
        self._secret = secret
        self._preparer = preparer
        self._parser = parser
        self._config = config
        self._fetcher = UrlFetcher.of(config, encoder.classes.all())

    async def aclose(self) -> None:
        """Close the connections to hosts from which media were fetched."""
        await self._fetcher.close()

    async def __call__(self, request: Request) -> Response:
        """Return the reply to a request.

        Raises EncoderRefused or MediaError if the request is invalid, and ClientDisconnect. For an error in
        the media item, the result is a reply.
        """
        caller = self._encoder.classes.of_headers(request.headers)
        asked = await requests.read(request, self._parser, caller.qos)
        if self._encoder.registry.by_name(asked.model) is None:
            raise unknown_model(asked.model)
        salt = salt_of(caller, asked.cache_salt, self._config)
        wanted_s = asked.deadline_s or caller.qos.deadline_s or self._config.deadline_s
        deadline_s = limited_deadline_s(wanted_s)
        decoding = _decoding(request.headers.get(messages.DECODING_HEADER, messages.DEFAULT_DECODING))
        end = time.monotonic() + deadline_s
        job = _HttpRequest(asked=asked, caller=caller, salt=salt, end=end, decoding=decoding)
        outcome = await unless_gone(request, self._outcome(job))
        return responses.reply(outcome, request.headers.get("accept", ""))

    async def of_engine(self, asked: MediumRequest) -> MediumReply | MediumRefusal:
        """Return the reply to an engine that has proved that it has the secret. The engine's `cache_salt` is
        trusted."""
        loaded = self._encoder.registry.by_identity(asked.identity)
        if loaded is None:
            served = ", ".join(model.name for model in self._encoder.registry.served())
            return MediumRefusal(
                reason="unknown_model",
                message=f"no tower has the identity {asked.identity.hex()[:12]}; this service has {served}",
            )
        decoding = messages.known_decoding(asked.decoding)
        if decoding is None:
            # The item may be valid, and another service may support this decoding rule.
            return MediumRefusal(
                reason="unknown_model",
                message=f"unknown image decoding {asked.decoding[:100]}; update this service",
            )
        source = RequestMedium(modality=asked.modality, suffix="_url", content=asked.url or asked.data)
        caller = QosCaller(qos=self._encoder.classes.of_app(asked.app), app=asked.app)
        deadline_s = limited_deadline_s(asked.deadline_s)
        parsed = ParsedRequest(
            model=loaded.served.name,
            source=source,
            cache_salt=asked.cache_salt,
            inline=True,
            deadline_s=deadline_s,
            sampling=ENGINE_SAMPLING,
        )
        end = time.monotonic() + deadline_s
        job = _HttpRequest(asked=parsed, caller=caller, salt=asked.cache_salt, end=end, decoding=decoding)
        outcome = await self._outcome(job)
        if isinstance(outcome, FailedMedium):
            return MediumRefusal(
                reason=outcome.reason, message=outcome.message, retry_after_s=outcome.retry_after_s
            )
        if outcome.handle is None or outcome.answer.tensor is None:
            return MediumRefusal(reason="overloaded", message="the model was reloaded during the request")
        return MediumReply(handle=outcome.handle, tensor=outcome.answer.tensor, decoding=decoding)

    async def _outcome(self, job: _HttpRequest) -> Outcome:
        try:
            async with asyncio.timeout(max(job.end - time.monotonic(), 0.0) + _MARGIN_S):
                return await self._encoded(job)
        except (EncoderRefused, MediaError) as e:
            failed = FailedMedium.of(e)
        except TimeoutError:
            failed = FailedMedium(
                reason="too_late", message=f"{job.asked.source.field}: no result before the deadline"
            )
        # The encoder counts its own refusals. Count refusals that occur before an item is submitted to it.
        self._encoder.meters.refused(failed.reason, job.caller.qos.name)
        return failed

    async def _encoded(self, job: _HttpRequest) -> Outcome:
        source = job.asked.source
        with self._encoder.budget.share(job.caller.qos) as budget_share:
            if source.url() is not None:
                self._door.check(job.caller.qos, job.end)
            prepared = await self._prepare(job, source, budget_share)
            if prepared.answer is not None:
                handle = self._handle(source, prepared)
                return EncodedMedium(answer=prepared.answer, dtype=prepared.dtype, handle=handle)
            left = max(job.end - time.monotonic(), 0.001)
            submitted = self._encoder.submit(
                msgspec.structs.replace(prepared.request, deadline_s=left),
                inputs=prepared.inputs,
                inline=job.asked.inline,
                caller=job.caller,
                budget_share=budget_share,
            )
            prepared = _without_pixels(prepared)
            # Cancelling this task cancels the future, so that no tower runs for a client that has
            # disconnected.
            answer = await asyncio.wrap_future(submitted)
        if isinstance(answer, EncodeRefusal):
            return FailedMedium.of(answer)
        return EncodedMedium(answer=answer, dtype=prepared.dtype, handle=self._handle(source, prepared))

    def _handle(self, source: RequestMedium, prepared: PreprocessedMedium) -> str | None:
        request = prepared.request
        loaded = self._encoder.registry.by_identity(request.identity)
        if loaded is None:
            return None
        grid = prepared.inputs.get(f"{source.modality}_grid_thw")
        handle = EmbeddingHandle(
            family=loaded.served.family,
            modality=source.modality,
            identity=request.identity,
            media=prepared.media_digest,
            key=request.key,
            dtype=prepared.dtype,
            grid=() if grid is None else tuple(grid.flatten().tolist()),
            expires=time.time() + LIFETIME_S,
        )
        return handle.signed(self._secret)

    async def _prepare(
        self, job: _HttpRequest, source: RequestMedium, budget_share: BudgetShare
    ) -> PreprocessedMedium:
        left = job.end - time.monotonic()
        if left <= 0:
            raise EncoderRefused(f"{source.field}: the deadline passed before decoding", reason="too_late")
        with self._held.share(job.caller.qos) as held:
            fetched = None
            if (url := source.url()) is not None:
                fetched = await self._fetcher.fetch(
                    source.field, url, qos=job.caller.qos, deadline_s=left, held=held
                )
            return await self._prepare_here(job, source, fetched, budget_share)

    async def _prepare_here(
        self, job: _HttpRequest, source: RequestMedium, fetched: bytes | None, budget_share: BudgetShare
    ) -> PreprocessedMedium:
        asked = job.asked
        # Whether the item is a video that was sent as images.
        as_frames = source.modality == "video" and source.is_frames

        def read() -> MediumSource:
            came = [fetched] if fetched is not None else None
            parts = came or (source.frames() if as_frames else [source.data()])
            return MediumSource(
                model=asked.model,
                modality=source.modality,
                form="images" if as_frames else "file",
                parts=parts,
                salt=job.salt,
                deadline_s=max(job.end - time.monotonic(), 0.001),
                sampling=asked.sampling if source.modality == "video" else ENGINE_SAMPLING,
                decoding=job.decoding,
            )

        with self._encoder.observer.preprocessing():
            return await self._door.prepare(
                self._preparer,
                read,
                caller=job.caller,
                app=APP,
                inline=asked.inline,
                end_s=job.end,
                budget_share=budget_share,
            )


def _decoding(name: str) -> Decoding:
    found = messages.known_decoding(name)
    if found is None:
        raise EncoderRefused(
            f"{messages.DECODING_HEADER}: {name[:100]!r} is unknown; "
            f"use one of {', '.join(messages.DECODINGS)}",
            reason="bad_input",
        )
    return found


def _without_pixels(prepared: PreprocessedMedium) -> PreprocessedMedium:
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
        encodes: EncodeRoute,
    ) -> None:
        self._encoder = encoder
        self._threads = threads
        self._parser = parser
        self._encodes = encodes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(messages.HttpRequest).decode

    async def __call__(self, request: Request) -> Response:
        """Return the sealed reply. Raises EncoderRefused if the seal is invalid, and ClientDisconnect."""
        seal: EngineSeal = request.scope[SEAL]
        asked = await self._parser.parse(request, partial(self._read, seal), ENGINES)
        reply: messages.HttpReply | None = None
        if isinstance(asked, EncodeRequest):
            reply = await unless_gone(request, self._encoded(asked))
        elif isinstance(asked, MediumRequest):
            reply = await unless_gone(request, self._encodes.of_engine(asked))
        elif isinstance(asked, DescribeRequest):
            reply = DescribeReply(version=PROTOCOL_VERSION, models=self._encoder.registry.served())
        elif asked is not None:
            reply = asked
        sealed = await asyncio.get_running_loop().run_in_executor(self._threads, self._write, seal, reply)
        return Response(sealed, media_type=MEDIA_TYPE)

    async def _encoded(self, request: EncodeRequest) -> messages.Reply:
        deadline_s = limited_deadline_s(request.deadline_s)
        request = msgspec.structs.replace(request, deadline_s=deadline_s)
        # Cancelling this task cancels the future, so that no tower runs for an engine that has disconnected.
        answer = await asyncio.wrap_future(self._encoder.submit(request, inline=True))
        # `stored` refers to this host's store. The engine saves the rows in its own store.
        return msgspec.structs.replace(answer, stored=False) if isinstance(answer, EncodeReply) else answer

    def _read(self, seal: EngineSeal, body: bytes) -> messages.HttpRequest | EncodeRefusal | None:
        """Decode a sealed request. Return None if the engine uses another protocol version, in which case the
        engine gets an empty reply."""
        try:
            message = seal.open_request(body)
        except SealBroken as e:
            raise EncoderRefused(f"body: {e}", reason="unauthorized") from e
        try:
            return None if message is None else self._decode(message)
        except (msgspec.MsgspecError, RecursionError) as e:
            return EncodeRefusal(id=0, reason="bad_input", message=f"body: {e}")

    def _write(self, seal: EngineSeal, reply: messages.HttpReply | None) -> bytes:
        return seal.seal_answer(b"" if reply is None else self._encode(reply))
