"""vLLM parses the commands of docs/beside-other-systems.md as a Dynamo worker does.

`args.py` of Dynamo's vLLM component takes vLLM's parser without help, parses vLLM's flags with it, and builds
`AsyncEngineArgs` from the result.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

PAGE = Path(__file__).parents[2] / "docs" / "beside-other-systems.md"
OF_DYNAMO = ("--disaggregation-mode",)


def commands() -> list[list[str]]:
    """Flags of each `python -m dynamo.vllm` command of the page."""
    text = PAGE.read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^python -m dynamo\.vllm (.*)$", text, re.MULTILINE)]


def as_dynamo(flags: list[str]) -> AsyncEngineArgs:
    for own in OF_DYNAMO:
        if own in flags:
            at = flags.index(own)
            flags = flags[:at] + flags[at + 2 :]
    parser = FlexibleArgumentParser(add_help=False)
    AsyncEngineArgs.add_cli_args(parser, async_args_only=False)
    # A folder that is there: without a network vLLM looks for anything else in the hub's cache.
    flags = [str(PAGE.parent) if flag == "MODEL" else flag for flag in flags]
    return AsyncEngineArgs.from_cli_args(parser.parse_args(flags))


def test_dynamo_worker_alone_has_cornplugs_connectors() -> None:
    made = as_dynamo(commands()[0])
    assert made.kv_transfer_config is not None
    assert made.kv_transfer_config.kv_connector == "CornplugConnector"
    assert made.ec_transfer_config is not None


def test_dynamo_prefill_worker_has_nixl_before_cornplug() -> None:
    made = as_dynamo(commands()[1])
    assert made.kv_transfer_config is not None
    assert (
        made.kv_transfer_config.kv_connector == "MultiConnector"
    )  # Dynamo's P/D protocol takes it for NIXL's
    children = made.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "CornplugConnector"]
