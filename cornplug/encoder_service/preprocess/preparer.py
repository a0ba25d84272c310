"""Preparation of media: computes a request to the encoder from a file's bytes. Cached results skip steps.

recall:   file's digest ─DecodedFileCache─> media digest ─> key ─> cached? reply
prepare:  decode ─> media digest ─> key ─> cached? reply, or else preprocess

`DecodedFileCache` remembers the media digests of decoded files, so a repeated file is not decoded again:

    file's bytes, decoding rule, versions, limits, tenant ─SHA-256─> (media digest, shape)

An entry is added only after a file has passed every check and was decoded. The name of an entry depends on
everything that affects the result. Therefore the same file with other limits or another rule has another
entry. Entries are kept only in the memory of this process, so that a service never has to trust another
service's entries.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import av
from PIL import __version__ as pillow_version
from PIL import features

from cornplug import identity
from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.formats import messages
from cornplug.encoder_service.formats.messages import Decoding, EncodeReply, EncodeRequest
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.preprocess.prepared_media import (
    AudioPreprocessor,
    ImagePreprocessor,
    VideoPreprocessor,
)
from cornplug.encoder_service.preprocess.preprocessor import (
    IN_PROCESS_CONTEXT,
    FrameSampling,
    Inputs,
    MediaForm,
    MediaLimits,
    MediaPreprocessor,
    PreprocessContext,
)
from cornplug.errors import CheckpointError, EncoderRefused

MAX_CACHED_FILES: Final = 32_768
"""Default maximum number of entries in `DecodedFileCache`. An entry takes about 400 bytes, regardless of the
length of the tenant's salt."""
_MAX_TENANTS: Final = 1024
_CODECS: Final = ("jpg", "libjpeg_turbo", "webp", "zlib")
_BASE64_SLICE_CHARS: Final = 1 << 20
"""Number of base64 characters to decode at a time. Other threads can run between two such steps."""
HTTP_APP: Final = "http"
"""Default app of requests for media that arrive over HTTP."""
SGLANG_APP: Final = "sglang"
"""App of requests from SGLang's servers."""
log = logging.getLogger(__name__)
LookUp = Callable[[EncodeRequest], EncodeReply | None]
"""Function that returns the reply to a request if its embedding is cached, else None."""
DEFAULT_SAMPLING: Final = FrameSampling()
PREPROCESSORS: Final[Mapping[Modality, Callable[[LoadedModel, MediaLimits], MediaPreprocessor]]] = {
    "image": ImagePreprocessor,
    "video": VideoPreprocessor,
    "audio": AudioPreprocessor,
}


@dataclass(frozen=True, slots=True)
class DecodedFile:
    """Digest and shape of a decoded file."""

    digest: bytes
    """Media digest, 32 bytes."""
    shape: tuple[int, ...]
    """(height, width) of an image, (frames, height, width) of a video, (samples,) of audio."""


class DecodedFileCache:
    """Digests of decoded files, with at most `max_files` entries. Thread-safe. A tenant that fills the cache
    loses its own oldest entries.
    """

    def __init__(self, max_files: int = MAX_CACHED_FILES) -> None:
        """Create an empty cache. If `max_files` is 0, nothing is remembered."""
        self._max_files = max_files
        self._lock = threading.Lock()
        self._files = 0
        self._tenants: OrderedDict[bytes | None, OrderedDict[bytes, DecodedFile]] = OrderedDict()

    def __len__(self) -> int:
        return self._files

    def look_up(self, tenant: str | None, name: bytes) -> DecodedFile | None:
        """Return the file's entry, or None if this tenant has no entry for it."""
        key = _tenant_key(tenant)
        with self._lock:
            files = self._tenants.get(key)
            found = None if files is None else files.get(name)
            if files is not None and found is not None:
                files.move_to_end(name)
                self._tenants.move_to_end(key)
            return found

    def add(self, tenant: str | None, name: bytes, decoded: DecodedFile) -> None:
        """Add an entry. If there are too many entries, drop the least recently used entry of the tenant with
        the most entries.
        """
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
    """Return the tenant's key in the cache, or None without a salt. The key is a digest, because SGLang's
    protocol does not limit the length of a salt.
    """
    return None if salt is None else hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


def decoded_file_key(spec: Mapping[str, Any], contents: Sequence[bytes]) -> bytes:
    """Return the name (32 bytes) of a file, or of the images of a video, for `DecodedFileCache`.

    `spec` contains everything that determines the decoded content, as JSON values, except the bytes and the
    decoders' versions.
    """
    hashes = [hashlib.sha256(part).digest() for part in contents]
    return identity.digest(
        "cornplug-file-v1", identity.canonical_json({**spec, **_decoder_versions()}), *hashes
    )


