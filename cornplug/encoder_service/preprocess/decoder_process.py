"""Decoding process as seen by the service. It is started on demand and killed when it is late.

`SandboxedDecoder` decodes one media item in a decoding process, and validates everything that the process
sends.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from cornplug.encoder_service.formats import sealed_memory
from cornplug.encoder_service.formats.audio import MAX_SAMPLES, AudioSamples
from cornplug.encoder_service.formats.image import RgbPixels
from cornplug.encoder_service.formats.messages import DEFAULT_DECODING, Decoding
from cornplug.encoder_service.formats.video import VideoFrames, VideoHeader, VideoLimits
from cornplug.encoder_service.preprocess import decoders, jail
from cornplug.encoder_service.preprocess.decoders import MediaHeader, OnHeader, choose_frames
from cornplug.errors import EncoderRefused, MediaError

START_TIMEOUT_S: Final = 60.0
"""Maximum seconds to start a process."""
_POLL_S: Final = 0.1
"""Seconds between checks whether the request was cancelled, while a thread waits for a result."""
_PASSED_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""Environment variables that the process receives. They contain neither cornplug's settings nor keys."""
_KEPT_HEAP_BYTES: Final = str(16 << 20)
"""Bytes of freed memory that glibc keeps for the process's next media item. By default, glibc returns buffers
to the kernel, and a JPEG of 1.2 megapixels then causes 900 page faults."""

log = logging.getLogger(__name__)

OnKilled = Callable[[str], None]
"""Function that is called with the reason when a process is killed or ends during a job: "too_slow",
"too_late", "gone", "crashed" or "stopping"."""


