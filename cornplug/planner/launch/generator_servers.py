"""Command of a generator with a known server: vLLM-Omni.

Flags are those of `vllm-omni serve` 0.30 (`vllm_omni/entrypoints/cli/serve.py`) and of `vllm serve`, whose
parser it extends.
"""

from __future__ import annotations

from collections.abc import Sequence

from cornplug.planner.inputs.field_types import GeneratorServer


def generator_command(
    server: GeneratorServer | None, model: str, *, tp: int = 1, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command with "{port}" and "{host}" for the address. Empty without a known `server`."""
    if server is None:
        return []
    argv = [server, "serve", model, "--omni", "--host", "{host}", "--port", "{port}"]
    argv += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
    return [*argv, *flags]
