"""Command-line flags of `cornplug encoder`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from cornplug.encoder_service.replica import replica_devices
from cornplug.errors import ConfigError


def check_flags(args: argparse.Namespace) -> None:
    """Validate the flags before weights are read, which may take minutes. Raises ConfigError."""
    if args.threads is not None and args.threads < 1:
        raise ConfigError("--threads", f"must be at least 1, not {args.threads}", "Set it to 1 or more.")
    kind, _, number = args.device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ConfigError("--device", f"unknown device {args.device!r}", "Set cpu, cuda or cuda:N.")
    have = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= have:
        raise ConfigError(
            "--device",
            f"{args.device} does not exist, because this host has {have} GPUs",
            "Set --device cpu.",
        )
    if args.replicas:
        replica_devices(args.device, args.replicas)


def setting_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that flags override, for `config.load`."""
    given = {
        "encoder.socket": args.socket,
        "encoder.host": args.host,
        "encoder.port": args.port,
        "encoder.sglang": args.sglang,
        "encoder.receivers": args.receivers,
        "encoder.require_key": args.require_key,
        "encoder.allow_anonymous": args.allow_anonymous,
        "encoder.names": args.names,
        "store.socket": args.store_socket,
    }
    return {field: value for field, value in given.items() if value is not None}


def build_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser with all flags. Each help text states the unit and the default."""
    out = argparse.ArgumentParser(
        prog="cornplug encoder",
        description=description,
        epilog="With --sglang, start `sglang.launch_server --language-only --encoder-urls http://HOST:PORT` "
        "with --encoder-transfer-backend zmq_to_scheduler or zmq_to_tokenizer. If the service has several "
        "models, append /sglang/NAME to the URL.",
    )
    out.add_argument(
        "--model",
        action="append",
        required=True,
        help="checkpoint folder, or hub id in the local cache; repeat for each model",
    )
    out.add_argument(
        "--dtype",
        default="bfloat16",
        help="dtype of the engines that use this service: float32, float16, or bfloat16 (default)",
    )
    out.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, or cuda:N (default: cuda if the host has a GPU)",
    )
    out.add_argument(
        "--replicas",
        type=int,
        default=0,
        help="worker processes, one per GPU; on a CPU they divide the cores (default: 0, compute in this "
        "process)",
    )
    out.add_argument(
        "--compile",
        action="store_true",
        help="apply torch.compile to the towers; the first batches then take seconds (default: off)",
    )
    out.add_argument(
        "--socket",
        type=Path,
        help="unix socket for engines on this host (default: in /tmp/cornplug-UID)",
    )
    out.add_argument("--host", help="HTTP address to listen on (default: 127.0.0.1)")
    out.add_argument("--port", type=int, help="HTTP port (default: 8750); 0 selects a free port")
    out.add_argument(
        "--sglang",
        action="store_true",
        default=None,
        help="also serve SGLang's --language-only servers on the HTTP port (default: off)",
    )
    out.add_argument(
        "--receivers",
        help="comma-separated networks of SGLang servers that may receive embeddings requested by another "
        "host (default: none)",
    )
    out.add_argument(
        "--require-key",
        action="store_true",
        default=None,
        help="reject HTTP requests without a key of a class or of the operator",
    )
    out.add_argument(
        "--allow-anonymous",
        action="store_true",
        default=None,
        help="allow requests from other hosts without a key (default: off)",
    )
    out.add_argument("--names", help="comma-separated host names that HTTP clients use for this service")
    out.add_argument(
        "--store-socket", type=Path, help="unix socket of the store (default: in /tmp/cornplug-UID)"
    )
    out.add_argument(
        "--no-store", action="store_true", help="run without a store; replies contain the embedding itself"
    )
    out.add_argument(
        "--threads",
        type=int,
        help="torch threads of each worker process (default: all cores but one; with replicas, an equal "
        "share; 1 on a GPU without replicas)",
    )
    return out
