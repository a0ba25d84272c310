"""`cornplug doctor` beside a real store and a real encoder service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cornplug.config import STORE_PROTOCOL
from devkit import checkpoints
from devkit.engines import EncoderProcess, StoreProcess


def test_doctor_finds_what_serves_a_model(short_path: Path) -> None:
    model = checkpoints.llava(short_path / "llava")
    run = short_path / "cornplug"
    env = {"XDG_RUNTIME_DIR": str(short_path), "XDG_CACHE_HOME": str(short_path / "cache")}

    def doctor(dtype: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "cornplug.cli", "doctor", "--json", "--model", str(model)]
        out = subprocess.run(
            [*command, "--dtype", dtype], capture_output=True, text=True, env={**os.environ, **env}
        )
        assert out.returncode == 0, out.stdout + out.stderr
        findings: list[dict[str, Any]] = json.loads(out.stdout)
        return findings

    with (
        StoreProcess(run / f"store-{STORE_PROTOCOL}.sock", env=env),
        EncoderProcess([model], socket=run / "encoder.sock", dtype="float32", env=env) as encoder,
    ):
        assert {f["status"] for f in doctor("float32")} == {"ok"}
        *rest, last = doctor("bfloat16")
        assert {f["status"] for f in rest} == {"ok"}
        assert (last["status"], "same tower" in last["what"]) == ("warn", True)
        assert encoder.stop() == 0
        lost = next(f for f in doctor("float32") if f["check"] == "encoder")
        assert lost["status"] == "warn"
