"""`open_disk`, which checks and locks the folder of a store's disk tier."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError
from cornplug.store.disk.segment_files import SegmentFiles

_SETTING: Final = "store.disk_path"
MIN_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenedDisk:
    """Disk folder that this daemon has locked, with its limits."""

    files: SegmentFiles
    size_bytes: int
    write_bytes_s: int | None = None


def open_disk(
    path: Path, secret: bytes, *, size_bytes: int | None = None, write_bytes_s: int | None = None
) -> OpenedDisk:
    """Open the disk folder `path`.

    Raises ConfigError if the folder cannot be used, or if the package for encryption is not installed.

    Args:
        size_bytes: Maximum size of the folder's files in bytes. None: half of the free space on the file
            system. Existing files in the folder count as free space.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            _SETTING,
            "a store encrypts the entries that it writes to a disk, but cryptography is not installed",
            "Run: pip install 'cornplug[disk]'",
        )
    files = SegmentFiles(path, secret, setting=_SETTING)
    try:
        if size_bytes is None:
            own = sum(used for _, used in files.list_segments())
            size_bytes = (files.free_bytes() + own) // 2
    except OSError as e:
        files.close()
        raise ConfigError(_SETTING, f"{path}: {e.strerror}", "Use a folder on a local disk.") from e
    if size_bytes < MIN_BYTES:
        files.close()
        raise ConfigError(
            "store.disk_size_bytes", f"{size_bytes} bytes are too few for entries", "Use 1 GiB or more."
        )
    return OpenedDisk(files, size_bytes, write_bytes_s)
