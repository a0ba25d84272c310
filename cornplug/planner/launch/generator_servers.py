"""Creates the command of a generator that runs in vLLM-Omni.

The flags are those of `vllm-omni serve` 0.30 (`vllm_omni/entrypoints/cli/serve.py`), which extends the parser
of `vllm serve`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cornplug.planner.inputs.field_types import GeneratorServer


def generator_command(
    server: GeneratorServer | None, model: str, *, tp: int = 1, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command of a generator's server, with the placeholders "{host}" and "{port}" for its
    address.

    The command is empty if `server` is None.
    """
    if server is None:
        return []
    argv = [server, "serve", model, "--omni", "--host", "{host}", "--port", "{port}"]
    argv += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
    return [*argv, *flags]
