"""The `--cornplug-*` flags: the same names on both engines' command lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cornplug.config import Config, load
from cornplug.errors import ConfigError

SETTINGS: Final[Mapping[str, tuple[str, str]]] = {
    "--cornplug-app": ("engine.app", "Name of the app this engine serves: label of metrics and store bytes."),
    "--cornplug-store": ("store.socket", "Unix socket of the host's store."),
    "--cornplug-store-size": (
        "store.size_bytes",
        "Bytes of the store, where this engine is the one to start it.",
    ),
    "--cornplug-encoder": ("encoder.socket", "Unix socket of the shared encoder service."),
    "--cornplug-store-deadline": ("store.deadline_s", "Seconds to wait for one answer of the store."),
    "--cornplug-encoder-deadline": (
        "encoder.deadline_s",
        "Seconds to wait for an embedding before encoding here.",
    ),
    "--cornplug-page-tokens": (
        "engine.page_tokens",
        "Tokens of one KV page; must agree between engines that share.",
    ),
}
"""flag -> (setting, help)"""


def dest(flag: str) -> str:
    """argparse's name of a flag."""
    return flag.removeprefix("--").replace("-", "_")


def settings(extra: Mapping[str, Any]) -> Config:
    """The Config that {"section.field": value} stands for.

    Raises ConfigError naming the setting that is unknown or wrong.
    """
    for key in extra:
        if "." not in key:
            raise ConfigError(
                key, "unknown key among cornplug's settings", "Write section.field, for example engine.app."
            )
    return load(extra)
