"""`cornplug fingerprint`: print fingerprints of checkpoints and the parts they share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Literal

from cornplug.checkpoints.checkpoint import Checkpoint, Part
from cornplug.errors import CheckpointError

_PARTS: tuple[Part, ...] = ("tower", "projector", "language_model")
DType = Literal["float32", "float16", "bfloat16"]


def main(argv: list[str]) -> int:
    """Run `cornplug fingerprint`, and return exit status 0.

    Raises CheckpointError if a checkpoint cannot be read.
    """
    parser = argparse.ArgumentParser(prog="cornplug fingerprint", description=__doc__)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="checkpoint folder, or hub id in the local cache"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the engine (default: the checkpoint's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    reports = [describe(model, args.dtype) for model in args.models]
    if args.json:
        print(json.dumps(reports, indent=2))
    else:
        _print(reports)
    return 0


def describe(model: str, dtype: DType | None = None) -> dict[str, Any]:
    """Return a report with a checkpoint's fingerprints as hex.

    Its keys are model, family, tower, projector, language_model, dtype and identity. The family, tower,
    projector and identity of a text-only model are None. Raises CheckpointError if the checkpoint cannot be
    read.
    """
    checkpoint = Checkpoint.open(model)
    chosen = dtype or default_dtype(checkpoint)
    report: dict[str, Any] = {"model": model, "family": None, "dtype": chosen, "identity": None}
    report |= dict.fromkeys(_PARTS)
    report["language_model"] = checkpoint.fingerprint("language_model").hex()
    try:
        report["family"] = checkpoint.family.name
    except CheckpointError as e:
        if e.reason != "unknown_family":
            raise
        return report
    identity = checkpoint.identity(chosen)
    return report | {
        "tower": identity.tower_fp.hex(),
        "projector": identity.projector_fp.hex(),
        "identity": identity.identity.hex(),
    }


def default_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype that engines use by default: the checkpoint's dtype, or bfloat16 instead of
    float32."""
    text = checkpoint.config.get("text_config") or {}
    named = next(
        filter(None, (c.get(k) for c in (checkpoint.config, text) for k in ("dtype", "torch_dtype"))), None
    )
    return "bfloat16" if named in (None, "float32") else str(named)


def _print(reports: Sequence[dict[str, Any]]) -> None:
    for report in reports:
        print(report["model"])
        for field in ("family", "dtype", *_PARTS, "identity"):
            print(f"  {field:15} {report[field] or '-'}")
    for part in (*_PARTS, "identity"):
        groups: dict[str, list[str]] = {}
        for report in reports:
            if report[part]:
                groups.setdefault(report[part], []).append(report["model"])
        for value, models in groups.items():
            if len(models) > 1:
                print(f"same {part} ({value[:12]}): {', '.join(models)}")
