"""vLLM's parser of `vllm serve`, which 0.33 moved to another module."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from types import ModuleType

_HOMES = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")  # from 0.33; up to 0.32


def parse_serve(arguments: Sequence[str]) -> Namespace:
    """The arguments of `vllm serve`, parsed and validated by vLLM. Raises as vLLM does."""
    # By name: devkit does not need vLLM, but for this.
    parser_class = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    home = _home()
    parsed: Namespace = home.make_arg_parser(parser_class(prog="vllm serve")).parse_args(list(arguments))
    home.validate_parsed_serve_args(parsed)
    return parsed


@cache
def _home() -> ModuleType:
    for name in _HOMES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"this vLLM has none of {', '.join(_HOMES)}")
