"""The command of a generator's server, and the plan that has it."""

from __future__ import annotations

import copy

from planner.scenarios import SCENARIOS
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch.command_lines import commands
from cornplug.planner.launch.vllm_flags import generator_command
from cornplug.planner.pipeline.decide import decide


def test_generator_command_without_a_known_server_is_empty() -> None:
    assert generator_command(None, "org/tts", tp=2, flags=["--log-stats"]) == []


def test_generator_command_of_vllm_omni_has_flags_of_vllms_parser() -> None:
    """`vllm-omni serve` builds on it; `--omni` is its own (0.29, 0.30)."""
    argv = generator_command("vllm-omni", "org/tts", tp=2, flags=["--dtype", "bfloat16"])
    assert argv[:4] == ["vllm-omni", "serve", "org/tts", "--omni"]
    words = [word.replace("{port}", "8091").replace("{host}", "127.0.0.1") for word in argv[4:]]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert (args.host, args.port, args.tensor_parallel_size, args.dtype) == ("127.0.0.1", 8091, 2, "bfloat16")


def test_generator_command_is_in_the_plan_that_chose_the_generator() -> None:
    tables = copy.deepcopy(SCENARIOS["speech, generator apart"])
    tables["components"][1] |= {"server": "vllm-omni", "model": "org/tts"}
    tables["rules"] |= {"simulate": False}
    plan = decide(PlanInput.model_validate(tables), digest="0" * 64).plan
    (started,) = [command for command in commands(plan) if command.kind == "external" and not command.replica]
    assert started.argv[:4] == ("vllm-omni", "serve", "org/tts", "--omni")
    assert started.argv[started.argv.index("--port") + 1] == str(started.port)
    assert "{" not in " ".join(started.argv)
    assert not started.remarks
