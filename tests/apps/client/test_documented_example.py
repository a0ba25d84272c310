"""The example of docs/deploy-one-host.md runs as it stands, against a launch's `routes.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cornplug.apps.client.stream_continuation import CHAT, COMPLETIONS, fields_of

from .callers import APP
from .fake_engine import TOLD, engines

PAGE = Path(__file__).parents[3] / "docs" / "deploy-one-host.md"


def test_client_example_of_the_docs_streams_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().partition("\n## Client\n")[2]
    example, addresses = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    with engines(1) as (engine,):
        table = {"chat/text": {"priority": 0, "to": [{"weight": 1.0, "url": engine.url}]}}
        (tmp_path / "routes.json").write_text(json.dumps(table))
        exec(compile(example, str(PAGE), "exec"), {"run_dir": tmp_path})
    assert capsys.readouterr().out == TOLD
    assert engine.bodies[0]["max_tokens"] == 256
    names: dict[str, Any] = {"app": APP}
    exec(compile(addresses, str(PAGE), "exec"), names)
    names["client"].close()


def test_fields_of_the_docs_are_those_of_the_code() -> None:
    text = PAGE.read_text().partition("known to be harmless:")[2].partition("With any other field")[0]
    written = set(re.findall(r"`(\w+)`", text))
    off = {"logprobs", "echo", "frequency_penalty", "presence_penalty", "seed", "stop"}
    """Allowed with the value that means nothing only."""
    assert written == (fields_of(CHAT) | fields_of(COMPLETIONS)) - off
