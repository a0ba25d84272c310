"""Digests of 32 bytes that name an entry by its inputs. Pure: no file, no clock, no engine.

Everything here is SHA-256 over length-prefixed parts under a domain name, so that no two
different inputs ever share an encoding. Schemes are versioned by that domain; golden
vectors in tests/golden/identity.json freeze them.

    tower fp ─┐
    projector fp ┼─ model identity ─┐
    spec fp ──┘                     ├─ embedding key     (a tower's rows for a medium)
    media digest ───────────────────┤
    tenant salt, store secret ──────┘
    LM fp, kv spec ── kv root ── chain of 16-token links ── page key   (KV of a prefix)
                                  └ of text its tokens, of a medium the placeholders that its
                                    lineage (embedding key and number of rows) makes

`tower fp`, `projector fp` and the LM's fingerprint come from `cornplug.checkpoints.checkpoint`.
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
"""Tokens in one link of the page chain, independent of an engine's page size."""

_WIDE_TAG: Final = b"sglang-mm-wide-pad-v1"
_WIDE_BASE: Final = 1_000_000
_WIDE_MASK: Final = (1 << 62) - 1
_U32_MAX: Final = (1 << 32) - 1
_LINK_BYTES: Final = 4 * LINK_TOKENS
"""Of a link whose tokens all fit 32 bits."""


def digest(domain: str, *parts: bytes) -> bytes:
    """SHA-256 of a domain name and parts, each prefixed by its length as 8 bytes big-endian."""
    return hashlib.sha256(_framed(domain.encode(), *parts)).digest()


def _framed(*parts: bytes) -> bytes:
    return b"".join([struct.pack(">Q", len(part)) + part for part in parts])


