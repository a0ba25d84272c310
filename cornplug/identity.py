"""Keys of entries: 32-byte digests of everything on which a result depends. Pure functions without I/O.

Each digest is SHA-256 over a domain name and length-prefixed parts, so that different inputs always have
different encodings. The domain name contains a version. Golden vectors in tests/golden/identity.json ensure
that the digests do not change.

    tower fp ─┐
    projector fp ┼─ model identity ─┐
    spec fp ──┘                     ├─ embedding key     (a tower's rows for a medium)
    media digest ───────────────────┤
    tenant salt, store secret ──────┘
    LM fp, kv spec ── kv root ── chain of 16-token links ── page key   (KV of a prefix)
                                  └ tokens of text, and placeholders for media, derived from
                                    the lineage (embedding key and number of rows)

`cornplug.checkpoints.checkpoint` computes the fingerprints (fp) of tower, projector and language model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

DIGEST_BYTES: Final = 32
LINK_TOKENS: Final = 16
"""Number of tokens in one link of the page chain, independent of an engine's page size."""

_WIDE_TAG: Final = b"sglang-mm-wide-pad-v1"
_WIDE_BASE: Final = 1_000_000
_WIDE_MASK: Final = (1 << 62) - 1
_U32_MAX: Final = (1 << 32) - 1
_LINK_BYTES: Final = 4 * LINK_TOKENS
"""Size in bytes of a link whose tokens all fit in 32 bits."""


def digest(domain: str, *parts: bytes) -> bytes:
    """Return the SHA-256 of a domain name and parts, each prefixed by its length as 8 bytes big-endian."""
    return hashlib.sha256(_length_prefixed(domain.encode(), *parts)).digest()


def _length_prefixed(*parts: bytes) -> bytes:
    return b"".join([struct.pack(">Q", len(part)) + part for part in parts])


