"""A plan's commands on two hosts, started for real: the engine asks the other host's encoder by URL."""

from __future__ import annotations

import base64
import shutil
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import httpx
import pytest
from planner.plans import Case, plan
from prometheus_client.parser import text_string_to_metric_families

from cornplug.host import free_port
from cornplug.planner.launch import connections
from cornplug.planner.launch.launcher import CommandSelection, local_commands, run_commands
from devkit import checkpoints
from devkit.engines import photos, wait_until


def embeddings_hit(url: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "cornplug_hits_total" and sample.labels.get("kind") == "embedding"
    )


def test_plan_of_two_hosts_pulls_embeddings_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts are this machine; each has its own folder, store and sockets, and a copy of the secret."""
    monkeypatch.setattr(connections, "ENGINE_PORT", free_port())
    monkeypatch.setattr(connections, "ENCODER_PORT", free_port())
    monkeypatch.setenv("CORNPLUG_STORE_LOAD_WHEN", "always")
    monkeypatch.setenv("CORNPLUG_ENCODER_DEADLINE_S", "60")
    made = plan(Case("E+PD", gpu="cpu-core", hosts=2, model=str(checkpoints.qwen2_vl(tmp_path / "model"))))
    small = {"max_model_len": 2048, "chunk_tokens": 2048, "max_batch": 4, "kv_bytes": 256 << 20}
    groups = [
        g if g.settings is None else g.model_copy(update={"settings": g.settings.model_copy(update=small)})
        for g in made.groups
    ]
    made = made.model_copy(update={"groups": groups, "allow_anonymous": True})
    here = {"HOST_1": "127.0.0.1", "HOST_2": "127.0.0.1"}
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    try:
        with ExitStack() as hosts:
            for host in here:
                secret, run_dir = sockets / f"secret-{host}", sockets / host
                secret.write_bytes(bytes(range(32)))
                secret.chmod(0o600)
                commands = local_commands(
                    made, CommandSelection(host), run_dir=run_dir, addresses=here, secret_file=secret
                )
                last = hosts.enter_context(run_commands(made, commands, run_dir=run_dir, ready_s=300))
            (engine,) = (p.command for p in last if p.command.kind == "engine")
            data = base64.b64encode(photos()[0].data).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            content = [image, {"type": "text", "text": "What is shown?"}]
            url, tries = f"http://127.0.0.1:{engine.port}", count()

            def pulls() -> bool:
                # A new salt each time: the engine looks for a service every second.
                message = {"role": "user", "content": content}
                body = {"messages": [message], "max_tokens": 4, "cache_salt": f"try {next(tries)}"}
                asked = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180, trust_env=False)
                assert asked.status_code == 200, asked.text
                return embeddings_hit(url) > 0

            wait_until(pulls, deadline_s=60, what="an embedding that it pulled")
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
