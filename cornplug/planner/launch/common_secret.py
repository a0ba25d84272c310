"""Common secret of a plan's hosts: a file of 32 bytes, of which each host has a copy.

The secret seals the messages between engines and encoder services on different hosts. Processes on the same
host use it for authentication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from cornplug.config import load
from cornplug.errors import ConfigError
from cornplug.private_paths import is_own_secret, read_secret

_VARIABLE: Final = "CORNPLUG_STORE_SECRET_FILE"
_OPEN: Final = "${SECRET_FILE}"
SECRET_ENV: Final[Mapping[str, str]] = {_VARIABLE: _OPEN}


def common_secret(named: Path | None) -> Path | None:
    """Return the secret file: `named` from the command line, or else the file in the settings.

    Returns None if this is the host's own secret, which other hosts do not have.
    """
    path = named or load().store.secret_file
    return None if is_own_secret(path) else path


def check_named(environments: Iterable[Mapping[str, str]]) -> None:
    """Raise ConfigError if a command needs the common secret but its file was not set."""
    if any(env.get(_VARIABLE) == _OPEN for env in environments):
        raise ConfigError(
            "--secret-file",
            "missing; engines of this plan use encoder services of other hosts, so all hosts need one secret",
            "Create it (head -c 32 /dev/urandom > secret && chmod 600 secret), copy it to each host (scp -p) "
            f"and add --secret-file FILE or set {_VARIABLE}.",
        )


def check_readable(environments: Iterable[Mapping[str, str]]) -> None:
    """Raise ConfigError if the secret file is missing or invalid.

    A store would create a missing file, and each host would have a different secret.
    """
    for path in sorted({env[_VARIABLE] for env in environments if _VARIABLE in env}):
        read_secret(Path(path), make=False)