def keyed(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """`digest` under HMAC-SHA256 with the store's secret: no outsider can make keys."""
    return hmac.digest(secret, digest(domain, *parts), "sha256")


def canonical(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON (sorted keys, no spaces, no NaN) of a spec.

    Raises TypeError or ValueError for a value that JSON cannot carry, rather than guess a form:
    a spec that lost a field would share different results.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def tensors_fingerprint(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """Fingerprint of weights: (normalised name, safetensors dtype, shape, SHA-256 of raw bytes).

    Order does not matter; a name given twice raises ValueError.
    """
    rows: dict[str, bytes] = {}
    for name, dtype, shape, data in tensors:
        if name in rows:
            raise ValueError(f"tensor {name!r} appears twice")
        packed = struct.pack(f">{len(shape)}Q", *shape)
        rows[name] = digest("cornplug-tensor-v1", name.encode(), dtype.encode(), packed, data)
    return digest("cornplug-weights-v1", *(rows[name] for name in sorted(rows)))


def spec_fingerprint(spec: Mapping[str, Any]) -> bytes:
    """Fingerprint of everything but weights and content that changes a tower's output."""
    return digest("cornplug-spec-v1", canonical(spec))


def model_identity(tower_fp: bytes, projector_fp: bytes, spec_fp: bytes) -> bytes:
    """The inputs of an embedding besides the medium. Equal for every fine-tune, merge or
    quantisation that left tower and projector alone."""
    return digest("cornplug-model-v2", tower_fp, projector_fp, spec_fp)


def pixels_digest(mode: str, width: int, height: int, pixels: bytes | memoryview) -> bytes:
    """Media digest of a decoded image: mode ("RGB", "RGBA", "L"), size, row-major bytes."""
    h = hashlib.sha256(b"cornplug-pixels-v1")
    h.update(struct.pack(">16sQQ", mode.encode(), width, height))
    h.update(pixels)
    return h.digest()


def frames_digest(
    width: int, height: int, times_s: Sequence[float], frames: Iterable[bytes | memoryview]
) -> bytes:
    """Media digest of a video as the processor receives it: sampled RGB frames with their times.

    Args:
        times_s: seconds from the video's start, one a frame; counted in whole microseconds, so
            that readers who compute them in another way agree.
        frames: row-major RGB bytes of each frame, width * height * 3.

    The sampling's choice is in the frames and times. Raises ValueError for a frame of another
    size, for more or fewer frames than times, and for a time that is not finite.
    """
    h = hashlib.sha256(b"cornplug-frames-v1")
    h.update(struct.pack(">16sQQQ", b"RGB", width, height, len(times_s)))
    for time_s in times_s:
        if not math.isfinite(time_s):
            raise ValueError(f"a frame at {time_s} s")
        h.update(struct.pack(">q", round(time_s * 1e6)))
    for frame, time_s in zip(frames, times_s, strict=True):
        size = memoryview(frame).nbytes
        if size != width * height * 3:
            raise ValueError(f"the frame at {time_s} s has {size} bytes at {width} x {height} pixels")
        h.update(frame)
    return h.digest()


def samples_digest(rate: int, samples: bytes | memoryview) -> bytes:
    """Media digest of a decoded sound: samples a second, mono samples as little-endian float32."""
    h = hashlib.sha256(b"cornplug-samples-v1")
    h.update(struct.pack(">QQ", rate, len(samples)))
    h.update(samples)
    return h.digest()


def array_digest(dtype: str, shape: Sequence[int], data: bytes | memoryview) -> bytes:
    """Digest of a C-contiguous tensor: numpy dtype name, shape, little-endian bytes.

    Used for a tower's very input.
    """
    h = hashlib.sha256(b"cornplug-array-v1")
    h.update(struct.pack(">16sB", dtype.encode(), len(shape)))
    h.update(struct.pack(f">{len(shape)}Q", *shape))
    h.update(data)
    return h.digest()


def processor_video_digest(frames: bytes, metadata: Mapping[str, Any]) -> bytes:
    """Media digest of a video with all that an engine tells the model's processor about it.

    Args:
        frames: `array_digest` of the sampled frames.
        metadata: rate, duration, numbers of the sampled frames: they shape positions and timestamps in the
            language model, which `frames_digest` does not determine.

    Raises TypeError or ValueError as `canonical`.
    """
    return digest("cornplug-processor-video-v1", frames, canonical(metadata))


def embedding_key(secret: bytes, model: bytes, media: bytes, salt: str | None) -> bytes:
    """Key of an embedding: the output of tower and projector for one medium, as an engine consumes it.

    Args:
        model: `model_identity`.
        media: `pixels_digest`, `frames_digest`, `processor_video_digest`, `samples_digest` or `array_digest`.
        salt: the tenant's salt; None is the deployment's shared domain, "" is a salt.
    """
    return keyed(secret, "cornplug-embedding-v1", model, media, _salt(salt))


def feature_key(
    secret: bytes, tower_fp: bytes, tower_spec_fp: bytes, inputs: Sequence[bytes], salt: str | None
) -> bytes:
    """Key of a tower's output before any per-model parameter: shared by different LLMs.

    `inputs` are `array_digest`s of the tower's very input tensors in a fixed order, so
    preprocessing needs no name here: its effect is in the bytes.
    """
    return keyed(
        secret, "cornplug-feature-v1", tower_fp, tower_spec_fp, digest("inputs", *inputs), _salt(salt)
    )


def kv_root(secret: bytes, language_model_fp: bytes, kv_spec: Mapping[str, Any], salt: str | None) -> bytes:
    """The inputs of KV besides the tokens: the whole LM (with adapters and quantisation),
    cache dtype, rope and page geometry, tenant."""
    return keyed(secret, "cornplug-kv-root-v2", language_model_fp, canonical(kv_spec), _salt(salt))


def medium_lineage(key: bytes, rows: int) -> bytes:
    """The medium's part of the inputs of the KV behind it: 32 bytes.

    Args:
        key: the medium's embedding key.
        rows: of its embedding that this prompt holds, which is its placeholder tokens without those
            that stand for themselves. One medium may have more or fewer of them: some processors
            count the prompt's other media too, and their first rows are not the same then.

    Raises ValueError for a key of another size and for a negative number.
    """
    if len(key) != DIGEST_BYTES:
        raise ValueError(f"key must be {DIGEST_BYTES} bytes, not {len(key)}")
    if rows < 0:
        raise ValueError(f"rows must be at least 0, not {rows}")
    return digest("cornplug-lineage-v1", key, struct.pack(">Q", rows))


def placeholder_tokens(lineage: bytes) -> tuple[int, int, int, int]:
    """The four wide values that stand, in rotation, for a medium's placeholder tokens.

    `lineage` is `medium_lineage`. SGLang's own
    `MultimodalDataItem.set_identity(lineage)` puts the same values into its token stream
    (sglang/srt/managers/schedule_batch.py, 0.5.23): 1_000_000 + 62 bits of
    sha256(tag || lineage) each, beyond every vocabulary.
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


def chain(prior: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Advance the chain over whole links; `len(tokens)` must be a multiple of LINK_TOKENS.

    A link is SGLang's published page hash: sha256(prior || tokens as little-endian u32),
    or, where a token exceeds 32 bits, sha256(prior || 0xff || tokens as little-endian u64)
    (sglang/srt/mem_cache/utils.py, 0.5.23). `prior` is b"" at the first link.
    """
    if len(tokens) % LINK_TOKENS:
        raise ValueError(f"{len(tokens)} tokens are no whole number of {LINK_TOKENS}-token links")
    try:
        packed = array("I", tokens)
    except OverflowError:
        return _chain_with_wide_tokens(prior, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    # A prompt has thousands of links, derived on an engine's own thread: one digest and no Python call each.
    data, sha256, out = packed.tobytes(), hashlib.sha256, []
    for start in range(0, len(data), _LINK_BYTES):
        prior = sha256(prior + data[start : start + _LINK_BYTES]).digest()
        out.append(prior)
    return out


def _chain_with_wide_tokens(prior: bytes, tokens: Sequence[int]) -> list[bytes]:
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
    """Key of the page whose last token ends the link with `chain_value`."""
    return page_keys(secret, root, page_tokens, (chain_value,))[0]


def page_keys(secret: bytes, root: bytes, page_tokens: int, chain_values: Iterable[bytes]) -> list[bytes]:
    """`page_key` of each of these chain values, which are digests."""
    # `keyed`, with the bytes that all keys of a root have in common framed once.
    before = _before_link(root, page_tokens)
    sha256, hmac_sha256 = hashlib.sha256, hmac.digest
    return [hmac_sha256(secret, sha256(before + value).digest(), "sha256") for value in chain_values]


@lru_cache
def _before_link(root: bytes, page_tokens: int) -> bytes:
    before = _framed(b"cornplug-page-v3", root, struct.pack(">Q", page_tokens))
    return before + struct.pack(">Q", DIGEST_BYTES)


def _salt(salt: str | None) -> bytes:
    return b"\x00" if salt is None else b"\x01" + salt.encode()


def medium_with_options(media: bytes, options: Mapping[str, Any]) -> bytes:
    """Media digest of a medium that one request wants processed in another way.

    `options` are that request's own processor arguments; with none the digest stays as it is,
    so that every door that an image comes in by agrees on its key.
    """
    return digest("cornplug-media-options-v1", media, canonical(options)) if options else media


def of_trainer(identity: bytes, start: bytes, version: str) -> bytes:
    """The identity of weights that a trainer gave a version.

    `identity` is that of the start, and `start` is all of the checkpoint's weights then: a part alone could
    be of two checkpoints, each with a trainer that counts from 1. A checkpoint has none of these identities.
    """
    return digest(
        "cornplug-trainer-weights-v1", identity, start, version.encode("utf-8", errors="surrogatepass")
    )


def overridden(identity: bytes, overrides: Mapping[str, Any]) -> bytes:
    """An identity that a deployment changed beyond its checkpoint; same rule."""
    return digest("cornplug-overridden-v1", identity, canonical(overrides)) if overrides else identity
