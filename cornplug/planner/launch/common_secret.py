"""The secret of a plan's hosts: one file of 32 bytes, which each host has a copy of.

It seals what engines and encoder services of different hosts send one another; those of one host prove
themselves by it, too.
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
    """The file that the command line names, else the settings; None where that is this host's own secret."""
    path = named or load().store.secret_file
    return None if is_own_secret(path) else path


def check_named(environments: Iterable[Mapping[str, str]]) -> None:
    """Raises ConfigError where the file's name was left open."""
    if any(env.get(_VARIABLE) == _OPEN for env in environments):
        raise ConfigError(
            "--secret-file",
            "engines of this plan ask encoder services of other hosts, which takes one secret for all hosts",
            "Make one (head -c 32 /dev/urandom > secret && chmod 600 secret), copy it to each host (scp -p), "
            f"and add --secret-file FILE or set {_VARIABLE}.",
        )


def check_readable(environments: Iterable[Mapping[str, str]]) -> None:
    """Raises ConfigError for a file that is not there, or no secret: a store would make a missing one, and
    each host have another."""
    for path in sorted({env[_VARIABLE] for env in environments if _VARIABLE in env}):
        read_secret(Path(path), make=False)
