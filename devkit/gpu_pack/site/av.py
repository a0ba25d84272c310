"""In the place of PyAV (34 MiB), which engines import: they can read images, but no video and no sound."""

time_base = 1_000_000


class FFmpegError(Exception):
    """PyAV's error for a file that it cannot read."""


def open(*args: object, **kwargs: object) -> None:
    """Raise FFmpegError: no video and no sound can be read."""
    raise FFmpegError("PyAV is not in this archive (devkit/gpu_pack)")
