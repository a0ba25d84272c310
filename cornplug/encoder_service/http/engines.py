"""Route `POST /v1/engine` for engines on other hosts that have the secret. Engines on this host use the unix
socket.

Request and reply are sealed messages of `wire/messages.py`. `access_control` has checked the proof in the
headers. The service trusts the embedding keys that these engines send. It returns the embedding itself,
because the engines use another store. Engines without a tower send the medium and get the handle and the
embedding.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial

import msgspec
from fastapi import Request, Response

from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.media_intake import limited_deadline_s
from cornplug.encoder_service.http.access_control import ENGINES, SEAL
from cornplug.encoder_service.http.encode import EncodeRoute, unless_gone
from cornplug.encoder_service.http.requests import BodyParser
from cornplug.encoder_service.wire import messages
from cornplug.encoder_service.wire.engine_seal import MEDIA_TYPE, EngineSeal, SealBroken
from cornplug.encoder_service.wire.messages import (
    PROTOCOL_VERSION,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeReply,
    EncodeRequest,
    MediumRequest,
)
from cornplug.errors import EncoderRefused


class EngineRoute:
    """Route for engines on other hosts. Use it from one event loop."""

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
        """Decode a sealed request. Returns None if the engine uses another protocol version. The engine then
        gets an empty reply."""
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
