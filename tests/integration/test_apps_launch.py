"""An apps file with a real store, encoder service and vLLM; then another plan, under a steady stream."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cornplug.apps import (
    Application,
    AppNamespace,
    AppsFile,
    Component,
    ComponentResources,
    LaunchOptions,
    RequestMedia,
    RequestSpec,
    Slo,
)
from cornplug.host import free_port
from devkit import checkpoints
from devkit.engines import photos, wait_until

pytestmark = pytest.mark.timeout(1500)

START_S = 600.0


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cp-"))
    yield folder / "run"
    shutil.rmtree(folder, ignore_errors=True)


def apps_file(model: Path, port: int, *, seqs: int) -> AppsFile:
    core = min(os.sched_getaffinity(0))
    flags = [
        "--max-model-len",
        "2048",
        "--kv-cache-memory-bytes",
        str(256 << 20),
        "--max-num-seqs",
        str(seqs),
    ]
    return AppsFile(
        name="ab",
        launch=LaunchOptions(port=port, store_gib=1.0),
        components=[
            Component(
                name="llm",
                kind="llm",
                model=str(model),
                engines=["vllm"],
                resources=ComponentResources(device="cpu", devices=[core], flags=flags),
            ),
            Component(
                name="tower",
                kind="encoder",
                model=str(model),
                resources=ComponentResources(device="cpu", devices=[core]),
            ),
        ],
        applications=[
            Application(
                name="chat",
                llm="llm",
                slo=Slo(ttft_s=30.0),
                system_prompt="You describe pictures.",
                namespace=AppNamespace(share=0.5),
                requests=[
                    RequestSpec(name="picture", rate=1.0, media=[RequestMedia(encoder="tower", tokens=64)])
                ],
            )
        ],
    ).check()


def ask(run_dir: Path, model: Path, number: int) -> str:
    """The address that answered a request of the class, by the routes of this moment."""
    way = json.loads((run_dir / "routes.json").read_text())["chat/picture"]
    url: str = way["to"][0]["url"]
    photo = base64.b64encode(photos()[number % 2].data).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{photo}"}}
    content = [image, {"type": "text", "text": f"What is shown? ({number})"}]
    body: dict[str, Any] = {"model": str(model), "messages": [{"role": "user", "content": content}]}
    sent = httpx.post(
        f"{url}/v1/chat/completions", json=body | {"max_tokens": 4}, timeout=300, trust_env=False
    )
    assert sent.status_code == 200, sent.text
    assert sent.json()["usage"]["completion_tokens"] >= 1
    return url


def test_apps_file_change_of_real_engines_under_load_fails_no_request(tmp_path: Path, run_dir: Path) -> None:
    model = checkpoints.qwen2_vl(tmp_path / "model")
    # Encoders listen 750 ports above engines.
    port, files = free_port(extra_ports=1000), [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file, seqs in zip(files, (4, 2), strict=True):
        file.write_text(apps_file(model, port, seqs=seqs).to_toml())
    cornplug = [sys.executable, "-m", "cornplug.cli", "launch", str(files[0]), "--run-dir", str(run_dir)]
    out = tmp_path / "out"
    launcher = subprocess.Popen(
        [*cornplug, "--settle-s", "10"], stdout=out.open("w"), stderr=subprocess.STDOUT
    )
    answers: list[str] = []
    failures: list[str] = []
    ended = threading.Event()

    def stream() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            try:
                answers.append(ask(run_dir, model, number))
            except Exception as e:  # noqa: BLE001
                failures.append(repr(e))

    clients = [threading.Thread(target=stream, daemon=True) for _ in range(2)]
    try:
        wait_until(
            lambda: "Ctrl-C ends it" in out.read_text() or launcher.poll() is not None,
            deadline_s=START_S,
            what="a launch that serves",
        )
        assert launcher.poll() is None, out.read_text()
        assert (run_dir / "store.sock").is_socket()
        for client in clients:
            client.start()
        wait_until(lambda: len(answers) > 2, deadline_s=300, what="answers")
        done = subprocess.run(
            [*cornplug, "--apply", str(files[1])],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert {"keep store", "keep tower-0"} <= set(done.stdout.splitlines())
        wait_until(lambda: answers[-1] != answers[0], deadline_s=300, what="an answer of the new engine")
        ended.set()
        for client in clients:
            client.join(300)
        print(f"{len(answers)} answers, {len(failures)} failures, of {sorted(set(answers))}")
        assert failures == []
        assert set(answers) == {f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"}
        for log in run_dir.glob("*.log"):
            print(f"--- {log.name}\n{log.read_text()[-1500:]}")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(200) == 0
    finally:
        ended.set()
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(200)
