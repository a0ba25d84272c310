"""Folders and files that only this user can change, such as the file with the secret.

Files are checked through the same descriptor through which they are used later, and symbolic links are not
followed. Otherwise another user could create the folder in /tmp first, or replace the log by a link.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from cornplug.errors import ConfigError

_REMEDY = "Use a folder that belongs to you, with mode 0700."


def runtime_dir() -> Path:
    """Return the folder for sockets: `$CORNPLUG_RUNTIME_DIR`, or a folder of this user in /tmp (mode 0700).

    The folder does not depend on XDG_RUNTIME_DIR, because all engines of a user must use the same folder.
    Services, cron jobs and `docker exec` do not have that variable, Slurm copies it to hosts on which the
    folder does not exist, and systemd removes the folder when the user logs out.
    """
    named = os.environ.get("CORNPLUG_RUNTIME_DIR")
    return Path(named).absolute() if named else Path(f"/tmp/cornplug-{os.getuid()}")


def cache_dir() -> Path:
    """Return the folder for fingerprints and the secret.

    This is `$XDG_CACHE_HOME/cornplug`, or `~/.cache/cornplug` if the variable is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "cornplug"
    try:
        return Path.home() / ".cache" / "cornplug"
    except RuntimeError:  # The user has no name and no HOME, for example in a container.
        return runtime_dir()


def open_folder(path: Path, *, setting: str) -> int:
    """Open the folder `path`, and return its descriptor. The folder is created with mode 0700 if necessary.

    Raises ConfigError, which names `setting`, if another user owns the folder or can write to it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        why = "is a symbolic link" if path.is_symlink() else f"cannot be used: {e.strerror}"
        raise ConfigError(setting, f"{path} {why}", _REMEDY) from e
    problem = folder_problem(os.fstat(folder))
    if problem:
        os.close(folder)
        raise ConfigError(setting, f"{path} {problem}", _REMEDY)
    return folder


def folder_problem(stat_result: os.stat_result) -> str:
    """Return the reason why other users may write to a folder, or "" if only this user can."""
    if stat_result.st_uid != os.getuid():
        return f"belongs to user {stat_result.st_uid}"
    if stat_result.st_mode & 0o022:
        return f"is writable by other users (mode {stat.S_IMODE(stat_result.st_mode):04o})"
    return ""


def open_file(folder: int, name: str, flags: int) -> int:
    """Open a file in a folder that `open_folder` has opened, and return its descriptor.

    The file is created with mode 0600 if it does not exist. Raises OSError, also if the file is a symbolic
    link.
    """
    return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


def secret_problem(stat_result: os.stat_result) -> str:
    """Return the reason why a file cannot be used as this user's secret, or "" if it can.

    A file that belongs to root may be readable by its group. Kubernetes creates such files in pods with an
    fsGroup.
    """
    mode = stat.S_IMODE(stat_result.st_mode)
    if stat_result.st_uid not in (0, os.getuid()):
        return f"belongs to user {stat_result.st_uid}"
    if mode & (0o037 if stat_result.st_uid == 0 else 0o077):
        return f"has mode {mode:03o}, so other users can read it"
    return ""


def read_secret(path: Path, *, setting: str = "store.secret_file", create: bool = True) -> bytes:
    """Read the 32-byte secret from a file.

    With `create`, the file is created with mode 0600 if it does not exist. Raises ConfigError, which names
    `setting`, if the file cannot be read or created, does not have exactly 32 bytes, or can be read by other
    users.
    """
    try:
        if create and not path.exists():
            _create_secret(path)
        with path.open("rb") as file:
            about, secret = os.fstat(file.fileno()), file.read()
    except OSError as e:
        variable = f"CORNPLUG_{setting.replace('.', '_').upper()}"
        remedy = f"Set {variable} to a file that this user can read{' or create' if create else ''}."
        raise ConfigError(setting, f"{path}: {e.strerror}", remedy) from e
    if len(secret) != 32:
        problem = f"{path} has {len(secret)} bytes"
        raise ConfigError(setting, problem, "Create a secret: head -c 32 /dev/urandom > FILE.")
    if problem := secret_problem(about):
        remedy = (
            "Create a new secret, or chmod 600 if nobody can have read it (Kubernetes: defaultMode: 0400)."
        )
        raise ConfigError(setting, f"{path} {problem}", remedy)
    return secret


def is_default_secret(path: Path) -> bool:
    """Return whether a path is the default secret file, which each host creates with random content."""
    return path.absolute() == (cache_dir() / "secret").absolute()


def write_text_atomically(path: Path, text: str) -> None:
    """Replace the content of a file atomically. Readers get either the old or the new content."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _create_secret(path: Path) -> None:
    """Create the secret file. If several processes create it concurrently, all get the same secret."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    try:
        draft.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
