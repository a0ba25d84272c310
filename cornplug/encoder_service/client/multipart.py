"""Reader for `multipart/mixed` as the encoder service streams it, part by part as bytes arrive."""

from __future__ import annotations

from typing import Final

from cornplug.errors import EncoderUnavailable

MIXED: Final = "multipart/mixed"
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_BODY_BYTES: Final = 1 << 30
_END: Final = b"\r\n\r\n"


class MultipartReader:
    """Parser of a response's bytes. Each part has a content-length, so the boundary is never searched for."""

    def __init__(self, content_type: str) -> None:
        """Raises EncoderUnavailable("encoder_bad_response") for another content type."""
        kind, _, boundary = content_type.partition("boundary=")
        if not kind.startswith(MIXED) or not boundary:
            raise _bad_response(f"content-type {content_type[:80]!r}")
        self._delimiter = b"--" + boundary.strip('"').encode()
        self._held = bytearray()
        self._head: dict[str, str] | None = None
        self.ended = False
        """Whether the last delimiter has arrived."""

    def feed(self, data: bytes) -> list[tuple[dict[str, str], bytes]]:
        """Return (headers with names in lower case, body) of every part that is now complete.

        Raises EncoderUnavailable("encoder_bad_response").
        """
        self._held += data
        found = []
        while not self.ended:
            if self._head is None and not self._read_head():
                break
            if self._head is not None:
                size = _length(self._head)
                if len(self._held) < size + 2:
                    break
                found.append((self._head, bytes(self._held[:size])))
                del self._held[: size + 2]
                self._head = None
        return found

    def _read_head(self) -> bool:
        """Return whether the headers of a part or the last delimiter was read."""
        if self._held.startswith(self._delimiter + b"--"):
            self.ended = True
            return True
        at = self._held.find(_END)
        if at < 0:
            if len(self._held) > _MAX_HEAD_BYTES:
                raise _bad_response("the headers of a part are too long")
            return False
        first, *lines = bytes(self._held[:at]).split(b"\r\n")
        if first != self._delimiter:
            raise _bad_response("a part does not start with the delimiter")
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self._head = {name.strip().lower(): value.strip() for name, _, value in pairs}
        del self._held[: at + len(_END)]
        return True


def _length(head: dict[str, str]) -> int:
    text = head.get("content-length", "")
    if not text.isdigit() or int(text) > _MAX_BODY_BYTES:
        raise _bad_response(f"a part of {text[:20] or 'no'} bytes")
    return int(text)


def _bad_response(why: str) -> EncoderUnavailable:
    return EncoderUnavailable(f"not a response of an encoder service: {why}", reason="encoder_bad_response")
