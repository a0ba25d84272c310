"""Media digest of a video, as vLLM's processor receives the video. Allow lists determine which videos can be
shared.

    sampled frames, metadata, options ── digest ── rows of the tower
                                             └──── positions and timestamps in the LLM, and so KV

vLLM's media loader has already selected the frames. Frame rate, duration and frame numbers are not inputs of
a tower. However, they affect Qwen2.5-VL's positions (`second_per_grid_ts`), Qwen3-VL's timestamps, and
processors that sample frames again. Therefore the digest covers all metadata, and a video with a metadata
field that is not in the allow lists is not shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cornplug.errors import CornplugError
from cornplug.identity import array_digest, processor_video_digest

_PREFIX: Final = "unshared-"
_OTHER_REASON: Final = "identity_error"
_REASONS: Final = (
    "bad_config",
    "modality",
    "named_by_client",
    "unproven_family",
    "video_frames",
    "video_metadata",
    "video_options",
    "video_pruning",
    _OTHER_REASON,
)
"""Reasons that a name may contain. They are label values of counters, and a client must not be able to add
label values by its choice of uuid."""
_UNSHARED: Final = re.compile(f"{_PREFIX}({'|'.join(_REASONS)})-")

_ALLOWED_METADATA: Final = frozenset(
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
"""Metadata fields that a shared video may have: the fields that vLLM's loaders write, and the fields of
transformers' VideoMetadata."""
_ALLOWED_OPTIONS: Final = frozenset(
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
_VIDEOS_KWARGS: Final = "videos_kwargs"
_SCALARS: Final = (bool, int, float)


class VideoNotShared(CornplugError):
    """Raised for a video that is not shared, because it has no key. `reason` is the miss reason in
    metrics."""


def video_digest(frames: object, metadata: object) -> bytes:
    """Return the media digest (32 bytes) of a video.

    Raises VideoNotShared("video_frames") or ("video_metadata") if the frames or the metadata have an
    unsupported form.
    """
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or not frames.size:
        raise VideoNotShared("video frames must be a uint8 array with four axes", reason="video_frames")
    fields = {} if metadata is None else metadata
    if not isinstance(fields, Mapping) or not _ALLOWED_METADATA.issuperset(fields):
        raise VideoNotShared("unsupported form of video metadata", reason="video_metadata")
    pixels = np.ascontiguousarray(frames)
    found = array_digest(pixels.dtype.name, pixels.shape, pixels.data.cast("B"))
    try:
        return processor_video_digest(found, {k: _to_python(v) for k, v in fields.items()})
    except (TypeError, ValueError) as e:
        raise VideoNotShared(f"cannot identify video metadata: {e}", reason="video_metadata") from e


def check_options(options: Mapping[str, Any]) -> None:
    """Raise VideoNotShared("video_options") if a processor argument is not in the allow list for videos.

    `options` are the deployment's or the request's arguments. Lists are not allowed, because a list could
    have a different value for each video of a request. Null values are not allowed either. They disable a
    processor's default, while the model's spec treats null as the default.
    """
    scoped = options.get(_VIDEOS_KWARGS, {})
    if not isinstance(scoped, Mapping):
        raise VideoNotShared(f"{_VIDEOS_KWARGS} is not a mapping", reason="video_options")
    flat = {k: v for k, v in options.items() if k != _VIDEOS_KWARGS}
    for name, value in (*flat.items(), *scoped.items()):
        known = name in _ALLOWED_OPTIONS and isinstance(value, _SCALARS)
        edges = name == "size" and isinstance(value, Mapping)
        if not (known or (edges and all(isinstance(edge, int) for edge in value.values()))):
            raise VideoNotShared(
                f"processor option {name} is not supported for videos", reason="video_options"
            )


def unshared_name(name: str, reason: str) -> str:
    """Return a name for a media item that is not shared: vLLM's name, with the reason added.
    `unshared_reason` extracts the reason."""
    return f"{_PREFIX}{reason if reason in _REASONS else _OTHER_REASON}-{name}"


def unshared_reason(identifier: str) -> str | None:
    """Return the reason in an identifier from `unshared_name`, or None for any other identifier."""
    found = _UNSHARED.match(identifier)
    return None if found is None else found[1]


def looks_unshared(name: str) -> bool:
    """Return whether vLLM's name for a media item has the form of a result of `unshared_name`. The name may
    be a client's uuid."""
    return name.startswith(_PREFIX)


def _to_python(value: Any) -> Any:
    """Convert numpy arrays and numbers in `value` to plain Python values, which can be encoded as JSON."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_to_python(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
