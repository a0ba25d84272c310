"""`vllm serve MODEL --kv-connector cornplug` and its option group.

The flags only fill `--kv-transfer-config` and `--ec-transfer-config`; whoever prefers the
long JSON form writes the same `kv_connector_extra_config` by hand:

    --kv-transfer-config '{"kv_connector": "CornplugConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"engine.app": "chat"}}'
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from cornplug.config import Config, load
from cornplug.errors import ConfigError
from cornplug.vllm_connector.plugin import EC_CONNECTOR, KV_CONNECTOR

NAME = "cornplug"

# flag -> (setting, help)
SETTINGS: Mapping[str, tuple[str, str]] = {
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


def settings(extra: Mapping[str, Any]) -> Config:
    """The Config that a connector's extra config stands for.

    Raises ConfigError naming the setting that is unknown or wrong.
    """
    known = {k: v for k, v in extra.items() if "." in k}
    for key in extra:
        if key not in known:
            raise ConfigError(
                key,
                "unknown key in the connector's extra config",
                "Write section.field, for example engine.app.",
            )
    return load(known)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    parser = original(parser)
    group = parser.add_argument_group(
        title="cornplug", description="Share encoder outputs and KV blocks with other engines."
    )
    group.add_argument(
        "--kv-connector",
        choices=[NAME, *sorted(KVConnectorFactory._registry)],
        metavar="NAME",
        default=None,
        help="Name of a KV connector. 'cornplug' sets --kv-transfer-config and "
        "--ec-transfer-config; another registered name sets the former with kv_role=kv_both.",
    )
    for flag, (setting, text) in SETTINGS.items():
        group.add_argument(
            flag, dest=_dest(flag), default=None, metavar=setting.split(".")[1].upper(), help=text
        )
    return parser


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    name = getattr(args, "kv_connector", None)
    extra = {
        setting: value
        for flag, (setting, _) in SETTINGS.items()
        if (value := getattr(args, _dest(flag), None)) is not None
    }
    if name is None:
        if extra:
            raise ValueError("--cornplug-* options need --kv-connector cornplug")
        return original(cls, args)
    if args.kv_transfer_config is not None:
        raise ValueError("--kv-connector and --kv-transfer-config are two ways to say one thing; give one")
    args.kv_transfer_config, ec = transfer_configs(name, extra)
    if ec is not None:
        if args.ec_transfer_config is not None:
            raise ValueError(
                "--kv-connector cornplug sets --ec-transfer-config itself; to combine it with "
                "another encoder connector give --kv-transfer-config in full"
            )
        args.ec_transfer_config = ec
    # Consumed: vLLM may parse the same namespace again in a child.
    args.kv_connector = None
    for flag in SETTINGS:
        setattr(args, _dest(flag), None)
    return original(cls, args)


def transfer_configs(name: str, extra: Mapping[str, Any]) -> tuple[Any, Any | None]:
    """vLLM's (KVTransferConfig, ECTransferConfig or None) for `--kv-connector name`.

    Raises ConfigError for settings that are wrong, before any process is started.
    """
    from vllm.config import ECTransferConfig, KVTransferConfig

    if name != NAME:
        return KVTransferConfig(kv_connector=name, kv_role="kv_both"), None
    settings(extra)
    kv = KVTransferConfig(
        kv_connector=KV_CONNECTOR,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(extra),
    )
    ec = ECTransferConfig(ec_connector=EC_CONNECTOR, ec_role="ec_both", ec_connector_extra_config=dict(extra))
    return kv, ec


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.engine.arg_utils", "EngineArgs.add_cli_args", _add_cli_args),
    ("vllm.engine.arg_utils", "EngineArgs.from_cli_args", _from_cli_args),
)
