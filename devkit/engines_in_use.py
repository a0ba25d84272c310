"""The engines that the current test sends requests to: docs/support-matrix.json is kept by them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_CORNPLUG: Final = re.compile(r"(?<![\w./-])(--)?cornplug", re.IGNORECASE)
_in_use: set[UsedEngine] = set()


class UsedEngine(NamedTuple):
    """An engine as a test used it."""

    engine: str
    """Either "vllm" or "sglang"."""
    bed: str
    """The bed of a vLLM (devkit/vllm_beds.py); empty for SGLang."""
    python: Path
    """Interpreter of its environment."""
    dtype: str
    """Value of its flag `--dtype`."""
    with_cornplug: bool
    """False for a stock engine, with which a test compares answers."""


def names_cornplug(arguments: Sequence[str]) -> bool:
    """Whether one of an engine's arguments selects cornplug. A path that contains the word does not."""
    return any(_CORNPLUG.search(argument) for argument in arguments)


def dtype_in(command: Sequence[str]) -> str:
    """The value of the last `--dtype` in an engine's command line; "auto" without the flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    return str(parser.parse_known_args(command)[0].dtype)


def note(engine: UsedEngine) -> None:
    """Note that the current test uses this engine."""
    _in_use.add(engine)


def in_use() -> frozenset[UsedEngine]:
    """The engines that were noted since the test began."""
    return frozenset(_in_use)


def begin_test() -> None:
    """Forget the engines of the test before."""
    _in_use.clear()
