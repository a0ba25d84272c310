"""Flags of `cornplug encoder`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from cornplug.encoder_service.replicas.pool import devices_of
from cornplug.errors import ConfigError


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError before weights are read, which may take minutes."""
    if args.threads is not None and args.threads < 1:
        raise ConfigError("--threads", f"{args.threads} threads compute nothing", "Write 1 or more.")
    kind, _, number = args.device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ConfigError("--device", f"{args.device!r} is unknown", "Write cpu, cuda, or cuda:N.")
    have = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= have:
        raise ConfigError("--device", f"{args.device} is not there: {have} GPUs", "Write --device cpu.")
    if args.replicas:
        devices_of(args.device, args.replicas)


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags override, for `config.load`."""
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


def parser(description: str) -> argparse.ArgumentParser:
    """The parser of all flags; each help text has its unit and default."""
    out = argparse.ArgumentParser(
        prog="cornplug encoder",
        description=description,
        epilog="SGLang: `sglang.launch_server --language-only --encoder-urls http://HOST:PORT` is served on "
        "the HTTP port with --sglang, by --encoder-transfer-backend zmq_to_scheduler or zmq_to_tokenizer. "
        "With several models the URL ends in /sglang/NAME.",
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
        help="dtype of the engines that share: float32, float16, bfloat16 (default)",
    )
    out.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, or cuda:N (default: cuda where there is a GPU)",
    )
    out.add_argument(
        "--replicas",
        type=int,
        default=0,
        help="number of computing processes, one per GPU; on a CPU they divide the cores. One that dies is "
        "restarted while the others take its work (default: 0, compute in this process)",
    )
    out.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the towers' layers in their first batches, which take seconds (default: off)",
    )
    out.add_argument(
        "--socket",
        type=Path,
        help="unix socket for engines of this host (default: in /tmp/cornplug-UID)",
    )
    out.add_argument("--host", help="HTTP address to listen at (default: 127.0.0.1)")
    out.add_argument("--port", type=int, help="HTTP port (default: 8750); 0 picks a free one")
    out.add_argument(
        "--sglang",
        action="store_true",
        default=None,
        help="serve SGLang's --language-only servers on the HTTP port, too (default: off)",
    )
    out.add_argument(
        "--receivers",
        help="networks (10.1.0.0/16, ...) of SGLang servers whose embeddings another host asks for",
    )
    out.add_argument(
        "--require-key",
        action="store_true",
        default=None,
        help="answer only HTTP requests with a key: a class's ([qos.classes.NAME]) or the operator's",
    )
    out.add_argument(
        "--allow-anonymous",
        action="store_true",
        default=None,
        help="allow a --host beyond this host without keys (default: off)",
    )
    out.add_argument(
        "--names", help="host names by which HTTP clients reach this service, with commas between"
    )
    out.add_argument(
        "--store-socket", type=Path, help="unix socket of the store (default: in /tmp/cornplug-UID)"
    )
    out.add_argument(
        "--no-store", action="store_true", help="use no store: answers carry the embedding itself"
    )
    out.add_argument(
        "--threads",
        type=int,
        help="torch threads of each computing process (default: all cores but one; several replicas "
        "divide all cores; 1 if a GPU computes without replicas)",
    )
    return out
