"""Digests of videos: everything that changes rows or KV is in them, and what no list knows has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from cornplug.vllm_connector.media.video_digest import (
    VideoNotShared,
    check_options,
    looks_unshared,
    unshared_name,
    unshared_reason,
    video_digest,
)

FRAMES = np.arange(4 * 6 * 8 * 3, dtype=np.uint8).reshape(4, 6, 8, 3)
METADATA: Mapping[str, Any] = {
    "total_num_frames": 8,
    "fps": 2.0,
    "duration": 4.0,
    "video_backend": "opencv",
    "frames_indices": [0, 2, 4, 6],
    "do_sample_frames": False,
}
GOLDEN = "9e540db35406c68aa80757daa9c909525b59ea71b0f1a4b4bd96ceb9e8c0f1cf"


def test_video_digest_of_known_video_is_golden() -> None:
    assert video_digest(FRAMES, METADATA).hex() == GOLDEN


def test_video_digest_follows_every_field_and_frame() -> None:
    changed = {
        "total_num_frames": 9,
        "fps": 4.0,
        "duration": 2.0,
        "video_backend": "torchcodec",
        "frames_indices": [0, 1, 2, 3],
        "do_sample_frames": True,
    }
    assert changed.keys() == METADATA.keys()
    found = {video_digest(FRAMES, METADATA), video_digest(FRAMES, None), video_digest(FRAMES, {})}
    assert video_digest(FRAMES, None) == video_digest(FRAMES, {})
    found |= {video_digest(FRAMES, {**METADATA, name: value}) for name, value in changed.items()}
    found |= {video_digest(FRAMES, {k: v for k, v in METADATA.items() if k != name}) for name in METADATA}
    other = FRAMES.copy()
    other[2, 1, 1, 1] ^= 1
    frames = (FRAMES[::-1], FRAMES[:3], FRAMES[[0, 0, 1, 2]], FRAMES.reshape(4, 8, 6, 3), other)
    found |= {video_digest(some, METADATA) for some in frames}
    assert len(found) == 2 + 2 * len(METADATA) + len(frames)


def test_video_digest_of_equal_values_in_other_forms_is_equal() -> None:
    numbers = {**METADATA, "frames_indices": np.array([0, 2, 4, 6]), "fps": np.float64(2.0)}
    assert video_digest(np.asfortranarray(FRAMES), numbers) == video_digest(FRAMES, METADATA)
    assert video_digest(FRAMES, dict(reversed(METADATA.items()))) == video_digest(FRAMES, METADATA)


@pytest.mark.parametrize(
    "frames",
    [
        FRAMES[:0],
        FRAMES.astype(np.int16),
        FRAMES.astype(np.float32),
        FRAMES[0],
        torch.from_numpy(FRAMES),
        [FRAMES[0]],
    ],
)
def test_video_digest_of_other_frames_is_refused(frames: object) -> None:
    with pytest.raises(VideoNotShared) as refused:
        video_digest(frames, METADATA)
    assert refused.value.reason == "video_frames"


@pytest.mark.parametrize(
    "metadata",
    [
        {**METADATA, "rotation": 90},
        {**METADATA, "fps": float("nan")},
        {**METADATA, "fps": object()},
        [1],
        2.0,
    ],
)
def test_video_digest_of_unknown_metadata_is_refused(metadata: object) -> None:
    with pytest.raises(VideoNotShared) as refused:
        video_digest(FRAMES, metadata)
    assert refused.value.reason == "video_metadata"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fps": 2.0, "num_frames": 8, "do_sample_frames": False},
        {"size": {"shortest_edge": 64, "longest_edge": 4096}, "max_pixels": 4096},
        {"videos_kwargs": {"fps": 2, "size": {"shortest_edge": 64}}},
    ],
)
def test_check_options_of_known_arguments_passes(options: Mapping[str, Any]) -> None:
    check_options(options)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": None},
        {"fps": [1.0, 2.0]},  # the second video of a request has another rate than the first
        {"videos_kwargs": {"num_frames": [4, 8]}},
        {"videos_kwargs": [1]},
        {"size": {"shortest_edge": "64"}},
        {"images_kwargs": {"max_pixels": 64}},
        {"new_argument": 1},
    ],
)
def test_check_options_of_other_arguments_is_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(VideoNotShared) as refused:
        check_options(options)
    assert refused.value.reason == "video_options"


def test_unshared_name_holds_its_reason() -> None:
    name = unshared_name("abc", "video_metadata")
    assert unshared_reason(name) == "video_metadata"
    assert looks_unshared(name)
    assert unshared_reason(unshared_name("abc", "of another release")) == "identity_error"


@pytest.mark.parametrize(
    "name", ["abc", "unshared-", "unshared-anything-abc", "foreign-unshared-video_frames-a"]
)
def test_unshared_reason_of_other_names_is_none(name: str) -> None:
    assert unshared_reason(name) is None
