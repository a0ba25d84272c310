"""Media digest of a video in the form that vLLM's processor receives, based on allow lists.

    sampled frames, metadata, options ── digest ── rows of the tower
                                             └──── positions and timestamps in the LLM, and so KV

vLLM's media loader has already selected the frames. Frame rate, duration and frame numbers do not enter a
tower, but they affect Qwen2.5-VL's positions (`second_per_grid_ts`), Qwen3-VL's timestamps, and processors
that sample frames again. Therefore all metadata are part of the digest, and a video with a field that is not
in these lists is not shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cornplug.errors import CornplugError
from cornplug.identity import array_digest, processor_video_digest

_PREFIX: Final = "unshared-"
_OTHER: Final = "identity_error"
_REASONS: Final = (
    "bad_config",
    "modality",
    "named_by_client",
    "unproven_family",
    "video_frames",
    "video_metadata",
    "video_options",
    "video_pruning",
    _OTHER,
)
"""Label values of counters. A client must not be able to add values through a uuid."""
_UNSHARED: Final = re.compile(f"{_PREFIX}({'|'.join(_REASONS)})-")

_METADATA: Final = frozenset(
    {
        "do_sample_frames",
        "duration",
        "fps",
        "frames_indices",
        "height",
        "total_num_frames",
        "video_backend",
        "width",
    }
)
"""Metadata fields that vLLM's loaders write, and those of transformers' VideoMetadata."""
_OPTIONS: Final = frozenset(
    {
        "do_normalize",
        "do_rescale",
        "do_resize",
        "do_sample_frames",
        "fps",
        "max_frames",
        "max_pixels",
        "min_frames",
        "min_pixels",
        "num_frames",
        "size",
    }
)
_SCOPE: Final = "videos_kwargs"
_SCALARS: Final = (bool, int, float)


class VideoUnshared(CornplugError):
    """A video without a key. `reason` is the reason of the counted miss."""


def video_digest(frames: object, metadata: object) -> bytes:
    """Return the media digest (32 bytes) of a video.

    Raises VideoUnshared: "video_frames", "video_metadata".
    """
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or not frames.size:
        raise VideoUnshared("video frames must be a uint8 array with four axes", reason="video_frames")
    fields = {} if metadata is None else metadata
    if not isinstance(fields, Mapping) or not _METADATA.issuperset(fields):
        raise VideoUnshared("unsupported form of video metadata", reason="video_metadata")
    pixels = np.ascontiguousarray(frames)
    found = array_digest(pixels.dtype.name, pixels.shape, pixels.data.cast("B"))
    try:
        return processor_video_digest(found, {k: _plain(v) for k, v in fields.items()})
    except (TypeError, ValueError) as e:
        raise VideoUnshared(f"cannot identify video metadata: {e}", reason="video_metadata") from e


def check_options(options: Mapping[str, Any]) -> None:
    """Raise VideoUnshared("video_options") for a processor argument that is in no list.

    `options` are the deployment's or the request's. A list could give each video of a request another value.
    A null switches off a processor's default, but a spec reads it as the default.
    """
    scoped = options.get(_SCOPE, {})
    if not isinstance(scoped, Mapping):
        raise VideoUnshared(f"{_SCOPE} is not a mapping", reason="video_options")
    flat = {k: v for k, v in options.items() if k != _SCOPE}
    for name, value in (*flat.items(), *scoped.items()):
        known = name in _OPTIONS and isinstance(value, _SCALARS)
        edges = name == "size" and isinstance(value, Mapping)
        if not (known or (edges and all(isinstance(edge, int) for edge in value.values()))):
            raise VideoUnshared(
                f"processor option {name} is not supported for videos", reason="video_options"
            )


def unshared_name(name: str, reason: str) -> str:
    """Extend vLLM's name of a medium that is not shared by the reason, which `unshared_reason` reads."""
    return f"{_PREFIX}{reason if reason in _REASONS else _OTHER}-{name}"


def unshared_reason(identifier: str) -> str | None:
    """Return the reason in an identifier made by `unshared_name`, or None for other identifiers."""
    found = _UNSHARED.match(identifier)
    return None if found is None else found[1]


def looks_unshared(name: str) -> bool:
    """Return whether vLLM's name, which may be a client's uuid, looks like a result of `unshared_name`."""
    return name.startswith(_PREFIX)


def _plain(value: Any) -> Any:
    """Convert numpy's numbers to JSON."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
