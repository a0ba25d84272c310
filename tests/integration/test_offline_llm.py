"""vLLM's offline class `LLM`, with its engine core in a process of its own and in the program's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from integration.stack import PREAMBLE

from devkit import checkpoints
from devkit.processes import StoreProcess, environment

PROMPTS: Final = (f"{PREAMBLE} What is a cache?", f"Say it twice. {PREAMBLE} {PREAMBLE}")
PAGE: Final = 64
PROGRAM: Final = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    done = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=8))
    print(json.dumps([
        [list(one.outputs[0].token_ids), len(one.prompt_token_ids), one.num_cached_tokens] for one in done
    ]))
"""

PAUSES: Final = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    done = []
    for prompt in json.loads(sys.argv[2]):
        both = SamplingParams(temperature=0, max_tokens=8)
        done += llm.generate([prompt], both)
        assert llm.reset_prefix_cache()
        done += llm.generate([prompt], both)
        # As `sleep(level=1)` begins: a CPU has no sleep mode.
        llm.llm_engine.engine_core.engine_core.pause_scheduler()
        llm.llm_engine.engine_core.engine_core.resume_scheduler()
    print(json.dumps([
        [list(one.outputs[0].token_ids), len(one.prompt_token_ids), one.num_cached_tokens] for one in done
    ]))
"""


@dataclass(frozen=True, slots=True)
class Output:
    """What a program says of one prompt."""

    token_ids: Sequence[int]
    prompt_tokens: int
    cached_tokens: int


def outputs(
    folder: Path,
    model: Path,
    store: Path | None,
    env: dict[str, str],
    *,
    source: str = PROGRAM,
    save: str = "always",
) -> list[Output]:
    """Every prompt's output, of a program that ends after them; without a store, of stock vLLM."""
    program = folder / f"program-{'stock' if store is None else 'ours'}.py"
    program.write_text(source)
    settings: dict[str, Any] = {
        **{"model": str(model), "max_model_len": 2048, "dtype": "float32", "enforce_eager": True},
        "disable_log_stats": True,
    }
    if store is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "CornplugConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # The program ends with its answers, so it is never idle, and nobody asked for its prompts before.
            "kv_connector_extra_config": {"store.socket": str(store), "engine.save": save},
        }
    command = [sys.executable, str(program), json.dumps(settings), json.dumps(PROMPTS)]
    added = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **env}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment({"PATH": path, **added})
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Output(*row) for row in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.timeout(400)
@pytest.mark.support("Sharing", "the offline class LLM, engine core in {core}")
@pytest.mark.parametrize(("core", "variable"), [("its own process", "1"), ("the program", "0")])
def test_offline_llm_continues_what_another_program_computed(
    core: str, variable: str, short_path: Path
) -> None:
    model, socket = checkpoints.qwen2_text(short_path / "model"), short_path / "s"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": variable}
    with StoreProcess(socket, log=short_path / "store.log") as store, ThreadPoolExecutor(1) as aside:
        stock = aside.submit(outputs, short_path, model, None, env)
        first = outputs(short_path, model, socket, env)
        assert store.stat().entries > 0, "a program that ends has left its pages"
        second = outputs(short_path, model, socket, env)
    assert [one.token_ids for one in first] == [one.token_ids for one in stock.result()]
    assert [one.token_ids for one in second] == [one.token_ids for one in first]
    for output in second:
        assert output.cached_tokens >= 0.9 * ((output.prompt_tokens - 1) // PAGE * PAGE)


@pytest.mark.timeout(400)
@pytest.mark.support("Pauses", "reset and pause of the offline class LLM in the program, saves {save}")
@pytest.mark.parametrize("save", ["always", "second"])
def test_offline_llm_pauses_right_after_generate(save: str, short_path: Path) -> None:
    model, socket = checkpoints.qwen2_text(short_path / "model"), short_path / "s"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with StoreProcess(socket, log=short_path / "store.log"), ThreadPoolExecutor(1) as aside:
        stock = aside.submit(outputs, short_path, model, None, env, source=PAUSES)
        ours = outputs(short_path, model, socket, env, source=PAUSES, save=save)
    assert [one.token_ids for one in ours] == [one.token_ids for one in stock.result()]
