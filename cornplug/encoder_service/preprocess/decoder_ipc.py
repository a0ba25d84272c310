"""Messages between the service and a decoding process: msgpack on a SOCK_SEQPACKET pair, and media in memfds.

    ImageJob, AudioJob, VideoJob, FramesJob + a memfd of the bytes ──>
                         <── MediumOpened: the header
    DecodeGo, or DecodeStop ──>
                         <── MediumDecoded + a memfd of the result,  or DecodeFailed, at any time

The service seals the memfd of a result. The decoding process can then neither change nor shorten bytes that
the service has checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from cornplug.encoder_service.wire.messages import Decoding

MAX_MESSAGE_BYTES: Final = 64 << 10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class ImageJob(msgspec.Struct, frozen=True, tag="image"):
    max_pixels: int
    decoding: Decoding
    limit_s: float


class AudioJob(msgspec.Struct, frozen=True, tag="audio"):
    max_s: float
    limit_s: float


class VideoJob(msgspec.Struct, frozen=True, tag="video"):
    max_s: float
    max_frames: int
    max_pixels: int
    limit_s: float


class FramesJob(msgspec.Struct, frozen=True, tag="frames"):
    """Job to decode a video that was sent as images. The memfd contains the images, one after another."""

    sizes: tuple[int, ...]
    fps: float
    max_frames: int
    max_pixels: int
    decoding: Decoding
    limit_s: float


class DecodeGo(msgspec.Struct, frozen=True, tag="go"):
    """Request to decode the media item. For a video file, only the frames with these numbers."""

    indices: tuple[int, ...] = ()


class DecodeStop(msgspec.Struct, frozen=True, tag="stop"):
    """Request to end the job without decoding the media item."""


class DecoderReady(msgspec.Struct, frozen=True, tag="ready"):
    """Report that the process has started. `bars` are the active restrictions (`jail.RESTRICTIONS`)."""

    bars: tuple[str, ...]


class DecodeHeader(msgspec.Struct, frozen=True, tag="opened"):
    """Report of the media item's header. Fields that do not apply to the modality are 0."""

    width: int = 0
    height: int = 0
    total: int = 0
    """Number of frames in the video file."""
    fps: float = 0.0
    seconds: float = 0.0
    rate: int = 0


class DecodeDone(msgspec.Struct, frozen=True, tag="decoded"):
    """Report that the media item was decoded. The shape is (height, width, 3), (frames, height, width, 3) or
    (samples,)."""

    shape: tuple[int, ...]


class DecodeFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Report that decoding failed, with the reason and message of the MediaError."""

    reason: str
    message: str


Job = ImageJob | AudioJob | VideoJob | FramesJob
ToDecoder = Job | DecodeGo | DecodeStop
FromDecoder = DecoderReady | DecodeHeader | DecodeDone | DecodeFailed


def send(sock: socket.socket, message: ToDecoder | FromDecoder, fd: int | None = None) -> None:
    """Send a message. Raises OSError if the other side has disconnected."""
    body = msgspec.msgpack.encode(message)
    socket.send_fds(sock, [body], [] if fd is None else [fd])


def receive(sock: socket.socket, kind: Any) -> tuple[Any, int | None]:
    """Return (next message, its descriptor or None). The caller must close the descriptor.

    Raises ConnectionResetError if the other side has disconnected, and TimeoutError after the socket's
    timeout.
    """
    body, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
    fd = fds[0] if fds else None
    if not body:
        raise ConnectionResetError("the other side has ended")
    try:
        return msgspec.msgpack.decode(body, type=kind), fd
    except (msgspec.DecodeError, msgspec.ValidationError):
        if fd is not None:
            os.close(fd)
        raise


def create_memfd(contents: Iterable[bytes | memoryview]) -> int:
    """Return the descriptor of a new memfd that contains `contents`. The caller must close it."""
    fd = os.memfd_create("cornplug-decode", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in contents:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
    except OSError:
        os.close(fd)
        raise
    return fd


def seal_and_map(fd: int, size: int) -> mmap.mmap:
    """Seal a memfd, so that no process can change it, and return its bytes. Closes the descriptor.

    Raises ValueError if the memfd does not have `size` bytes, and OSError if it cannot be sealed.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        if os.fstat(fd).st_size != size or size == 0:
            raise ValueError(f"{os.fstat(fd).st_size} bytes, expected {size}")
        # Torch requires writable memory, so map a private copy.
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
