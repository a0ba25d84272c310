"""Requests from the encoder-cache connector's scheduler half to the encoder service. Separate threads prepare
and complete them.

`MediaInputs` converts the processor's outputs for a media item to the form that the tower expects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

from cornplug.checkpoints.families import FAMILIES, Modality
from cornplug.checkpoints.model_family import PIXEL_NORM
from cornplug.encoder_service.client.engine_encoder import engine_encoder
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest, WireTensor, trace_of
from cornplug.encoder_service.formats.tensors import to_wire, view_as_wire
from cornplug.engine_common import weights_guard
from cornplug.engine_common.embeddings import EncoderRequestPolicy, ExpectedEmbedding
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.weights_guard import CurrentIdentity
from cornplug.errors import EncoderError, EncoderRefused
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media.metadata import ArrivedEmbedding
from cornplug.vllm_connector.media.mm_identifiers import is_stale
from cornplug.vllm_connector.model.model_config import tower_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


MEDIA_IN_WORKERS_ONLY: Final = (
    "with --mm-processor-cache-type shm, only vLLM's workers can read processed media. Remove the flag, or "
    "set it to lru"
)


def is_media_in_workers_only(config: VllmConfig) -> bool:
    """Return whether vLLM passes processed media only to its workers, and not to its engine core."""
    from vllm.multimodal.cache.factories import _get_cache_type

    return _get_cache_type(config) == "shm"


class MediaInputs:
    """Selects the tensors that a model's tower needs from vLLM's feature specs.

    For some model families, vLLM 0.32 leaves rescaling and normalising to the device
    (`mm_device_do_normalize`), so processed pixels are raw uint8. The service's towers of these families
    normalise them in the same way, so the request contains a quarter of the bytes. For other towers, pixels
    are normalised with vLLM's own module.
    """

    def __init__(self, config: VllmConfig) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

        with set_current_vllm_config(config):
            self._norm: Any = build_mm_input_norm(config.model_config)
        self._is_in_workers_only = is_media_in_workers_only(config)
        if self._is_in_workers_only:
            compat.logger.warning(
                "cornplug: this engine does not use the encoder service: %s", MEDIA_IN_WORKERS_ONLY
            )
        family = FAMILIES.get(str(config.model_config.hf_config.model_type))
        self._input_names: Mapping[Modality, tuple[str, ...]] = family.inputs if family is not None else {}
        self._sends_raw_pixels = family is not None and family.normalises_pixels

    def tower_inputs(self, feature: Any) -> dict[str, WireTensor]:
        """Return the tensors that the tower needs for one multimodal item, by name.

        Raises EncoderRefused: "no_inputs" if vLLM no longer has the processed inputs, "shm_cache" if only
        vLLM's workers have them.
        """
        if self._is_in_workers_only:
            raise EncoderRefused(MEDIA_IN_WORKERS_ONLY, reason="shm_cache")
        if feature.data is None:
            raise EncoderRefused(
                "the engine no longer holds the processed inputs of this media item", reason="no_inputs"
            )
        wanted = self._input_names.get(feature.modality, ())
        found = {}
        for name in wanted:
            element = feature.data.get(name)
            if element is not None and isinstance(element.data, torch.Tensor):
                if element.data.dtype == torch.uint8 and self._sends_raw_pixels:
                    found[PIXEL_NORM] = to_wire(self._norm_parameters())
                    found[name] = view_as_wire(element.data)
                else:
                    found[name] = self._to_wire_tensor(element.data)
        if not wanted or wanted[0] not in found:
            raise EncoderRefused(
                f"the engine's {feature.modality} inputs have no {wanted[0] if wanted else 'known tensors'}",
                reason="no_inputs",
            )
        return found

    def _norm_parameters(self) -> torch.Tensor:
        """Return the factor and the summand of each channel, of shape (2, channels), in float32."""
        if isinstance(self._norm, FusedMMInputNorm):
            return torch.stack([self._norm.weight, self._norm.bias]).cpu()
        return torch.tensor([[1.0], [0.0]])

    def _to_wire_tensor(self, value: torch.Tensor) -> WireTensor:
        if value.dtype == torch.uint8:
            native = getattr(self._norm, "forward_native", self._norm.forward)
            value = native(value, torch.float32)
        return view_as_wire(value)


@dataclass(slots=True)
class PendingEmbedding:
    """Embedding of a media item that the engine waits for, and the state of the request to the encoder
    service. Threads other than the engine's access only `reply` and `save_outcome`."""

    identifier: str
    expected: ExpectedEmbedding
    size_bytes: int
    """Size of the payload in bytes."""
    deadline_s: float
    began_s: float
    waiting_requests: set[str] = field(default_factory=set)
    reply: Future[EncodeReply] | None = None
    """The encoder service's pending or received reply. None until the request has been sent."""
    rows: WireTensor | None = None
    """Rows from the service's reply that are being saved in the store. None before and after that."""
    save_outcome: str = ""
    """Outcome of saving `rows`. Another thread sets it."""
    arrived: ArrivedEmbedding | None = None
    arrived_s: float = 0.0
    """Time when the embedding arrived, or when its lease was last renewed."""
    source: str = ""
    failure: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether the embedding has arrived and was computed with the engine's current weights."""
        stale = is_stale(self.identifier, weights_guard.epoch())
        return self.arrived is not None and not stale and not weights_guard.has_replaced_weights()

    @property
    def is_settled(self) -> bool:
        """Whether the embedding has arrived, or will not arrive."""
        return self.arrived is not None or bool(self.failure)


