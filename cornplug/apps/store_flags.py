"""Flags of an apps file for the store that its launch starts: those of `cornplug serve-store`, in part."""

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
"""The launch itself says the others: socket, size (`launch.store_gib`), secret, and the process's end."""
_PLACE: Final[Place] = ("launch", "store_flags")
_HELP: Final = "`cornplug serve-store --help` shows each flag's value."


def store_flag_errors(file: PlanInput) -> Iterator[InputError]:
    """One for each flag that is not allowed, else one for values that the store would refuse."""
    words = file.launch.store_flags
    # By full names: argparse takes abbreviations, too.
    named = [word.partition("=")[0] for word in words if word.startswith("-")]
    if strange := [flag for flag in named if flag not in ALLOWED]:
        for flag in strange:
            yield InputError(_PLACE, f"no flag {flag!r} for a launched store", nearest(flag, ALLOWED))
    elif refused := _refused(words):
        yield InputError(_PLACE, *refused)


def _refused(words: list[str]) -> tuple[str, str] | None:
    """Problem and remedy of `cornplug serve-store` with these words; None where it takes them."""
    parser = store_parser(StoreConfig())
    parser.exit_on_error = False
    try:
        options, left = parser.parse_known_args(words)
        if left:
            return f"{left[0]!r} belongs to no flag", _HELP
        if options.metrics:
            metrics_address(options.metrics)
    except ConfigError as e:
        problem = str(e).removeprefix(f"{e.field}: ").removesuffix(f". {e.remedy}")
        return problem, e.remedy
    except (argparse.ArgumentError, ValueError) as e:
        return str(e), _HELP
    return None
