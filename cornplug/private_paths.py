"""Folders and files that only this user can change, and the secret that is one of them.

Everything is checked on the descriptor that is then used, and no symbolic link is followed: in /tmp
another user may have made the folder first, or put a link in the place of the log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from cornplug.errors import ConfigError

_REMEDY = "Name a folder of yours, mode 0700."


def runtime_dir() -> Path:
    """The folder of sockets: `$CORNPLUG_RUNTIME_DIR`, else a 0700 folder of this user in /tmp.

    It does not depend on XDG_RUNTIME_DIR, as all engines of a user must meet: services, cron jobs and
    `docker exec` do not have that variable, Slurm copies it to hosts without that folder, and systemd removes
    the folder at the end of the last login.
    """
    named = os.environ.get("CORNPLUG_RUNTIME_DIR")
    return Path(named).absolute() if named else Path(f"/tmp/cornplug-{os.getuid()}")


def cache_dir() -> Path:
    """Where fingerprints and the secret are kept: `$XDG_CACHE_HOME/cornplug` or `~/.cache/cornplug`."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "cornplug"
    try:
        return Path.home() / ".cache" / "cornplug"
    except RuntimeError:  # a container's user that has no name and no HOME
        return runtime_dir()


def open_folder(path: Path, *, setting: str) -> int:
    """A descriptor of the folder `path`, which is made (0700) where there is none.

    Raises ConfigError, in the name of `setting`, for one that another user owns or may write to.
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


def folder_problem(about: os.stat_result) -> str:
    """The reason why a folder is not writable by this user alone; "" when it is."""
    if about.st_uid != os.getuid():
        return f"belongs to user {about.st_uid}"
    if about.st_mode & 0o022:
        return f"can be written to by others (mode {stat.S_IMODE(about.st_mode):04o})"
    return ""


def open_file(folder: int, name: str, flags: int) -> int:
    """A descriptor of a regular file in a folder that `open_folder` opened, made with mode 0600.

    Raises OSError, also for a symbolic link.
    """
    return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


def secret_problem(about: os.stat_result) -> str:
    """The reason why a file cannot be this user's secret; "" when it can.

    Root may give it to a group of this user: so does Kubernetes, for a pod that has an fsGroup.
    """
    mode = stat.S_IMODE(about.st_mode)
    if about.st_uid not in (0, os.getuid()):
        return f"belongs to user {about.st_uid}"
    if mode & (0o037 if about.st_uid == 0 else 0o077):
        return f"has mode {mode:03o}: others can make keys"
    return ""


def read_secret(path: Path, *, setting: str = "store.secret_file", make: bool = True) -> bytes:
    """The 32-byte secret of a file; with `make` it is made on first use, with mode 0600.

    Raises ConfigError, which names `setting`, when it cannot be read or made, is not exactly 32 bytes, or
    others may read it.
    """
    try:
        if make and not path.exists():
            _make_secret(path)
        with path.open("rb") as file:
            about, secret = os.fstat(file.fileno()), file.read()
    except OSError as e:
        variable = f"CORNPLUG_{setting.replace('.', '_').upper()}"
        remedy = f"Name a file that this user can read{' or make' if make else ''}: {variable}."
        raise ConfigError(setting, f"{path}: {e.strerror}", remedy) from e
    if len(secret) != 32:
        problem = f"{path} has {len(secret)} bytes"
        raise ConfigError(setting, problem, "Make one: head -c 32 /dev/urandom > FILE.")
    if problem := secret_problem(about):
        remedy = "Make a new one, or chmod 600 where nobody can have read it (Kubernetes: defaultMode: 0400)."
        raise ConfigError(setting, f"{path} {problem}", remedy)
    return secret


def is_own_secret(path: Path) -> bool:
    """Whether this is the default secret file, which each host makes by chance: no other host has it."""
    return path.absolute() == (cache_dir() / "secret").absolute()


def replace_text(path: Path, text: str) -> None:
    """Write a file in the place of another: readers, and cut-off runs, have the old or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _make_secret(path: Path) -> None:
    """Written beside and linked into place: of two first users one wins, and both read the winner's."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    try:
        draft.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