@lru_cache(maxsize=1)
def _decoder_versions() -> Mapping[str, Any]:
    codecs = {codec: features.version(codec) for codec in _CODECS}
    ffmpeg = {name: list(version) for name, version in av.library_versions.items()}
    return {"pillow": pillow_version, "codecs": codecs, "av": av.__version__, "ffmpeg": ffmpeg}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessedMediaItem:
    request: EncodeRequest
    """Request to the encoder. The request's own `inputs` are empty."""
    inputs: Inputs
    """Tower inputs as tensors in this process. If `cached_reply` is set, only the patch grid."""
    dtype: str
    """Name of the embedding's torch dtype, without the "torch." prefix."""
    media_digest: bytes
    """Media digest, 32 bytes."""
    cached_reply: EncodeReply | None = None
    """Reply with the embedding if it was cached, else None. If it was cached, the processor did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """One media item of a request, before decoding."""

    model: str
    modality: Modality
    form: MediaForm = "file"
    contents: Sequence[bytes]
    """Bytes of the file, or bytes of each image of a video."""
    salt: str | None
    deadline_s: float
    sampling: FrameSampling = DEFAULT_SAMPLING
    """Frames to sample from a video. The cache key depends on the frames and their times."""
    decoding: Decoding = messages.DEFAULT_DECODING
    """Decoding rule for an image, or for the images of a video. It depends on the engine that will use the
    embedding.
    """
    app: str = HTTP_APP
    """App of the request."""


class MediaPreparer:
    """Prepares media for all models of a registry. Thread-safe.

    Preprocessors are created when a model is loaded. They do not run code from checkpoints. Raises
    CheckpointError("bad_config") if a checkpoint has no processor that loads.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        secret: bytes,
        limits: MediaLimits,
        max_cached_files: int = MAX_CACHED_FILES,
    ) -> None:
        self._registry = registry
        self._secret = secret
        self._limits = limits
        self._files = DecodedFileCache(max_cached_files)
        # The keys are model identities, because a reload may change which model has a name.
        self._preprocessors: dict[bytes, MediaPreprocessor] = {}
        registry.on_load(self._add_preprocessors)

    def open(self, source: MediaSource) -> UndecodedMedia:
        """Check the request and return the media item, which is not decoded yet.

        Raises EncoderRefused("unknown_model"), ("bad_input"), or ("modality") if the model does not accept
        the modality.
        """
        if source.modality != "video" and source.sampling != DEFAULT_SAMPLING:
            raise EncoderRefused(
                f"fps, num_frames: apply to videos only, not to {source.modality}", reason="bad_input"
            )
        if source.form == "images" and source.sampling.num_frames is not None:
            raise EncoderRefused(
                "num_frames: not allowed for a video sent as images; all images are used", reason="bad_input"
            )
        loaded = self._registry.find_by_name(source.model)
        if loaded is None:
            raise unknown_model_error(source.model)
        model_identity = loaded.served.identity_for(source.modality)
        preprocessor = self._preprocessors.get(model_identity or b"")
        if model_identity is None or preprocessor is None:
            taken = [m.name for m in loaded.served.modalities if m.identity in self._preprocessors]
            raise EncoderRefused(
                f"{source.modality}: {loaded.served.name} accepts only {', '.join(taken)}", reason="modality"
            )
        return UndecodedMedia(source, loaded, model_identity, preprocessor, self._files, self._secret)

    def accepts(self, model_identity: bytes) -> bool:
        """Return whether media can be prepared for the model and modality with this identity."""
        return model_identity in self._preprocessors

    def prepare(
        self, source: MediaSource, context: PreprocessContext = IN_PROCESS_CONTEXT
    ) -> PreprocessedMediaItem:
        """Decode and preprocess a media item in the same way as its model's engine, without a cache lookup.
        Raises the same errors as `open` and `UndecodedMedia.prepare`."""
        return self.open(source).prepare(context)

    def _add_preprocessors(self, loaded: LoadedModel) -> None:
        for modality in loaded.checkpoint.family.inputs:
            model_identity, part = loaded.served.identity_for(modality), loaded.part_for(modality)
            if modality not in PREPROCESSORS or model_identity is None or part is None:
                continue
            try:
                self._preprocessors[model_identity] = PREPROCESSORS[modality](part, self._limits)
            except CheckpointError as e:
                # In a generic family, some modalities may work and others may not.
                if (
                    not loaded.checkpoint.family.generic
                    or modality == loaded.checkpoint.family.first_modality
                ):
                    raise
                log.warning("%s: %s: not served: %s", loaded.served.name, modality, e)


