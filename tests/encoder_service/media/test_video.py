"""Videos good, odd and hostile."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from time_limits import TimeLimits

from cornplug.encoder_service.formats.video import VideoFrames, VideoHeader, VideoLimits, decode_frames
from cornplug.encoder_service.formats.video import decode as decode_video
from cornplug.encoder_service.preprocess.prepared_media import SAMPLERS
from cornplug.encoder_service.preprocess.preprocessor import FrameSampling
from cornplug.errors import EncoderRefused, MediaError

from ..conftest import png, sample_image
from ..recordings import moving, tone, turned_by_90, video, wav

LIMITS = VideoLimits(max_s=20, max_frames=40, max_pixels=10_000)
SHOWN = moving(31)
MP4 = video(SHOWN)


def evenly(source: VideoHeader) -> Sequence[int]:
    return np.linspace(0, source.total - 1, min(8, source.total), dtype=int).tolist()


def decode(data: bytes) -> VideoFrames:
    return decode_video(data, evenly, LIMITS)


FILES = {
    "mp4": MP4,
    "turned": turned_by_90(MP4),
    "matroska": video(SHOWN, "matroska"),
    "webm": video(SHOWN, "webm", "libvpx-vp9"),
    "avi": video(SHOWN, "avi", "mpeg4"),
    "lossless": video(SHOWN, "matroska", "ffv1", pix_fmt="yuv444p"),
    "odd size": video(moving(20, 72, 54), fps=30),
    "full range": video(SHOWN, pix_fmt="yuvj420p"),
    "10 bit": video(SHOWN, pix_fmt="yuv420p10le"),
}


@pytest.mark.parametrize("kind", FILES)
def test_video_pixels_and_times_equal_vllm(kind: str) -> None:
    """Its OpenCV decoder is the rule; run it where it is installed. Equal bits, so equal digests."""
    opencv = pytest.importorskip("vllm.multimodal.video_decoders.opencv")
    video_module = pytest.importorskip("vllm.multimodal.video")
    target = video_module.VideoTargetMetadata(8, -1, 300)
    frames, source, _, valid = opencv.decode_opencv(video_module.VideoBackend, FILES[kind], target, {})
    ours = decode(FILES[kind])
    assert (ours.header.total, ours.header.fps) == (source.total_frames_num, source.original_fps)
    assert list(ours.indices) == valid
    assert np.array_equal(ours.frames, frames)


def test_video_lossless_frames_are_exact() -> None:
    decoded = decode_video(video(SHOWN, "matroska", "libx264rgb", pix_fmt="rgb24", crf="0"), evenly, LIMITS)
    assert all(np.array_equal(a, SHOWN[i]) for a, i in zip(decoded.frames, decoded.indices, strict=True))
    assert decoded.times_s == [i / 10 for i in decoded.indices]


def test_video_portrait_is_rotated_upright() -> None:
    upright, lying = decode(FILES["turned"]), decode(MP4)
    assert np.array_equal(upright.frames, np.rot90(lying.frames, -1, axes=(1, 2)))


def test_video_digest_ignores_container_only() -> None:
    lossless = {"codec": "ffv1", "pix_fmt": "yuv444p"}
    same = [decode(video(SHOWN, kind, **lossless)).digest() for kind in ("matroska", "avi")]
    assert same[0] == same[1]
    slower = decode(video(SHOWN, "matroska", fps=5, **lossless)).digest()
    other = decode(video(moving(31)[::-1], "matroska", **lossless)).digest()
    fewer = decode_video(video(SHOWN, "matroska", **lossless), lambda s: [0, 5], LIMITS).digest()
    assert len({same[0], slower, other, fewer}) == 4


def test_video_sent_as_images_equals_file() -> None:
    still = [sample_image(i) for i in range(4)]
    decoded = decode_frames([png(p) for p in still], 2.0, LIMITS)
    assert np.array_equal(decoded.frames, np.stack([np.asarray(p) for p in still]))
    assert decoded.times_s == [0, 0.5, 1, 1.5]
    assert decoded.digest() != decode_frames([png(p) for p in still], 1.0, LIMITS).digest()


@pytest.mark.parametrize(
    ("images", "fps", "reason"),
    [
        ([], 1, "empty"),
        ([png(sample_image(1)), png(sample_image(2, 40, 30))], 1, "frame_size"),
        ([png(sample_image(1))], 0, "frame_rate"),
        ([png(sample_image(1))], float("nan"), "frame_rate"),
        ([png(sample_image(1, 9, 9))] * 41, 1, "too_many_frames"),
        ([png(sample_image(1, 99, 99))] * 5, 1, "too_many_pixels"),
        ([b"no image"], 1, "unknown_format"),
    ],
)
def test_video_bad_images_are_refused_with_reason(images: list[bytes], fps: float, reason: str) -> None:
    with pytest.raises(MediaError) as e:
        decode_frames(images, fps, LIMITS)
    assert e.value.reason == reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 5000, "unknown_format"),
        (wav(tone(0.5)), "no_video"),
        (png(sample_image(1)), "unknown_format"),
        (video(moving(2, 128, 96)), "too_many_pixels"),
        (video(moving(30), fps=1), "too_long"),
        (FILES["matroska"][: len(FILES["matroska"]) // 2], "damaged"),
        (MP4[: len(MP4) // 2], "unknown_format"),  # its index comes last
        (b"#EXTM3U\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "unknown_format"),
    ],
)
def test_video_bad_files_are_refused_with_reason(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError) as e:
        decode(data)
    assert e.value.reason == reason


def test_video_too_many_frames_are_refused_before_decoding(within: TimeLimits) -> None:
    data = video(moving(200, 16, 12), fps=25)
    with within.cpu(1), pytest.raises(MediaError) as e:
        decode_video(data, lambda source: range(source.total), LIMITS)
    assert e.value.reason == "too_many_frames"


@pytest.mark.parametrize("kind", ["mp4", "matroska", "webm", "avi"])
def test_video_damaged_file_decodes_or_is_refused(kind: str) -> None:
    """Never another exception: 40 mutations of each container."""
    rng = random.Random(kind)
    refused = 0
    for i in range(40):
        data = bytearray(FILES[kind])
        if i % 3 == 0:
            data = data[: rng.randrange(1, len(data))]
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(min(len(data), 300 if i % 2 else len(data)))] = rng.randrange(256)
        try:
            decoded = decode(bytes(data))
        except MediaError:
            refused += 1
        else:
            assert 1 <= len(decoded.frames) <= LIMITS.max_frames
    assert refused > 0


@settings(max_examples=40)
@given(st.binary(max_size=400), st.sampled_from([b"", *(f[:200] for f in FILES.values())]))
def test_video_any_bytes_decode_or_are_refused(data: bytes, begin: bytes) -> None:
    with contextlib.suppress(MediaError):
        assert len(decode(begin + data).frames) > 0


@pytest.mark.parametrize(("name", "theirs"), [("Qwen2VL", "qwen2_vl"), ("Qwen3VL", "qwen3_vl")])
@given(
    total=st.integers(2, 20_000),
    rate=st.sampled_from([1.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]),
    fps=st.sampled_from([None, 0.5, 1.0, 2.0, 4.0, 31.0]),
)
@settings(max_examples=100)
def test_video_sampled_frames_equal_vllm(
    name: str, theirs: str, total: int, rate: float, fps: float | None
) -> None:
    module = pytest.importorskip("vllm.multimodal.video")
    backend = module.VIDEO_LOADER_REGISTRY.load(theirs)
    want = backend.compute_frames_index_to_sample(
        module.VideoSourceMetadata(total, rate, total / rate), module.VideoTargetMetadata(32, fps or 2, 300)
    )
    source = VideoHeader(total=total, fps=rate, width=8, height=8)
    assert list(SAMPLERS[f"{name}VideoProcessor"](source, FrameSampling(fps=fps))) == want


@pytest.mark.parametrize("name", SAMPLERS)
@given(total=st.integers(1, 3000), count=st.integers(1, 5000))
@settings(max_examples=100)
def test_video_any_sampling_stays_inside_the_video(name: str, total: int, count: int) -> None:
    source = VideoHeader(total=total, fps=25.0, width=8, height=8)
    found = list(SAMPLERS[name](source, FrameSampling(num_frames=count)))
    assert found == sorted(found)
    assert 0 <= found[0] <= found[-1] < total
    assert len(found) <= max(count + 2, 4)  # whole patches, and a step that float32 rounds


@pytest.mark.parametrize("wrong", [{"fps": 1, "num_frames": 2}, {"fps": 0}, {"fps": -1}, {"num_frames": 0}])
def test_video_invalid_sampling_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(EncoderRefused) as e:
        FrameSampling(**wrong)
    assert e.value.reason == "bad_input"
