"""Engines with a risky command line start beside our connectors, answer as stock, and log their
exclusions.

The many other lines, without a start: `tests/vllm_connector/test_start_matrix.py`.
"""

from __future__ import annotations

import io
import math
import struct
import tempfile
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from devkit.checkpoints import llava, qwen2_text
from devkit.checkpoints.audio import whisper
from devkit.checkpoints.text import deepseek_v2
from devkit.checkpoints.tiles import gemma3
from devkit.engines import EngineServer, VllmServer
from devkit.processes import together


def _says(server: EngineServer) -> object:
    return server.chat("what is a cache", max_tokens=6).token_ids


def _embeds(server: EngineServer) -> object:
    body = {"model": "model", "input": "what is a cache"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60, trust_env=False)
    return [round(x, 5) for x in answer.raise_for_status().json()["data"][0]["embedding"]]


def _hears(server: EngineServer) -> object:
    """One second of 440 Hz, transcribed."""
    audio = io.BytesIO()
    with wave.open(audio, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        wave_at = (int(9000 * math.sin(2 * math.pi * 440 * t / 16_000)) for t in range(16_000))
        file.writeframes(b"".join(struct.pack("<h", value) for value in wave_at))
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        data={"model": "model", "language": "en", "temperature": "0", "max_completion_tokens": "6"},
        files={"file": ("tone.wav", audio.getvalue(), "audio/wav")},
        timeout=60,
        trust_env=False,
    )
    return answer.raise_for_status().json()["text"]


@dataclass(frozen=True)
class Line:
    make: Callable[[Path], Path]
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    says: str | None = None
    """A line of the log where KV is left out."""
    ask: Callable[[EngineServer], object] = _says


NOT_SHARED = "cornplug: KV of this engine is not shared"
LINES = {
    "no-images": Line(llava, ("--limit-mm-per-prompt", '{"image":0}')),
    "encoder-decoder": Line(
        whisper,
        ("--max-model-len", "448"),
        says=f"{NOT_SHARED}: vLLM does not support KV connectors",
        ask=_hears,
    ),
    "language-model-only": Line(llava, ("--language-model-only",)),
    "no-profiling": Line(llava, ("--skip-mm-profiling",)),
    "expandable-segments": Line(
        qwen2_text, env=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),), says=NOT_SHARED
    ),
    "embeddings": Line(qwen2_text, ("--runner", "pooling", "--convert", "embed"), ask=_embeds),
    # The head size that the CPU decode kernel is compiled for: 512 + 64.
    "mla": Line(partial(deepseek_v2, kv_lora_rank=512, rope_dim=64)),
    "sliding-windows": Line(gemma3, says=NOT_SHARED),
    "several-connectors": Line(
        qwen2_text,
        (
            "--kv-transfer-config",
            '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":'
            '{"connectors":[{"kv_connector":"CornplugConnector","kv_role":"kv_both"}]}}',
        ),
        says="set kv_load_failure_policy to 'recompute'",
    ),
}


def _ours(line: Line, folder: Path) -> VllmServer:
    socket = Path(tempfile.mkdtemp(prefix="cp-")) / "store.sock"
    env = {"CORNPLUG_STORE_SOCKET": str(socket), "CORNPLUG_STORE_SIZE_BYTES": str(64 << 20)}
    flags = () if "--kv-transfer-config" in line.args else ("--kv-connector", "cornplug")
    return VllmServer(
        folder / "model", *line.args, *flags, log=folder / "ours.log", env={**env, **dict(line.env)}
    )


@pytest.mark.support("Answers as stock", "{name}")
@pytest.mark.parametrize("name", LINES)
def test_vllm_command_line_answers_as_stock(name: str, tmp_path: Path) -> None:
    line = LINES[name]
    line.make(tmp_path / "model")
    args = () if "--kv-transfer-config" in line.args else line.args
    stock = VllmServer(tmp_path / "model", *args, log=tmp_path / "stock.log", env=dict(line.env))
    ours = _ours(line, tmp_path)
    with together(stock, ours):
        assert line.ask(ours) == line.ask(stock)
    assert line.says is None or line.says in ours.log.read_text()
