"""The scheduler half's requests to the encoder service, prepared and completed on other threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cornplug.encoder_service.client.engine_encoder import engine_encoder
from cornplug.encoder_service.wire.messages import EncodeReply, EncodeRequest, trace_of
from cornplug.engine_common.background_identity import CurrentIdentity
from cornplug.engine_common.embedding_fetch import EncoderRequestPolicy
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import EncoderError, EncoderRefused
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.ec.pending_embedding import PendingEmbedding
from cornplug.vllm_connector.ec.processor_outputs import MediaInputs
from cornplug.vllm_connector.model.model_config import tower_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class EncoderRequests:
    """Encoder requests of one engine core. `ask` and `wait` are called on the engine's thread."""

    def __init__(self, config: VllmConfig, runtime: EngineRuntime) -> None:
        self.policy = EncoderRequestPolicy()
        """Decides whether to use the service, depending on its replies."""
        self._app = runtime.app
        self._encoder = engine_encoder(runtime.config, runtime.secret)
        self._inputs = MediaInputs(config)
        # If there is no tower identity, the API process logs a warning, and all identifiers are foreign.
        self._tower = CurrentIdentity(lambda: tower_identity(config), "embeddings", compat.logger.debug)
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="cornplug-prepare")
        self._news = threading.Event()
        """Set by every reply of the service."""

    def ask(self, item: PendingEmbedding, feature: Any, request: Request) -> None:
        """Send a request to encode `item`. `item.answer` completes later. Raises EncoderError."""
        _, identified = self._tower.now()
        tower = identified.found
        identity = self.policy.identity_to_ask(
            None if tower is None else tower.of(feature.modality),
            identified=identified.wait(0),
            refusal=self._encoder.refusal,
            now=time.monotonic(),
        )
        self._preparer.submit(self._send, item, feature, identity, request)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the service has replied since the last call, at most `timeout_s`, and return whether it
        has."""
        if not self._news.wait(timeout_s):
            return False
        self._news.clear()
        return True

    def close(self) -> None:
        """Close the connection to the service and the preparing thread."""
        self._encoder.close()
        self._preparer.shutdown(wait=False, cancel_futures=True)

    def _send(self, item: PendingEmbedding, feature: Any, identity: bytes, asking: Request) -> None:
        """Send a request from the preparing thread, because packing large images takes milliseconds."""
        answer: Future[EncodeReply] = Future()
        try:
            request = EncodeRequest(
                id=0,
                identity=identity,
                key=item.expected.key,
                cache_salt=asking.cache_salt,
                inputs=self._inputs.of(feature),
                app=self._app,
                deadline_s=max(0.0, item.deadline - time.monotonic()),
                trace=trace_of(asking.trace_headers),
            )
            answer = self._encoder.submit(request)
        except EncoderError as e:
            answer.set_exception(e)
        except (AssertionError, RuntimeError, TypeError, ValueError) as e:
            # Exceptions of torch and vLLM for inputs of an unknown form.
            answer.set_exception(EncoderRefused(f"cannot send the inputs: {e}", reason="no_inputs"))
        item.answer = answer
        answer.add_done_callback(lambda _: self._news.set())
