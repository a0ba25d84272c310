"""Makes two small models, launches services.toml, asks each service by routes.json, and ends all.

    script/demo services

Exit status: 0 when every service answered and all processes ended well.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from devkit import checkpoints
from devkit.engines import photos

HERE = Path(__file__).parent
START_S = 900.0


def main() -> int:
    """0 when every service answered."""
    make_models(HERE / "models")
    with tempfile.TemporaryDirectory(prefix="cp-") as folder:
        run_dir = Path(folder) / "run"
        line = ["launch", str(HERE / "services.toml"), "--run-dir", str(run_dir)]
        launcher = subprocess.Popen([sys.executable, "-m", "cornplug.cli", *line])
        try:
            if not serves(launcher, run_dir):
                return 1
            ask_each(json.loads((run_dir / "routes.json").read_text()))
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(300)
    return launcher.returncode


def make_models(folder: Path) -> None:
    """Two Gemma 3 with one SigLIP and random weights, where they are not there yet."""
    for name, size, layers, seed in (("small", 64, 2, 1), ("large", 128, 4, 2)):
        if not (folder / name / "config.json").exists():
            checkpoints.gemma3(folder / name, hidden_size=size, layers=layers, llm_seed=seed)


def serves(launcher: subprocess.Popen[bytes], run_dir: Path) -> bool:
    """Whether the launch has come up: its plan is written once all processes serve."""
    began = time.monotonic()
    while not (run_dir / "current-plan.json").exists():
        if launcher.poll() is not None or time.monotonic() - began > START_S:
            return False
        time.sleep(0.5)
    return True


def ask_each(routes: dict[str, Any]) -> None:
    """One request of each class; raises httpx.HTTPError where a service fails."""
    photo = base64.b64encode(photos()[0].data).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{photo}"}}
    speech = None
    for name, way in routes.items():
        url = way["to"][0]["url"]
        media = [image] if name.endswith(("picture", "pages")) else []
        content = [*media, {"type": "text", "text": "What is shown?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        body |= {
            "priority": way["priority"],
            **({"cache_salt": way["cache_salt"]} if "cache_salt" in way else {}),
        }
        body["model"] = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
        answered.raise_for_status()
        text = answered.json()["choices"][0]["message"]["content"]
        print(f"{name:24} {url}  {text!r}", flush=True)
        speech = text if name.startswith("tts/") else speech
    spoken = httpx.post(
        "http://127.0.0.1:8102/v1/audio/speech",
        json={"input": speech or "nothing"},
        timeout=60,
        trust_env=False,
    )
    spoken.raise_for_status()
    print(f"{'tts, spoken':24} {len(spoken.content)} bytes of WAV", flush=True)


if __name__ == "__main__":
    sys.exit(main())
