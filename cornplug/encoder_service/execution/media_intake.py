"""Intake of media that are sent as bytes: early rejection, a fair queue, a memory budget, sandboxed decoding.

`/v1/encode` and SGLang's route use it.

A media item is queued with an estimate of its decoding cost. For an image, the estimate is the number of
pixels in the header. For other media, it is computed from the length in bytes, and `Batcher.raise_cost`
corrects it when the header has been read. The estimate affects only the order of the queue.
"""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

from PIL import Image

from cornplug.checkpoints.families import Modality
from cornplug.config import EncoderConfig
from cornplug.encoder_service.admission import AdmissionRefusal
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.image import DECODE_ERRORS
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest
from cornplug.encoder_service.preprocess.decode_lanes import BudgetShare, decode_cost
from cornplug.encoder_service.preprocess.decoders import MediaHeader
from cornplug.encoder_service.preprocess.preparer import (
    MediaPreparer,
    MediaSource,
    PreprocessedMediaItem,
    UndecodedMedia,
)
from cornplug.encoder_service.preprocess.preprocessor import PreprocessContext
from cornplug.errors import EncoderRefused
from cornplug.qos import QosCaller, ServiceClass
from cornplug.settings import MAX_DEADLINE_S

_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG")
"""Formats whose image size Pillow reads in Python from the first bytes of a file, without a decoder."""
_HEAD_BYTES: Final = 64 << 10
_WORK_PER_BYTE: Final[Mapping[Modality, float]] = {"image": 8.0, "video": 50.0, "audio": 3.0}
"""Number of pixels or samples per byte of a typical file."""


def estimate_cost(modality: Modality, contents: Sequence[bytes]) -> int:
    """Return the estimated decoding cost, in the unit of `decode_lanes.decode_cost`.

    `contents` is the file, or the images of a video.
    """
    pixels = _read_pixel_count(contents[0]) if modality == "image" and contents else None
    work = _WORK_PER_BYTE[modality] * sum(map(len, contents)) if pixels is None else float(pixels)
    return decode_cost(MediaHeader(decoded_bytes=0, work=work))


def _read_pixel_count(data: bytes) -> int | None:
    try:
        with Image.open(io.BytesIO(data[:_HEAD_BYTES]), formats=_FORMATS) as image:
            return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
    except DECODE_ERRORS:
        return None


def cap_deadline_s(requested_s: float) -> float:
    """Return the requested deadline, limited to MAX_DEADLINE_S seconds."""
    return min(requested_s, MAX_DEADLINE_S)


class MediaIntake:
    """Checks, decodes and preprocesses media items. Use it from one event loop."""

    def __init__(self, encoder: EncoderCore, threads: Executor, config: EncoderConfig) -> None:
        self._encoder = encoder
        self._threads = threads
        self._decode_lanes = encoder.open_decode_lanes(config)

    def check_admission(self, qos: ServiceClass, end_s: float) -> None:
        """Raise EncoderRefused if a media item could not be decoded and encoded by `end_s`.

        Call this before fetching or decoding an item. `end_s` is on the monotonic clock.
        """
        left_s = end_s - time.monotonic() - self._decode_lanes.predict_class_s(qos)
        if (refusal := self._encoder.precheck(qos, left_s)) is not None:
            raise _refusal_error(refusal)

    async def prepare(
        self,
        preparer: MediaPreparer,
        read_source: Callable[[], MediaSource],
        *,
        caller: QosCaller,
        app: str,
        inline: bool,
        end_s: float,
        budget_share: BudgetShare,
    ) -> PreprocessedMediaItem:
        """Read a media item and return it: with the reply if it is cached, or else preprocessed for the
        tower.

        A file that was decoded before, and whose embedding is cached, is not decoded again. Once the item's
        header is known, `budget_share` counts its bytes. Raises EncoderRefused, and the same errors as
        `read_source` and `preparer`.
        """

        def look_up(request: EncodeRequest) -> EncodeReply | None:
            return self._encoder.reply_from_cache(request, inline=inline, caller=caller)

        def opened() -> PreprocessedMediaItem | tuple[UndecodedMedia, Modality, int]:
            source = read_source()
            medium = preparer.open(source)
            known = medium.look_up_cached(look_up)
            return known or (medium, source.modality, estimate_cost(source.modality, source.contents))

        def run(context: PreprocessContext) -> PreprocessedMediaItem:
            output = medium.prepare(context, look_up)
            # Replace the estimate from the header with the actual size.
            budget_share.resize(sum(tensor.nbytes for tensor in output.inputs.values()))
            return output

        found = await asyncio.get_running_loop().run_in_executor(self._threads, opened)
        if isinstance(found, PreprocessedMediaItem):
            return found
        medium, modality, cost = found
        self.check_admission(caller.qos, end_s)
        # Reserve the predicted time of the tower.
        deadline_s = end_s - time.monotonic() - self._encoder.predict_class_s(caller.qos)
        turn = self._decode_lanes.submit(
            modality,
            run,
            cost=cost,
            qos=caller.qos,
            app=caller.app or app,
            deadline_s=deadline_s,
            budget_share=budget_share,
        )
        if isinstance(turn, AdmissionRefusal):
            raise _refusal_error(turn)
        try:
            return await asyncio.wrap_future(turn.future)
        finally:
            turn.cancel()


def _refusal_error(refusal: AdmissionRefusal) -> EncoderRefused:
    retry_after_s = refusal.retry_after_s if math.isfinite(refusal.retry_after_s) else None
    return EncoderRefused(refusal.message, reason=refusal.reason, retry_after_s=retry_after_s)
