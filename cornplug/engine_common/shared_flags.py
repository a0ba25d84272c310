"""Definition of the `--cornplug-*` command-line flags, which have the same names in vLLM and SGLang."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from cornplug.config import Config, load_portable
from cornplug.encoder_service.client.engine_encoder import check_remote
from cornplug.errors import ConfigError

SHARED_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "--cornplug-app": (
        "engine.app",
        "Name of the app that this server serves, for metrics and namespaces (default: 'default').",
    ),
    "--cornplug-store": (
        "store.socket",
        "Unix socket of the store. All servers on a host share one store.",
    ),
    "--cornplug-store-size": (
        "store.size_bytes",
        "Maximum size of the store, for example 64GiB, if this server starts it (default: 1/4 of free "
        "memory).",
    ),
    "--cornplug-store-disk": (
        "store.disk_path",
        "Folder on a local disk for entries that survive restarts, if this server starts the store (default: "
        "none).",
    ),
    "--cornplug-store-far": (
        "store.far",
        "Comma-separated URLs of far stores that several hosts share, if this server starts the store: "
        "file:///FOLDER, s3://BUCKET/PREFIX, valkey://HOST:6379/0 (default: none).",
    ),
    "--cornplug-encoder": (
        "encoder.socket",
        "Unix socket of `cornplug encoder`, or comma-separated URLs of services on other hosts "
        "(encoder.engine_urls), for example http://HOST:8750. #3 after a URL gives it three times the "
        "default weight.",
    ),
    "--cornplug-tower": (
        "engine.tower",
        "'service': this server loads no vision tower, and sends images to the URLs of --cornplug-encoder "
        "(vLLM only; default: 'engine').",
    ),
    "--cornplug-store-deadline": (
        "store.deadline_s",
        "Maximum wait for a reply of the store, in seconds. After it, the lookup is a miss (default: 0.1).",
    ),
    "--cornplug-encoder-deadline": (
        "encoder.deadline_s",
        "Maximum wait for an image embedding, in seconds. After it, this server runs its own tower "
        "(default: 10).",
    ),
    "--cornplug-save": (
        "engine.save",
        "KV pages that this server saves to the store. 'always': every page. 'second': pages that a second "
        "request uses, and other pages while the server is idle. 'never': none (default: 'second').",
    ),
    "--cornplug-page-tokens": (
        "engine.page_tokens",
        "Tokens per shared KV page, a multiple of 16. All servers that share KV need the same value "
        "(default: 64).",
    ),
    "--cornplug-trust-weight-version": (
        "engine.trust_weight_version",
        "'true': share after an update of weights with a weight_version, which the trainer must never use "
        "for different weights, in any run (default: 'false': share nothing after such an update).",
    ),
}
"""(setting "section.field", help text) for each flag."""


def add_flags(parser: argparse.ArgumentParser, switch: str, **switch_arguments: Any) -> None:
    """Add cornplug's option group to a parser: the flag `switch` that turns cornplug on, then the flags in
    `SHARED_FLAGS`."""
    group = parser.add_argument_group(
        title="cornplug",
        description="Share image embeddings and prefix KV cache with other vLLM and SGLang servers.",
    )
    group.add_argument(switch, **switch_arguments)
    for flag, (setting, text) in SHARED_FLAGS.items():
        metavar = setting.split(".")[1].upper()
        group.add_argument(flag, dest=flag_dest(flag), type=str, default=None, metavar=metavar, help=text)


def settings_from_flags(args: argparse.Namespace) -> dict[str, str]:
    """Return {"section.field": value} for those flags in `SHARED_FLAGS` that the command line sets."""
    values = {setting: getattr(args, flag_dest(flag), None) for flag, (setting, _) in SHARED_FLAGS.items()}
    said = {setting: value for setting, value in values.items() if value is not None}
    if "://" in said.get("encoder.socket", ""):
        said["encoder.engine_urls"] = said.pop("encoder.socket")
    return said


def flag_dest(flag: str) -> str:
    """Return the name of the parsed arguments' attribute (argparse's `dest`) for a flag."""
    return flag.removeprefix("--").replace("-", "_")


def load_settings(extra: Mapping[str, Any]) -> Config:
    """Return the Config for settings given as {"section.field": value}.

    Raises ConfigError for an unknown or invalid setting, and in the same cases as `check_remote`.
    """
    for key in extra:
        if "." not in key:
            raise ConfigError(
                key, "unknown key in cornplug's settings", "Use section.field, for example engine.app."
            )
    if "encoder.socket" in extra:
        # A path on the command line takes precedence over URLs in the environment.
        extra = {"encoder.engine_urls": (), **extra}
    config = load_portable(extra)
    check_remote(config)
    return config
