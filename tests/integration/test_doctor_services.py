"""`cornplug doctor` beside a real store and a real encoder service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cornplug.config import STORE_PROTOCOL
from devkit import checkpoints
from devkit.engines import EncoderProcess, StoreProcess
from devkit.processes import at_once


def test_doctor_finds_what_serves_a_model(short_path: Path) -> None:
    model = checkpoints.llava(short_path / "llava")
    run = short_path / "run"
    env = {"CORNPLUG_RUNTIME_DIR": str(run), "XDG_CACHE_HOME": str(short_path / "cache")}

    def doctor(*args: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "cornplug.cli", "doctor", "--json", *args]
        out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
        assert out.returncode == 0, out.stdout + out.stderr
        findings: list[dict[str, Any]] = json.loads(out.stdout)
        return findings

    with (
        StoreProcess(run / f"store-{STORE_PROTOCOL}.sock", env=env),
        EncoderProcess([model], socket=run / "encoder.sock", dtype="float32", env=env) as encoder,
    ):
        # Side by side: each asks both engines about the model, which imports them.
        same, (*rest, last) = at_once(
            *(partial(doctor, "--model", str(model), "--dtype", dtype) for dtype in ("float32", "bfloat16"))
        )
        # Whether engines share embeddings in bfloat16 is for the support matrix to say.
        others = [finding for finding in rest if "embeddings" not in finding["what"]]
        assert {f["status"] for f in (*same, *others)} == {"ok"}
        assert (last["status"], "same tower" in last["what"]) == ("warn", True)
        assert encoder.stop() == 0
        lost = next(f for f in doctor() if f["check"] == "encoder")
        assert lost["status"] == "warn"