def keyed_digest(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of `digest` with the store's secret.

    Only processes with the secret can compute keys.
    """
    return hmac.digest(secret, digest(domain, *parts), "sha256")


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Encode a spec as canonical JSON (sorted keys, no spaces, no NaN).

    Raises TypeError or ValueError for a value that JSON cannot represent. Such a value must not be omitted,
    because different results would then have the same key.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def tensors_fingerprint(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """Return the fingerprint of a set of tensors.

    Each tensor is (normalised name, safetensors dtype, shape, SHA-256 of raw bytes). Their order does not
    affect the result. Raises ValueError if a name occurs twice.
    """
    rows: dict[str, bytes] = {}
    for name, dtype, shape, data in tensors:
        if name in rows:
            raise ValueError(f"tensor {name!r} appears twice")
        packed = struct.pack(f">{len(shape)}Q", *shape)
        rows[name] = digest("cornplug-tensor-v1", name.encode(), dtype.encode(), packed, data)
    return digest("cornplug-weights-v1", *(rows[name] for name in sorted(rows)))


def spec_fingerprint(spec: Mapping[str, Any]) -> bytes:
    """Return the fingerprint of the settings on which a tower's output depends, without weights and media."""
    return digest("cornplug-spec-v1", canonical_json(spec))


def model_identity(tower_fp: bytes, projector_fp: bytes, spec_fp: bytes) -> bytes:
    """Return the digest of everything that an embedding depends on, apart from the medium.

    It is the same for every fine-tune, merge or quantisation that does not change the tower and projector.
    """
    return digest("cornplug-model-v2", tower_fp, projector_fp, spec_fp)


def pixels_digest(mode: str, width: int, height: int, pixels: bytes | memoryview) -> bytes:
    """Return the media digest of a decoded image, from its mode ("RGB", "RGBA", "L"), size and row-major
    bytes."""
    h = hashlib.sha256(b"cornplug-pixels-v1")
    h.update(struct.pack(">16sQQ", mode.encode(), width, height))
    h.update(pixels)
    return h.digest()


def frames_digest(
    width: int, height: int, times_s: Sequence[float], frames: Iterable[bytes | memoryview]
) -> bytes:
    """Return the media digest of a video as the processor receives it: sampled RGB frames and their times.

    Args:
        times_s: Seconds from the start of the video, one per frame. They are rounded to microseconds, so that
            different ways to compute them agree.
        frames: Row-major RGB bytes of each frame, width * height * 3.

    The digest does not include the sampling settings, because they determine the frames and times. Raises
    ValueError if a frame has another size, if the numbers of frames and times differ, or if a time is not
    finite.
    """
    h = hashlib.sha256(b"cornplug-frames-v1")
    h.update(struct.pack(">16sQQQ", b"RGB", width, height, len(times_s)))
    for time_s in times_s:
        if not math.isfinite(time_s):
            raise ValueError(f"the time of a frame is {time_s} s, must be finite")
        h.update(struct.pack(">q", round(time_s * 1e6)))
    for frame, time_s in zip(frames, times_s, strict=True):
        size = memoryview(frame).nbytes
        if size != width * height * 3:
            raise ValueError(f"the frame at {time_s} s has {size} bytes, want {width} x {height} x 3")
        h.update(frame)
    return h.digest()


def samples_digest(rate: int, samples: bytes | memoryview) -> bytes:
    """Return the media digest of a decoded audio clip.

    `rate` is the sample rate, and `samples` are the mono samples as little-endian float32.
    """
    h = hashlib.sha256(b"cornplug-samples-v1")
    h.update(struct.pack(">QQ", rate, len(samples)))
    h.update(samples)
    return h.digest()


def array_digest(dtype: str, shape: Sequence[int], data: bytes | memoryview) -> bytes:
    """Return the digest of a C-contiguous tensor, for the input tensors of a tower.

    `dtype` is numpy's name of the dtype, and `data` contains the values as little-endian bytes.
    """
    h = hashlib.sha256(b"cornplug-array-v1")
    h.update(struct.pack(">16sB", dtype.encode(), len(shape)))
    h.update(struct.pack(f">{len(shape)}Q", *shape))
    h.update(data)
    return h.digest()


def processor_video_digest(frames: bytes, metadata: Mapping[str, Any]) -> bytes:
    """Return the media digest of a video with the metadata that an engine passes to the model's processor.

    Args:
        frames: `array_digest` of the sampled frames.
        metadata: Frame rate, duration and indices of the sampled frames. They determine positions and
            timestamps in the language model, which `frames_digest` does not cover.

    Raises TypeError or ValueError in the same cases as `canonical_json`.
    """
    return digest("cornplug-processor-video-v1", frames, canonical_json(metadata))


def embedding_key(secret: bytes, model: bytes, media: bytes, salt: str | None) -> bytes:
    """Return the key of an embedding: the output of tower and projector for one medium.

    Args:
        model: `model_identity`.
        media: `pixels_digest`, `frames_digest`, `processor_video_digest`, `samples_digest` or `array_digest`.
        salt: The request's salt, or None. All requests without a salt share entries. "" is also a salt.
    """
    return keyed_digest(secret, "cornplug-embedding-v1", model, media, _encode_salt(salt))


def feature_key(
    secret: bytes, tower_fp: bytes, tower_spec_fp: bytes, inputs: Sequence[bytes], salt: str | None
) -> bytes:
    """Return the key of a tower's output before the projector, which different models share.

    `inputs` are the `array_digest`s of the tower's input tensors in a fixed order. The key does not include
    the preprocessing, because it determines these tensors.
    """
    return keyed_digest(
        secret, "cornplug-feature-v1", tower_fp, tower_spec_fp, digest("inputs", *inputs), _encode_salt(salt)
    )


def kv_root(secret: bytes, language_model_fp: bytes, kv_spec: Mapping[str, Any], salt: str | None) -> bytes:
    """Return the digest of everything that KV depends on, apart from the tokens.

    This includes the language model (with adapters and quantisation), cache dtype, rope, page geometry and
    salt.
    """
    return keyed_digest(
        secret, "cornplug-kv-root-v2", language_model_fp, canonical_json(kv_spec), _encode_salt(salt)
    )


def media_item_lineage(key: bytes, rows: int) -> bytes:
    """Return the 32-byte digest that represents a medium in the keys of KV pages.

    Args:
        key: Embedding key of the medium.
        rows: Number of rows of the medium's embedding in this prompt. It equals the number of the medium's
            placeholder tokens, not counting ordinary tokens between them. The number can differ between
            prompts, because some processors take the other media of a prompt into account. If the number
            differs, the values of the first rows differ too.

    Raises ValueError if the key does not have 32 bytes, or if `rows` is negative.
    """
    if len(key) != DIGEST_BYTES:
        raise ValueError(f"key must be {DIGEST_BYTES} bytes, not {len(key)}")
    if rows < 0:
        raise ValueError(f"rows must be at least 0, not {rows}")
    return digest("cornplug-lineage-v1", key, struct.pack(">Q", rows))


def placeholder_tokens(lineage: bytes) -> tuple[int, int, int, int]:
    """Return the four token values that represent, in rotation, the placeholder tokens of a medium.

    `lineage` is the result of `media_item_lineage`. SGLang's `MultimodalDataItem.set_identity(lineage)` puts
    the same values into the prompt's tokens (sglang/srt/managers/schedule_batch.py, 0.5.23). Each value is
    1_000_000 plus 62 bits of sha256(tag || lineage), which is larger than any vocabulary.
    """
    if len(lineage) != DIGEST_BYTES:
        raise ValueError(f"lineage must be {DIGEST_BYTES} bytes, not {len(lineage)}")
    a, b, c, d = struct.unpack(">4Q", hashlib.sha256(_WIDE_TAG + lineage).digest())
    return (
        _WIDE_BASE + (a & _WIDE_MASK),
        _WIDE_BASE + (b & _WIDE_MASK),
        _WIDE_BASE + (c & _WIDE_MASK),
        _WIDE_BASE + (d & _WIDE_MASK),
    )


def hash_chain(prior: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return the chain values of all links in `tokens`, whose number must be a multiple of LINK_TOKENS.

    A chain value is SGLang's published page hash: sha256(prior || tokens as little-endian u32). If a token
    exceeds 32 bits, it is sha256(prior || 0xff || tokens as little-endian u64)
    (sglang/srt/mem_cache/utils.py, 0.5.23). `prior` is the previous chain value, or b"" for the first link.
    """
    if len(tokens) % LINK_TOKENS:
        raise ValueError(f"{len(tokens)} tokens are not a multiple of {LINK_TOKENS}")
    try:
        packed = array("I", tokens)
    except OverflowError:
        return _hash_chain_wide(prior, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    # The loop does not call Python functions, because a prompt has thousands of links and this runs on an
    # engine's thread.
    data, sha256, out = packed.tobytes(), hashlib.sha256, []
    for start in range(0, len(data), _LINK_BYTES):
        prior = sha256(prior + data[start : start + _LINK_BYTES]).digest()
        out.append(prior)
    return out


def _hash_chain_wide(prior: bytes, tokens: Sequence[int]) -> list[bytes]:
    out = []
    for start in range(0, len(tokens), LINK_TOKENS):
        link = tokens[start : start + LINK_TOKENS]
        if max(link) > _U32_MAX:
            packed = b"\xff" + struct.pack(f"<{LINK_TOKENS}Q", *link)
        else:
            packed = struct.pack(f"<{LINK_TOKENS}I", *link)
        prior = hashlib.sha256(prior + packed).digest()
        out.append(prior)
    return out


def page_key(secret: bytes, root: bytes, page_tokens: int, chain_value: bytes) -> bytes:
    """Return the key of the page whose last link has `chain_value`."""
    return page_keys(secret, root, page_tokens, (chain_value,))[0]


def page_keys(secret: bytes, root: bytes, page_tokens: int, chain_values: Iterable[bytes]) -> list[bytes]:
    """Return `page_key` for each chain value."""
    # `keyed_digest` is inlined here, so that the bytes that all keys of a root share are encoded only once.
    before = _page_key_prefix(root, page_tokens)
    sha256, hmac_sha256 = hashlib.sha256, hmac.digest
    return [hmac_sha256(secret, sha256(before + value).digest(), "sha256") for value in chain_values]


@lru_cache
def _page_key_prefix(root: bytes, page_tokens: int) -> bytes:
    before = _length_prefixed(b"cornplug-page-v3", root, struct.pack(">Q", page_tokens))
    return before + struct.pack(">Q", DIGEST_BYTES)


def _encode_salt(salt: str | None) -> bytes:
    return b"\x00" if salt is None else b"\x01" + salt.encode()


def media_digest_with_options(media: bytes, options: Mapping[str, Any]) -> bytes:
    """Return the media digest of a medium that is processed with a request's processor arguments.

    If `options` is empty, the digest is unchanged, so that an image has the same key in all APIs.
    """
    return digest("cornplug-media-options-v1", media, canonical_json(options)) if options else media


def trainer_identity(identity: bytes, start_fp: bytes, version: str) -> bytes:
    """Return the identity of weights to which a trainer has assigned a version.

    Args:
        identity: Identity of the weights with which the engine started.
        start_fp: Fingerprint of all weights of the checkpoint with which the engine started. It is necessary,
            because two checkpoints can have the same `identity`, and their trainers can assign the same
            versions.
        version: Version that the trainer has assigned.

    The result differs from the identity of every checkpoint.
    """
    return digest(
        "cornplug-trainer-weights-v1", identity, start_fp, version.encode("utf-8", errors="surrogatepass")
    )


def identity_with_overrides(identity: bytes, overrides: Mapping[str, Any]) -> bytes:
    """Return the identity of a model with settings that override the checkpoint's settings.

    Returns `identity` if there are no overrides.
    """
    return digest("cornplug-overridden-v1", identity, canonical_json(overrides)) if overrides else identity
