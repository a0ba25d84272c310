"""Lets a language-only server encode images itself if its encoder has exited, is slow or rejects a request.

Without this fallback, SGLang 0.5.23 fails the request (zmq_to_scheduler with the encoder's own error,
zmq_to_tokenizer with status 503), and waits up to 180 s for an encoder that does not reply. However, several
families also load their tower in `--language-only` servers. With `--enable-adaptive-dispatch-to-encoder`, all
families do. In these cases, the request is delayed at most until a deadline, and the server encodes the image
itself, which counts as a miss:

    zmq_to_tokenizer   no reply ──> the tokenizer processes the image like a server with a tower
    zmq_to_scheduler   /encode failed or is late ──> the tokenizer does the same, and sends the request
                       again ──> on every rank, it replaces the request that waits

A request that has waited until a deadline does not wait for another service (`--cornplug-encoder`). After a
failure of the encoder, the next requests skip the encoder for a while. A server without a tower returns
SGLang's own error, but within `encoder.language_only_timeout_s` instead of 180 s. The error ends only the
request. In stock SGLang, an encoder's error can end the scheduler.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from cornplug.engine_common.embeddings import BackOff
from cornplug.engine_common.runtime import EMBEDDING
from cornplug.errors import EncoderUnavailable
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.media import embedding_prefetch, epd

_WITH_TOWER: Final = frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"})
"""Architectures for which SGLang 0.5.23 loads the tower in language-only servers."""
_MARGIN_S: Final = 5.0
"""Seconds to add to deadlines, so that the encoder's own error arrives first."""

_RECEIVER: Final = "sglang.srt.disaggregation.encoder.receiver"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager"


@dataclass(slots=True)
class _FallbackState:
    has_tower: bool = False
    """Whether this server can encode images itself."""
    reply_timeout_s: float = math.inf
    """Maximum seconds to wait for an encoder's reply."""
    backoff: BackOff = field(default_factory=BackOff)
    late_ids: set[str] = field(default_factory=set)
    """Ids of requests whose encoder has exceeded its deadline, until this server encodes their images."""
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _FallbackState()


def _can_fall_back() -> bool:
    return activation.is_on() and _state.has_tower


def _is_backing_off() -> bool:
    with _state.lock:
        return _state.backoff.is_active(time.monotonic())


def _record_failure(reason: str) -> None:
    with _state.lock:
        _state.backoff.record_failure(EncoderUnavailable("", reason=reason), time.monotonic())


def _is_late(began: float) -> bool:
    return time.monotonic() - began >= 0.9 * _state.reply_timeout_s


def _count_miss(reason: str) -> None:
    activation.tally().count("cornplug_misses_total", activation.runtime().app, EMBEDDING, reason)


# -- both processes --------------------------------------------------------------------------


def _on_receiver_created(
    _result: None, receiver: Any, *_args: Any, hf_config: Any = None, **_kwargs: Any
) -> None:
    if not activation.is_on():
        return
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_parallel

    architectures = getattr(hf_config, "architectures", None) or [None]
    # With several replicas, a request that is sent again might not reach the ranks on which it waits.
    _state.has_tower = get_parallel().num_dp_ranks == 1 and (
        get_disagg().enable_adaptive_dispatch_to_encoder or architectures[0] in _WITH_TOWER
    )
    config = activation.config().encoder
    answer_s = config.deadline_s if _state.has_tower else config.language_only_timeout_s + _MARGIN_S
    _state.reply_timeout_s = answer_s
    # Values that the operator has set are kept.
    if not envs.SGLANG_ENCODER_HTTP_TIMEOUT.is_set():
        envs.SGLANG_ENCODER_HTTP_TIMEOUT.set(answer_s)
    if not envs.SGLANG_ENCODER_RECV_TIMEOUT.is_set():
        receiver.recv_timeout = answer_s
        # The scheduler waits for the encoder. After a failure, it waits for the tokenizer to process the
        # images.
        receiver.wait_timeout = answer_s + (config.language_only_timeout_s if _state.has_tower else _MARGIN_S)


async def _wrap_encode(original: Callable[..., Any], receiver: Any, *args: Any, **kwargs: Any) -> Any:
    began = time.monotonic()
    error = await original(receiver, *args, **kwargs)
    if activation.is_on():
        if error is None:
            with _state.lock:
                _state.backoff.record_reply()
        else:
            refused = 400 <= int(error.error_code or 500) < 500
            _record_failure("bad_input" if refused else "encoder_error")
            if _can_fall_back() and _is_late(began):
                with _state.lock:
                    _state.late_ids.add(error.rid)
    return error


# -- zmq_to_tokenizer ------------------------------------------------------------------------