class DecoderProcess:
    """Controls one decoding process. Use it from one thread at a time. Any thread may call `stop`."""

    def __init__(self, *, max_bytes: int, on_killed: OnKilled) -> None:
        self._max_bytes = max_bytes
        self._on_killed = on_killed
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._stopped = False
        self._was_started = False

    @property
    def pid(self) -> int | None:
        """Id of the running process, or None if no process runs."""
        return self._process.pid if self._process is not None else None

    @property
    def is_lost(self) -> bool:
        """Whether a process was started but is not running now."""
        return self._was_started and self._process is None

    def start(self) -> None:
        """Start a process unless one is running. Raises EncoderRefused("internal") if it does not start, and
        EncoderRefused("overloaded") after `stop`."""
        if self._process is not None and self._process.poll() is None:
            return
        self._discard()
        if self._stopped:
            raise EncoderRefused("the service is stopping", reason="overloaded")
        self._was_started = True
        service_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        service_end.settimeout(START_TIMEOUT_S)
        self._sock = service_end
        with child_end:
            self._process = subprocess.Popen(
                [
                    # -P: import the same packages as this process, not modules in the working directory.
                    *(sys.executable, "-P", "-m", "cornplug.encoder_service.preprocess.decoder_main"),
                    *(str(self._max_bytes), str(child_end.fileno())),
                ],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        try:
            ready, _ = decoders.receive(service_end, decoders.DecoderReady)
        except (OSError, msgspec.MsgspecError) as e:
            self._discard()
            raise EncoderRefused(f"the decoding process does not start: {e}", reason="internal") from e
        _log_restrictions(ready.bars)

    def assign_job(
        self,
        job: decoders.Job,
        contents: Sequence[bytes],
        *,
        end_s: float,
        limit_s: float,
        is_needed: Callable[[], bool],
    ) -> AssignedJob:
        """Send a job to the process, and return the assigned job.

        The process is killed if it has not finished the job after `limit_s` seconds, at `end_s` on the
        monotonic clock, or when `is_needed` returns False. If no process is running, this starts one and
        raises the same errors as `start`.
        """
        for fresh in (False, True):
            self.start()
            assert self._sock is not None
            memory = sealed_memory.create_memfd(contents)
            try:
                decoders.send(self._sock, job, memory)
                return AssignedJob(self, end_s, limit_s, is_needed)
            except OSError:
                self._discard()  # The process died while idle. Retry once with a new process.
                if fresh:
                    raise
            finally:
                os.close(memory)
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Kill the process, in any state, and do not start another process."""
        self._stopped = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def close(self) -> None:
        """Stop the process and close the socket. Call this when no other thread uses this object any more."""
        self.stop()
        self._discard()

    def kill(self, why: str) -> None:
        """Kill the process during a job, and report the reason."""
        self._on_killed("stopping" if self._stopped else why)
        self._discard()

    def _discard(self) -> None:
        process, self._process = self._process, None
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        if process is not None:
            process.kill()
            process.wait()


class AssignedJob:
    """Job that a decoding process is running."""

    def __init__(
        self, process: DecoderProcess, end_s: float, limit_s: float, is_needed: Callable[[], bool]
    ) -> None:
        self._process = process
        self._end_s = end_s
        self._limit_end_s = time.monotonic() + limit_s
        self._is_needed = is_needed

    def kill(self) -> None:
        """Kill the process, because its results cannot be trusted. The next job gets a new process."""
        self._process.kill("crashed")

    def send_decision(self, message: decoders.DecodeGo | decoders.DecodeStop) -> None:
        """Send the decision whether to decode the media item. Raises MediaError("crashed") if the process has
        ended, or EncoderRefused("overloaded") if the service is stopping."""
        assert self._process._sock is not None
        try:
            decoders.send(self._process._sock, message)
        except OSError:
            raise self._crash_error() from None

    def receive_message(self) -> tuple[decoders.DecodeHeader | decoders.DecodeDone, int | None]:
        """Wait for the next message. Return (message, descriptor of its memfd or None). The caller must close
        it.

        Raises the decoder's MediaError, or MediaError "too_slow", "too_much_memory" or "crashed". Raises
        EncoderRefused("too_late") if the request's own deadline passed first, or if the request was
        cancelled.
        """
        message, fd = self._receive()
        if isinstance(message, decoders.DecodeFailed):
            if fd is not None:
                os.close(fd)
            raise MediaError(message.message, reason=message.reason)
        return message, fd

    def _receive(self) -> tuple[Any, int | None]:
        sock = self._process._sock
        assert sock is not None
        while True:
            left = min(self._end_s, self._limit_end_s) - time.monotonic()
            if left <= 0:
                self._raise_late()
            if not self._is_needed():
                self._process.kill("gone")
                raise EncoderRefused("the request was cancelled", reason="too_late")
            sock.settimeout(min(left, _POLL_S))
            try:
                return decoders.receive(
                    sock, decoders.DecodeHeader | decoders.DecodeDone | decoders.DecodeFailed
                )
            except TimeoutError:
                continue
            except (OSError, msgspec.MsgspecError):
                raise self._crash_error() from None

    def _raise_late(self) -> None:
        if self._end_s < self._limit_end_s:
            self._process.kill("too_late")
            raise EncoderRefused("the medium was not decoded before the deadline", reason="too_late")
        self._process.kill("too_slow")
        raise MediaError("the medium takes too long to decode; send a smaller medium", reason="too_slow")

    def _crash_error(self) -> MediaError | EncoderRefused:
        stopping = self._process._stopped
        self._process.kill("crashed")
        if stopping:
            return EncoderRefused("the service is stopping", reason="overloaded")
        return MediaError("the decoder crashed on this medium", reason="crashed")


@lru_cache(maxsize=1)
def _log_restrictions(active: tuple[str, ...]) -> None:
    """Log the restrictions of the decoding processes. They are the same for all processes, and the cache
    limits this to one log line."""
    absent = [bar for bar in jail.RESTRICTIONS if bar not in active]
    if absent:
        log.warning(
            "decoding processes run without %s, which this kernel or container does not support. A file that "
            "exploits a decoder can access everything that this user can. Active: memory limit%s",
            ", ".join(absent),
            "".join(f", {bar}" for bar in active),
        )
    else:
        log.info("decoding processes are confined by %s", ", ".join(active))


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    # One thread per process, because there are as many processes as cores.
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    kept = {"MALLOC_MMAP_THRESHOLD_": _KEPT_HEAP_BYTES, "MALLOC_TRIM_THRESHOLD_": _KEPT_HEAP_BYTES}
    return {**passed, **single, **kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class SandboxedDecoder:
    """Decodes one media item in a separate process. The process is killed after `limit_s` seconds, at `end_s`
    on the monotonic clock, or when `is_needed` returns False.
    """

    def __init__(
        self, process: DecoderProcess, *, limit_s: float, end_s: float, is_needed: Callable[[], bool]
    ) -> None:
        self._process = process
        self._limit_s = limit_s
        self._end_s = end_s
        self._is_needed = is_needed

    def decode_image(
        self,
        data: bytes,
        max_pixels: int,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> RgbPixels:
        job = decoders.ImageJob(max_pixels=max_pixels, decoding=decoding, limit_s=self._job_limit_s())
        assigned = self._assign_job(job, [data])
        opened = _read_header(assigned)
        if not 0 < opened.width * opened.height <= max_pixels:
            raise _reject(assigned)
        _send_decision(assigned, lambda: on_header(MediaHeader.for_image(opened.width, opened.height)))
        # In some formats, the decoded image has other sides than the header says.
        shape, pixels = _read_result(
            assigned, lambda s: len(s) == 3 and s[2] == 3 and s[0] * s[1] <= max_pixels
        )
        return RgbPixels(shape[1], shape[0], memoryview(pixels))

    def decode_audio(self, data: bytes, max_s: float, on_header: OnHeader) -> AudioSamples:
        assigned = self._assign_job(decoders.AudioJob(max_s=max_s, limit_s=self._job_limit_s()), [data])
        opened = _read_header(assigned)
        if opened.rate <= 0 or not 0 <= opened.seconds <= max_s:
            raise _reject(assigned)
        _send_decision(assigned, lambda: on_header(MediaHeader.for_audio(opened.seconds, opened.rate)))
        most = min(math.floor(max_s * opened.rate), MAX_SAMPLES)
        _, samples = _read_result(assigned, lambda s: len(s) == 1 and s[0] <= most, itemsize=4)
        return AudioSamples(samples=np.frombuffer(samples, np.float32), rate=opened.rate)

    def decode_video(
        self,
        data: bytes,
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        on_header: OnHeader,
    ) -> VideoFrames:
        job = decoders.VideoJob(
            max_s=limits.max_s,
            max_frames=limits.max_frames,
            max_pixels=limits.max_pixels,
            limit_s=self._job_limit_s(),
        )
        return self._run_video_job(job, [data], choose, limits, on_header)

    def decode_frames(
        self,
        images: Sequence[bytes],
        fps: float,
        limits: VideoLimits,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> VideoFrames:
        job = decoders.FramesJob(
            sizes=tuple(map(len, images)),
            fps=fps,
            max_frames=limits.max_frames,
            max_pixels=limits.max_pixels,
            decoding=decoding,
            limit_s=self._job_limit_s(),
        )
        return self._run_video_job(job, images, lambda source: range(source.total), limits, on_header)

    def _run_video_job(
        self,
        job: decoders.VideoJob | decoders.FramesJob,
        contents: Sequence[bytes],
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        on_header: OnHeader,
    ) -> VideoFrames:
        assigned = self._assign_job(job, contents)
        header = _read_header(assigned)
        if header.width * header.height <= 0 or header.total < 1 or header.fps <= 0:
            raise _reject(assigned)
        source = VideoHeader(total=header.total, fps=header.fps, width=header.width, height=header.height)
        indices: list[int] = []
        _send_decision(
            assigned, lambda: indices.extend(choose_frames(source, choose, limits, on_header)), indices
        )
        one = source.width * source.height

        def fits(s: tuple[int, ...]) -> bool:
            return len(s) == 4 and s[0] == len(indices) and s[1] * s[2] == one and s[3] == 3

        shape, pixels = _read_result(assigned, fits)
        taken = np.frombuffer(pixels, np.uint8).reshape(shape)
        return VideoFrames(frames=taken, indices=tuple(indices), header=source)

    def _job_limit_s(self) -> float:
        return max(min(self._limit_s, self._end_s - time.monotonic()), 0.01)

    def _assign_job(self, job: decoders.Job, contents: Sequence[bytes]) -> AssignedJob:
        return self._process.assign_job(
            job, contents, end_s=self._end_s, limit_s=self._limit_s, is_needed=self._is_needed
        )


def _read_header(assigned: AssignedJob) -> decoders.DecodeHeader:
    message, fd = assigned.receive_message()
    if fd is not None:
        os.close(fd)
    if not isinstance(message, decoders.DecodeHeader):
        raise _reject(assigned)
    return message


def _send_decision(assigned: AssignedJob, accept: Callable[[], None], indices: Sequence[int] = ()) -> None:
    """Let the process decode the media item, unless `accept` raises an exception."""
    going = False
    try:
        accept()
        going = True
    finally:
        assigned.send_decision(decoders.DecodeGo(tuple(indices)) if going else decoders.DecodeStop())


def _read_result(
    assigned: AssignedJob, fits: Callable[[tuple[int, ...]], bool], *, itemsize: int = 1
) -> tuple[tuple[int, ...], mmap.mmap]:
    message, fd = assigned.receive_message()
    if fd is None:
        raise _reject(assigned)
    if (
        not isinstance(message, decoders.DecodeDone)
        or min(message.shape, default=0) < 1
        or not fits(message.shape)
    ):
        os.close(fd)
        raise _reject(assigned)
    try:
        return message.shape, sealed_memory.seal_and_map(fd, math.prod(message.shape) * itemsize)
    except (OSError, ValueError):
        raise _reject(assigned) from None


def _reject(assigned: AssignedJob) -> MediaError:
    assigned.kill()
    return MediaError("the decoder sent an invalid result", reason="crashed")
