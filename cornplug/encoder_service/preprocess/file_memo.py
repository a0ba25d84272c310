"""Remembers the media digests of files that were decoded, so that a file that comes again is not.

    file's bytes, decoding rule, versions, limits, tenant ─SHA-256─> (media digest, shape)

An entry is made only once a file passed every check and was decoded. Its name contains all that decides the
result: a file under other limits or another rule is another file. Entries live in this process's memory and
end with it, so that no other process's decoder is believed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import av
from PIL import __version__ as pillow_version
from PIL import features

from cornplug import identity

REMEMBERED_FILES: Final = 32_768
"""Entries by default; one has about 400 bytes, however long its tenant's salt is."""
_MAX_TENANTS: Final = 1024
_CODECS: Final = ("jpg", "libjpeg_turbo", "jpg_2000", "webp", "avif", "zlib", "libtiff")


@dataclass(frozen=True, slots=True)
class DecodedFile:
    """What a file was decoded to."""

    digest: bytes
    """The media digest, 32 bytes."""
    shape: tuple[int, ...]
    """(height, width) of an image, (frames, height, width) of a video, (samples,) of audio."""


class FileMemo:
    """Thread-safe. At most `max_files` entries; a tenant that fills it loses its own oldest ones."""

    def __init__(self, max_files: int = REMEMBERED_FILES) -> None:
        """0 files: nothing is remembered."""
        self._max_files = max_files
        self._lock = threading.Lock()
        self._files = 0
        self._tenants: OrderedDict[bytes | None, OrderedDict[bytes, DecodedFile]] = OrderedDict()

    def __len__(self) -> int:
        return self._files

    def recall(self, tenant: str | None, name: bytes) -> DecodedFile | None:
        """The file's entry; None where this tenant sent no such file lately."""
        key = _tenant_key(tenant)
        with self._lock:
            files = self._tenants.get(key)
            found = None if files is None else files.get(name)
            if files is not None and found is not None:
                files.move_to_end(name)
                self._tenants.move_to_end(key)
            return found

    def remember(self, tenant: str | None, name: bytes, decoded: DecodedFile) -> None:
        """Add an entry; over the bound, the tenant with most entries loses its least recently used one."""
        if self._max_files == 0:
            return
        key = _tenant_key(tenant)
        with self._lock:
            files = self._tenants.setdefault(key, OrderedDict())
            self._tenants.move_to_end(key)
            self._files += name not in files
            files[name] = decoded
            files.move_to_end(name)
            if self._files > self._max_files:
                self._drop_oldest(max(self._tenants, key=lambda t: len(self._tenants[t])))
            if len(self._tenants) > _MAX_TENANTS:
                self._files -= len(self._tenants.popitem(last=False)[1])

    def _drop_oldest(self, tenant: bytes | None) -> None:
        files = self._tenants[tenant]
        files.popitem(last=False)
        self._files -= 1
        if not files:
            del self._tenants[tenant]


def _tenant_key(salt: str | None) -> bytes | None:
    """The tenant's key in the memo, of 32 bytes: SGLang's protocol bounds no salt."""
    return None if salt is None else hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


def file_name(spec: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """Name of a file (or of a video's images) for `FileMemo`: 32 bytes.

    `spec` holds whatever decides its decoded content besides its bytes, as JSON values; the versions of the
    decoders are added here.
    """
    hashes = [hashlib.sha256(part).digest() for part in parts]
    return identity.digest("cornplug-file-v1", identity.canonical({**spec, **_versions()}), *hashes)


@lru_cache(maxsize=1)
def _versions() -> Mapping[str, Any]:
    codecs = {codec: features.version(codec) for codec in _CODECS}
    ffmpeg = {name: list(version) for name, version in av.library_versions.items()}
    return {"pillow": pillow_version, "codecs": codecs, "av": av.__version__, "ffmpeg": ffmpeg}
