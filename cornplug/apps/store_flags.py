"""Flags of `cornplug serve-store` that an apps file may set for the store of its launch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError
from cornplug.planner.inputs.input_error import InputError, Place, nearest
from cornplug.planner.inputs.schema import PlanInput
from cornplug.settings.store_settings import metrics_address
from cornplug.store.daemon.main import store_parser

ALLOWED: Final = ("--far", "--disk", "--disk-size", "--metrics", "--quarantine-s", "--clamp")
"""Flags that an apps file may set. The launch itself sets socket, size (`launch.store_gib`), secret, and
when the process ends."""
_PLACE: Final[Place] = ("launch", "store_flags")
_HELP: Final = "Run `cornplug serve-store --help` for the values of each flag."


def store_flag_errors(file: PlanInput) -> Iterator[InputError]:
    """Yield one error for each flag that is not allowed, or else one for values that the store would
    reject."""
    words = file.launch.store_flags
    # Only full names are allowed, although argparse accepts abbreviations.
    named = [word.partition("=")[0] for word in words if word.startswith("-")]
    if strange := [flag for flag in named if flag not in ALLOWED]:
        for flag in strange:
            yield InputError(
                _PLACE, f"flag {flag!r} is not allowed for a launched store", nearest(flag, ALLOWED)
            )
    elif refused := _refused(words):
        yield InputError(_PLACE, *refused)


def _refused(words: list[str]) -> tuple[str, str] | None:
    """Return problem and remedy if `cornplug serve-store` rejects these words, else None."""
    parser = store_parser(StoreConfig())
    parser.exit_on_error = False
    try:
        options, left = parser.parse_known_args(words)
        if left:
            return f"{left[0]!r} does not belong to a flag", _HELP
        if options.metrics:
            metrics_address(options.metrics)
    except ConfigError as e:
        problem = str(e).removeprefix(f"{e.field}: ").removesuffix(f". {e.remedy}")
        return problem, e.remedy
    except (argparse.ArgumentError, ValueError) as e:
        return str(e), _HELP
    return None