class UndecodedMedia:
    """One media item that is not decoded yet. Call `look_up_cached` first, and `prepare` if the result is
    None. Use it from one thread at a time."""

    def __init__(
        self,
        source: MediaSource,
        loaded: LoadedModel,
        model_identity: bytes,
        preprocessor: MediaPreprocessor,
        files: DecodedFileCache,
        secret: bytes,
    ) -> None:
        self._source = source
        self._loaded = loaded
        self._identity = model_identity
        self._preprocessor = preprocessor
        self._files = files
        self._secret = secret
        self._cached_file_key: bytes | None = None

    def look_up_cached(self, look_up: LookUp) -> PreprocessedMediaItem | None:
        """Return the item with its reply if this tenant sent the same file before and the embedding is
        cached. Otherwise return None. Does not decode the item."""
        decoded = self._files.look_up(self._source.salt, self._file_key())
        return None if decoded is None else self._with_cached_reply(decoded, look_up)

    def prepare(
        self, context: PreprocessContext = IN_PROCESS_CONTEXT, look_up: LookUp | None = None
    ) -> PreprocessedMediaItem:
        """Decode the item. Return it with its reply if `look_up` returns one, otherwise preprocessed.

        `context` decodes the item, and may refuse it. Raises the same MediaErrors as the modality's
        preprocessor.
        """
        source = self._source
        medium = self._preprocessor.decode(
            source.contents, source.form, source.sampling, source.decoding, context
        )
        decoded = DecodedFile(medium.digest, medium.shape)
        self._files.add(source.salt, self._file_key(), decoded)
        if look_up is not None and (cached := self._with_cached_reply(decoded, look_up)) is not None:
            return cached
        return self._build_result(decoded, medium.preprocess())

    def _with_cached_reply(self, decoded: DecodedFile, look_up: LookUp) -> PreprocessedMediaItem | None:
        grid = self._preprocessor.shape_inputs(decoded.shape)
        if grid is None:
            return None
        made = self._build_result(decoded, grid)
        reply = look_up(made.request)
        return None if reply is None else replace(made, cached_reply=reply)

    def _build_result(self, decoded: DecodedFile, inputs: Inputs) -> PreprocessedMediaItem:
        source, served = self._source, self._loaded.served
        wanted = self._loaded.checkpoint.family.inputs[source.modality]
        request = EncodeRequest(
            id=0,
            identity=self._identity,
            key=identity.embedding_key(self._secret, self._identity, decoded.digest, source.salt),
            cache_salt=source.salt,
            inputs={},
            app=source.app,
            deadline_s=source.deadline_s,
        )
        return PreprocessedMediaItem(
            request=request,
            inputs={name: inputs[name] for name in wanted or inputs if name in inputs},
            dtype=served.dtype,
            media_digest=decoded.digest,
        )

    def _file_key(self) -> bytes:
        if self._cached_file_key is None:
            source = self._source
            spec = self._preprocessor.decode_spec(source.form, source.sampling, source.decoding)
            self._cached_file_key = decoded_file_key(spec, source.contents)
        return self._cached_file_key


def unknown_model_error(model: str) -> EncoderRefused:
    """Return the refusal for a model that is not served.

    The message does not list other models. Their names are often folders, which only callers with access to
    the model list may see.
    """
    return EncoderRefused(
        f"model: {model[:200]!r} is not served; GET /v1/models lists the served models",
        reason="unknown_model",
    )


def media_bytes(field: str, text: str) -> bytes:
    """Return a media item's bytes from JSON text: base64, or a data URL with base64. Remote URLs are not
    fetched.

    Raises EncoderRefused("bad_input") or ("remote_url").
    """
    if text.startswith("data:"):
        header, _, text = text.partition(",")
        if not header.endswith(";base64"):
            raise EncoderRefused(f"{field}: a data URL must be base64", reason="bad_input")
    elif "://" in text[:32]:
        raise EncoderRefused(
            f"{field}: remote URLs are not supported here; send the bytes", reason="remote_url"
        )
    try:
        return _decode_base64(text)
    except (binascii.Error, ValueError) as e:
        raise EncoderRefused(f"{field}: not base64: {e}", reason="bad_input") from None


def _decode_base64(text: str) -> bytes:
    if text.find("=", 0, len(text) - 2) >= 0:
        raise binascii.Error("padding before the end")
    slices = (text[at : at + _BASE64_SLICE_CHARS] for at in range(0, len(text), _BASE64_SLICE_CHARS))
    return b"".join(base64.b64decode(piece, validate=True) for piece in slices)