class EncoderRequests:
    """Sends one engine core's requests to the encoder service. The engine's thread calls `submit` and
    `wait_for_reply`."""

    def __init__(self, config: VllmConfig, runtime: EngineRuntime) -> None:
        self.policy = EncoderRequestPolicy()
        """Decides whether to send requests to the service, based on the service's earlier replies."""
        self._app = runtime.app
        self._encoder = engine_encoder(runtime.config, runtime.secret)
        self._inputs = MediaInputs(config)
        # If the tower cannot be identified, the API process logs a warning, and identifiers contain no key.
        self._tower = CurrentIdentity(lambda: tower_identity(config), "embeddings", compat.logger.debug)
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="cornplug-prepare")
        self._reply_event = threading.Event()
        """Event that every reply from the service and every call of `notify` sets."""

    def submit(self, item: PendingEmbedding, feature: Any, request: Request) -> None:
        """Send a request to encode the media item `item`. Another thread sets `item.reply`. Raises
        EncoderError if no request can be sent now."""
        _, identified = self._tower.current()
        tower = identified.value
        identity = self.policy.identity_for_request(
            None if tower is None else tower.for_modality(feature.modality),
            identified=identified.wait(0),
            refusal=self._encoder.refusal,
            now=time.monotonic(),
        )
        self._preparer.submit(self._send, item, feature, identity, request)

    def notify(self) -> None:
        """End `wait_for_reply`. Called by any thread."""
        self._reply_event.set()

    def wait_for_reply(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a reply from the service. Return whether a reply has arrived, or
        `notify` was called, since the last call."""
        if not self._reply_event.wait(timeout_s):
            return False
        self._reply_event.clear()
        return True

    def close(self) -> None:
        """Close the connection to the service, and stop the thread that prepares requests."""
        self._encoder.close()
        self._preparer.shutdown(wait=False, cancel_futures=True)

    def _send(self, item: PendingEmbedding, feature: Any, identity: bytes, engine_request: Request) -> None:
        """Prepare and send a request. Runs on a separate thread, because packing large images takes
        milliseconds."""
        reply: Future[EncodeReply] = Future()
        try:
            request = EncodeRequest(
                id=0,
                identity=identity,
                key=item.expected.key,
                cache_salt=engine_request.cache_salt,
                inputs=self._inputs.tower_inputs(feature),
                app=self._app,
                deadline_s=max(0.0, item.deadline_s - time.monotonic()),
                trace=trace_of(engine_request.trace_headers),
            )
            reply = self._encoder.submit(request)
        except EncoderError as e:
            reply.set_exception(e)
        except (AssertionError, RuntimeError, TypeError, ValueError) as e:
            # torch and vLLM raise these exceptions for inputs of an unexpected form.
            reply.set_exception(EncoderRefused(f"cannot send the inputs: {e}", reason="no_inputs"))
        item.reply = reply
        reply.add_done_callback(lambda _: self.notify())
