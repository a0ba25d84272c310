"""Decoding in a sandbox: equal results, and hostile media that cost only their own request."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from time_limits import TimeLimits

from cornplug.encoder_service.formats.image import MAX_SCANS, RgbPixels
from cornplug.encoder_service.formats.messages import DECODINGS, Decoding
from cornplug.encoder_service.formats.video import VideoHeader, VideoLimits
from cornplug.encoder_service.preprocess.decoder_process import DecoderProcess, SandboxedDecoder
from cornplug.encoder_service.preprocess.decoders import (
    InProcessDecoder,
    MediaDecoder,
    MediaHeader,
    accept_any_header,
)
from cornplug.errors import EncoderRefused, MediaError

from ... import hostile_images
from ...conftest import eventually, plant_modules
from ...hostile_images import many_scans, saved
from ...recordings import encoded, moving, tone, video, wav

MAX_PIXELS = 4_000_000
LIMITS = VideoLimits(max_s=20, max_frames=16, max_pixels=200_000)


class Cell:
    """A decoding process, and the reasons of its kills."""

    def __init__(self, *, max_bytes: int = 2 << 30) -> None:
        self.killed: list[str] = []
        self.process = DecoderProcess(max_bytes=max_bytes, on_killed=self.killed.append)

    def decoder(
        self, *, limit_s: float = 30.0, deadline_s: float = 60.0, wanted: Callable[[], bool] = lambda: True
    ) -> SandboxedDecoder:
        end_s = time.monotonic() + deadline_s
        return SandboxedDecoder(self.process, limit_s=limit_s, end_s=end_s, is_needed=wanted)


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    one = Cell()
    one.process.start()
    yield one
    one.process.close()


def outcome(decode: Callable[[MediaDecoder], Any], decoder: MediaDecoder) -> tuple[Any, ...]:
    """The decoded medium, or the refusal, in comparable form."""
    try:
        made = decode(decoder)
    except MediaError as e:
        return e.reason, str(e)
    if isinstance(made, RgbPixels):
        return made.width, made.height, bytes(made.data), made.digest(), made.to_image().tobytes()
    if hasattr(made, "samples"):
        return made.rate, made.samples.dtype, made.samples.tobytes()
    return made.indices, made.header, made.frames.shape, made.frames.tobytes(), made.digest()


def images() -> Iterator[tuple[str, bytes]]:
    yield from ((name, data) for name, (data, _) in hostile_images.odd().items())
    yield from ((name, data) for name, (data, _) in hostile_images.hostile().items())
    yield "rgb with a clear colour", hostile_images.clear_rgb()


@pytest.mark.filterwarnings("ignore")
def test_sandboxed_decoder_images_equal_in_process_bit_for_bit(cell: Cell) -> None:
    """Good and bad ones: the same pixels, or refused for the same reason in the same words."""
    for name, data in images():
        for rule in DECODINGS:

            def decode(decoder: MediaDecoder, data: bytes = data, rule: Decoding = rule) -> Any:
                return decoder.decode_image(data, MAX_PIXELS, accept_any_header, decoding=rule)

            assert outcome(decode, cell.decoder()) == outcome(decode, InProcessDecoder()), (name, rule)
    assert cell.killed == []


@pytest.mark.parametrize(
    "data",
    [wav(tone(1.3)), encoded(tone(0.7), "flac", "flac"), encoded(tone(2.0), "mp3", "libmp3lame"), b"", b"x"],
    ids=["wav", "flac", "mp3", "nothing", "garbage"],
)
def test_sandboxed_decoder_audio_equals_in_process(cell: Cell, data: bytes) -> None:
    def decode(decoder: MediaDecoder) -> Any:
        return decoder.decode_audio(data, 5.0, accept_any_header)

    assert outcome(decode, cell.decoder()) == outcome(decode, InProcessDecoder())


def test_sandboxed_decoder_videos_equal_in_process(cell: Cell) -> None:
    shown = moving(9)
    film = video(shown, "mp4", "libx264", pix_fmt="yuv420p")

    def some(source: VideoHeader) -> list[int]:
        return list(range(0, source.total, 2))

    def all_of_too_many(source: VideoHeader) -> range:
        return range(source.total * 50)

    def from_file(decoder: MediaDecoder) -> Any:
        return decoder.decode_video(film, some, LIMITS, accept_any_header)

    def badly_chosen(decoder: MediaDecoder) -> Any:
        return decoder.decode_video(film, all_of_too_many, LIMITS, accept_any_header)

    def from_pictures(decoder: MediaDecoder) -> Any:
        frames = [saved(Image.fromarray(np.asarray(frame)), "PNG") for frame in shown]
        return decoder.decode_frames(frames, 2.0, LIMITS, accept_any_header)

    for decode in (from_file, badly_chosen, from_pictures):
        assert outcome(decode, cell.decoder()) == outcome(decode, InProcessDecoder()), decode.__name__


def test_sandboxed_decoder_jpeg_of_many_scans_is_refused(cell: Cell, within: TimeLimits) -> None:
    """Before: 25 ms a scan for 92 bytes, 9,000 scans took 230 s of one core."""
    attack = many_scans(7900, 7900, 9000)
    assert len(attack) < 2 << 20
    for decoder in (InProcessDecoder(), cell.decoder()):
        with within.cpu(1.0), pytest.raises(MediaError) as refused:
            decoder.decode_image(attack, 64_000_000, accept_any_header)
        assert refused.value.reason == "too_many_scans"
    # What real encoders write is far below it.
    progressive = saved(hostile_images.sample_image(1), "JPEG", progressive=True)
    assert (
        InProcessDecoder().decode_image(progressive, MAX_PIXELS, accept_any_header).to_image().size
        == hostile_images.SIDE
    )
    assert progressive.count(b"\xff\xda") < MAX_SCANS / 5


@functools.cache
def slow() -> bytes:
    """Seconds of decoding with few enough scans."""
    return many_scans(7900, 7900, MAX_SCANS - 20)


def test_decoder_process_slow_job_is_killed_next_is_decoded() -> None:
    cell = Cell()
    cell.process.start()
    before = cell.process.pid
    with pytest.raises(MediaError) as refused:
        cell.decoder(limit_s=0.2).decode_image(slow(), 64_000_000, accept_any_header)
    assert refused.value.reason == "too_slow"
    with pytest.raises(EncoderRefused) as late:
        cell.decoder(deadline_s=0.4).decode_image(slow(), 64_000_000, accept_any_header)
    assert late.value.reason == "too_late"
    left = time.monotonic() + 0.3
    with pytest.raises(EncoderRefused):
        cell.decoder(wanted=lambda: time.monotonic() < left).decode_image(
            slow(), 64_000_000, accept_any_header
        )
    assert cell.killed[:1] == ["too_slow"]
    assert set(cell.killed) <= {"too_slow", "too_late", "gone"}
    good = saved(hostile_images.sample_image(1), "PNG")
    assert (
        cell.decoder().decode_image(good, MAX_PIXELS, accept_any_header).to_image().size
        == hostile_images.SIDE
    )
    assert cell.process.pid != before
    cell.process.close()


def test_decoder_process_memory_bomb_is_refused_next_is_decoded() -> None:
    cell = Cell(max_bytes=500 << 20)
    huge = saved(Image.new("RGB", (12_000, 12_000)), "PNG")
    with pytest.raises(MediaError) as refused:
        cell.decoder().decode_image(huge, 150_000_000, accept_any_header)
    assert refused.value.reason in ("too_much_memory", "crashed", "damaged")
    good = saved(hostile_images.sample_image(1), "PNG")
    assert (
        cell.decoder().decode_image(good, MAX_PIXELS, accept_any_header).to_image().size
        == hostile_images.SIDE
    )
    cell.process.close()


def test_decoder_process_death_costs_one_medium_at_most(cell: Cell) -> None:
    good = saved(hostile_images.sample_image(1), "PNG")
    cell.decoder().decode_image(good, MAX_PIXELS, accept_any_header)
    pid = cell.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z")
    # Its death while idle fails no request.
    assert (
        cell.decoder().decode_image(good, MAX_PIXELS, accept_any_header).to_image().size
        == hostile_images.SIDE
    )

    def kill(header: MediaHeader) -> None:
        assert cell.process.pid is not None
        os.kill(cell.process.pid, signal.SIGKILL)

    with pytest.raises(MediaError) as refused:
        cell.decoder().decode_image(good, MAX_PIXELS, kill)
    assert refused.value.reason == "crashed"
    assert (
        cell.decoder().decode_image(good, MAX_PIXELS, accept_any_header).to_image().size
        == hostile_images.SIDE
    )


def test_sandboxed_decoder_header_refused_by_caller_stops_job(cell: Cell, within: TimeLimits) -> None:
    on_header: list[MediaHeader] = []

    def object_to(header: MediaHeader) -> None:
        on_header.append(header)
        raise EncoderRefused("no room", reason="overloaded")

    cell.process.start()
    before, used_s = cell.process.pid, cpu_s(cell.process)
    attack = slow()
    with pytest.raises(EncoderRefused, match="no room"):
        cell.decoder().decode_image(attack, 64_000_000, object_to)
    with pytest.raises(EncoderRefused, match="no room"):
        cell.decoder().decode_audio(wav(tone(1.3)), 5.0, object_to)
    within.check(cpu_s(cell.process) - used_s, 1.5)
    assert [h.pixels for h in on_header] == [7900 * 7900, 0]
    assert on_header[1].seconds == pytest.approx(1.3, abs=0.05)
    good = saved(hostile_images.sample_image(1), "PNG")
    assert (
        cell.decoder().decode_image(good, MAX_PIXELS, accept_any_header).to_image().size
        == hostile_images.SIDE
    )
    assert cell.process.pid == before


def test_decoder_process_has_no_keys_and_ends_with_its_service(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORNPLUG_ENCODER_ADMIN_KEY", "secret")
    other = Cell()
    other.process.start()
    pid = other.process.pid
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    with open(f"/proc/{pid}/maps") as maps:
        assert "libtorch" not in maps.read()
    assert other.process._sock is not None
    other.process._sock.close()  # as when the service is killed
    assert other.process._process is not None
    assert other.process._process.wait(30) == 0


def test_decoder_process_in_folder_with_planted_modules_does_not_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_modules(tmp_path, "numpy.py", "cornplug/__init__.py")
    monkeypatch.chdir(tmp_path)
    cell = Cell()
    cell.process.start()
    cell.process.close()
    assert not list(tmp_path.glob("imported-*"))


@pytest.mark.parametrize("progressive", [False, True])
def test_decoder_process_repeated_jpegs_take_no_fresh_memory(progressive: bool) -> None:
    """Memory of the last image is there for the next one: a fresh page costs a fault, and its zeroes."""
    cell = Cell()
    image = Image.linear_gradient("L").resize((1280, 960)).convert("RGB")
    data = saved(image, "JPEG", progressive=progressive)
    taken = []
    try:
        cell.process.start()
        for _ in range(12):
            before = minor_faults(cell.process)
            cell.decoder().decode_image(data, MAX_PIXELS, accept_any_header)
            taken.append(minor_faults(cell.process) - before)
    finally:
        cell.process.close()
    assert sorted(taken)[len(taken) // 2] < 100, taken


def cpu_s(process: DecoderProcess) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def minor_faults(process: DecoderProcess) -> int:
    """Page faults of a process so far that read nothing from a disk."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7])
