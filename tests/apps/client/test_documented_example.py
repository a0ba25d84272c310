"""The client's example in docs/python-api.md runs, and the page names the code's fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cornplug.apps.stream_continuation import CHAT, COMPLETIONS, allowed_fields

from .fake_engine import TOLD, engines

DOCS = Path(__file__).parents[3] / "docs"


def test_client_example_of_the_docs_gets_an_answer() -> None:
    page = DOCS / "python-api.md"
    section = page.read_text().partition("\n## Send requests to several engines\n")[2]
    (example,) = re.findall(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    with engines(2) as (one, two):
        for port, engine in ((8000, one), (8001, two)):
            example = example.replace(f"http://127.0.0.1:{port}", engine.url)
        names: dict[str, Any] = {}
        exec(compile(example, str(page), "exec"), names)
    assert names["answer"].choices[0].message.content == TOLD
    assert len(one.bodies) + len(two.bodies) == 1


def test_fields_of_the_docs_are_those_of_the_code() -> None:
    text = (
        (DOCS / "python-api.md")
        .read_text()
        .partition("known to be harmless:")[2]
        .partition("With any other field")[0]
    )
    written = set(re.findall(r"`(\w+)`", text))
    off = {"logprobs", "echo", "frequency_penalty", "presence_penalty", "seed", "stop"}
    """Allowed with the value that means nothing only."""
    assert written == (allowed_fields(CHAT) | allowed_fields(COMPLETIONS)) - off
