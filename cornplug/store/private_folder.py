"""Folders for sockets: nobody else may be able to put one there."""

from __future__ import annotations

import os
from pathlib import Path

from cornplug.errors import ConfigError


def private_folder(folder: Path, setting: str) -> None:
    """Return once `folder` is there (made 0700), this user's and writable by nobody else.

    Raises ConfigError that names `setting`; OSError when it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = folder.stat()
    # A link of another user's would lead there only as long as he likes.
    owners = {about.st_uid, folder.lstat().st_uid}
    if owners != {os.getuid()} or about.st_mode & 0o022:
        problem = f"{folder} is another user's, or open to others"
        raise ConfigError(setting, problem, "Name a folder of yours, mode 0700.")