async def _wrap_receive(original: Callable[..., Any], receiver: Any, *args: Any, **kwargs: Any) -> Any:
    if not activation.is_on():
        return await original(receiver, *args, **kwargs)
    if _can_fall_back() and _is_backing_off():
        return None
    began = time.monotonic()
    mm_inputs = await epd.receive_with_keys(original, receiver, *args, **kwargs)
    if mm_inputs is None and time.monotonic() - began >= receiver.recv_timeout:
        _record_failure("encoder_timeout")
        embedding_prefetch.has_waited.set(True)
    return mm_inputs


def _wrap_reject_missing(original: Callable[..., None], request_obj: Any, mm_inputs: Any) -> None:
    if mm_inputs is None and request_obj.need_wait_for_mm_inputs and _can_fall_back():
        _count_miss("encoder_error")
        return
    original(request_obj, mm_inputs)


# -- zmq_to_scheduler: tokenizer -------------------------------------------------------------


def _wrap_dispatch(original: Callable[..., Any], receiver: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if _can_fall_back() and _is_backing_off():
        _count_miss("encoder_backoff")
        obj.need_wait_for_mm_inputs = False
        return None
    return original(receiver, obj, *args, **kwargs)


def _on_dispatch_error(original: Callable[..., None], manager: Any, error: Any) -> None:
    """Let this server encode the images of a request whose encoder failed. In the meantime, the request waits
    in the scheduler.

    Called on the thread that sent the request to the encoder.
    """
    if not _can_fall_back():
        original(manager, error)
        return
    logger.warning("cornplug: this server encodes %s itself: %s", error.rid, error.error_msg)
    asyncio.run_coroutine_threadsafe(_encode_here(manager, error), manager.event_loop)


async def _encode_here(manager: Any, error: Any) -> None:
    with _state.lock:
        if error.rid in _state.late_ids:
            _state.late_ids.remove(error.rid)
            embedding_prefetch.has_waited.set(True)
    state = manager.rid_to_state.get(error.rid)
    if state is None or state.finished:
        return
    sent = False
    try:
        _count_miss("encoder_error")
        state.obj.need_wait_for_mm_inputs = False
        tokenized = await manager._tokenize_one_request(state.obj)
        if manager.rid_to_state.get(error.rid) is state:
            await manager._send_one_request(tokenized)
        sent = True
    finally:
        if not sent:  # asyncio logs the exception. The client gets the encoder's error.
            manager._forward_encoder_dispatch_error(error)


# -- zmq_to_scheduler: every rank ------------------------------------------------------------


def _replace_waiting(receiver: Any, recv_reqs: list[Any], *_args: Any, **_kwargs: Any) -> None:
    """Remove a waiting request if the tokenizer has sent it again with processed images."""
    if not _can_fall_back():
        return
    for request in recv_reqs:
        rid = getattr(request, "rid", None)
        waiting = receiver.waiting_by_rid.get(rid) if isinstance(rid, str) else None
        if waiting is None or getattr(request, "need_wait_for_mm_inputs", None) is not False:
            continue
        del receiver.waiting_by_rid[rid]
        receiver.waiting_list.remove(waiting)
        waiting.release_resources()
        waiting.close_recv_socket()


def _wrap_registration_done(original: Callable[..., None], waiting: Any, future: Any) -> None:
    """Ignore a failure to send the scheduler's address to the encoder, if this server can encode images.

    The tokenizer also receives an error, and then lets this server encode the images.
    """
    if not _can_fall_back() or future.cancelled() or future.exception() is None:
        original(waiting, future)


def _set_empty_prompt(_receiver: Any, recv_req: Any) -> None:
    """Set an empty prompt for a request that fails.

    SGLang's processor, which sets the prompt, did not run. A prompt of None would crash the scheduler and the
    server when they report the error.
    """
    if activation.is_on() and recv_req.input_ids is None:
        recv_req.input_ids = array("q")


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_RECEIVER}.MMReceiverBase.__init__", "after", _on_receiver_created),
    Hook(f"{_RECEIVER}.MMReceiverHTTP.encode", "around", _wrap_encode),
    Hook(f"{_RECEIVER}.MMReceiverBase.recv_mm_data", "around", _wrap_receive),
    Hook(f"{_TOKENIZER}._reject_missing_dispatched_encoder_embedding", "around", _wrap_reject_missing),
    Hook(f"{_RECEIVER}.MMReceiverBase.send_encode_request", "around", _wrap_dispatch),
    Hook(f"{_TOKENIZER}.TokenizerManager._schedule_encoder_dispatch_error", "around", _on_dispatch_error),
    Hook(f"{_RECEIVER}.MMReceiverBase._process_waiting_requests", "before", _replace_waiting),
    Hook(f"{_RECEIVER}.MMReceiverBase.create_req", "before", _set_empty_prompt),
    Hook(f"{_RECEIVER}.WaitingZmqRequest._on_registration_done", "around", _wrap_registration_done),
)
