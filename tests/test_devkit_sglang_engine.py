"""SglangServer: what it starts and how it reads answers (a real one: integration/test_sglang_server.py)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cornplug.errors import ProcessFailed
from devkit import engines, sglang_engine
from devkit.engines import RequestFailed
from devkit.sglang_engine import SglangServer, sglang_python


def command(*args: str, python: Path = Path("/env/bin/python")) -> list[str]:
    return SglangServer("/models/a", *args, log=Path("log"), port=8001, python=python).argv


def test_sglang_engine_callers_flags_win_over_defaults() -> None:
    plain = command()
    assert plain[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    assert plain[plain.index("--dtype") + 1] == "float32"
    for args in (["--dtype", "bfloat16"], ["--dtype=bfloat16"]):
        given = command(*args)
        assert "float32" not in given
        assert sum(arg.startswith("--dtype") for arg in given) == 1


def test_sglang_engine_without_gpu_runs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "has_gpu", lambda: False)
    server = SglangServer("/models/a", log=Path("log"), python=Path("/env/bin/python"), env={"X": "1"})
    assert server.argv[server.argv.index("--device") + 1] == "cpu"
    assert server.env["SGLANG_USE_CPU_ENGINE"] == server.env["X"] == "1"
    assert server.env["PATH"].split(":")[0] == "/env/bin"

    monkeypatch.setattr(sglang_engine, "has_gpu", lambda: True)
    server = SglangServer("/models/a", log=Path("log"), python=Path("/env/bin/python"))
    assert "--device" not in server.argv
    assert "SGLANG_USE_CPU_ENGINE" not in server.env


def test_sglang_engine_interpreter_is_named_by_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    monkeypatch.setenv("CORNPLUG_SGLANG_PYTHON", str(python))
    assert sglang_python() is None
    with pytest.raises(ProcessFailed, match="script/setup"):
        SglangServer("/models/a", log=tmp_path / "log")
    python.touch()
    assert sglang_python() == python


def test_token_ids_of_a_stream_come_with_its_last_event() -> None:
    def delta(text: str, *logprobs: float) -> dict[str, object]:
        content = [{"token": text, "logprob": p} for p in logprobs]
        logs = {"content": content} if content else None
        return {"choices": [{"delta": {"content": text}, "logprobs": logs, "finish_reason": None}]}

    usage = {"prompt_tokens": 37, "prompt_tokens_details": {"cached_tokens": 32}}
    ids = {"choices": [], "sglext": {"output_ids": [[288, 109, 579]]}}
    events = [delta(""), delta("bg", -2.5), delta("mml", -2.75, -3.5), ids, {"choices": [], "usage": usage}]
    answer = engines._collect(iter(events), time.perf_counter())
    assert (answer.text, answer.token_ids) == ("bgmml", (288, 109, 579))
    assert answer.logprobs == (-2.5, -2.75, -3.5)
    assert (answer.prompt_tokens, answer.cached_tokens) == (37, 32)
    with pytest.raises(RequestFailed, match="ended early"):
        engines._collect(iter(events[:1]), time.perf_counter())


def test_sglang_engine_generate_answer_is_parsed() -> None:
    meta = {
        "prompt_tokens": 300,
        "cached_tokens": 288,
        "cached_tokens_details": {"device": 0, "host": 16, "storage": 272, "storage_backend": "HiCacheFile"},
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-2.5, 788, None]],
        "output_top_logprobs": [[[-2.5, 788, None], [-4.0, 775, None]]],
    }
    answer = {"text": "um", "output_ids": [788], "meta_info": meta}
    generation = sglang_engine._generation(answer, 0.5)
    assert generation.output_ids == (788,)
    assert generation.logprobs == (-2.5,)
    assert generation.top == (((788, -2.5), (775, -4.0)),)
    assert generation.cached == {"device": 0, "host": 16, "storage": 272}
    assert (generation.cached_tokens, generation.finish_reason) == (288, "length")

    cold = sglang_engine._generation({**answer, "meta_info": {**meta, "cached_tokens_details": None}}, 0.5)
    assert cold.cached == {"device": 0, "host": 0, "storage": 0}
