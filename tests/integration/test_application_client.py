"""An application's client and two real vLLM engines on one store, of which one is killed amid a stream."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from integration.stack import PREAMBLE, count
from integration.text_host import TextHost

from cornplug.apps import Application, RequestSpec
from devkit import checkpoints, tokenizers
from devkit.engines import VllmServer, wait_until
from devkit.processes import together

pytestmark = pytest.mark.timeout(1500)

TOKENS = 400
KILLED_AFTER = 20
"""Events of the stream that the caller has had by then: few, as the store has the prompt only."""
# A tiny model says letters in any order, of which a tokenizer makes other tokens: so it says none.
SAYABLE = [byte for byte in tokenizers.PRINTABLE if not chr(byte).islower()]
ASK: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": f"{PREAMBLE} {PREAMBLE} What is a cache?"}],
    "temperature": 0,
    "extra_body": {"allowed_token_ids": SAYABLE},
}
STREAM = ASK | {"max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cp-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_client_stream_of_a_killed_engine_goes_on_from_the_store(tmp_path: Path, sockets: Path) -> None:
    app = Application(name="chat", llm="m", requests=[RequestSpec(name="text", rate=1.0)])
    model = checkpoints.qwen2_text(tmp_path / "model")
    with (
        VllmServer(model, log=tmp_path / "stock.log") as stock,
        app.client(routes=[stock.url], timeout=300) as client,
    ):
        expected = list(client.chat.completions.create(**STREAM))

    host = TextHost("host", model, tmp_path, sockets)
    killed, other = host.engine("vllm", "killed"), host.engine("vllm", "other")
    with host.store() as store, together(killed, other):
        routes = {killed.url: 1e6, other.url: 1.0}
        with app.client(routes=routes, timeout=300) as client:
            first = client.chat.completions.create(**ASK, max_tokens=1)
            pages = (first.usage.prompt_tokens - 1) // 64
            # An engine saves a prompt that it had once when it idles.
            wait_until(lambda: store.stat().entries >= pages, deadline_s=180, what="the prompt in the store")
            assert other.metric("vllm:prompt_tokens_total") == 0

            stream = iter(client.chat.completions.create(**STREAM))
            chunks = list(islice(stream, KILLED_AFTER))
            killed.kill()
            chunks += stream

        assert text_of(chunks) == text_of(expected)
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].usage.completion_tokens == expected[-1].usage.completion_tokens == TOKENS
        assert chunks[-1].usage.prompt_tokens == expected[-1].usage.prompt_tokens
        prompt = other.metric("vllm:prompt_tokens_total")
        loaded = count(other, "saved_tokens_total")
        print(f"{prompt:g} tokens of prompt and text so far, {loaded:g} of them out of the store")
        assert prompt > first.usage.prompt_tokens, "the stream did not go on elsewhere"
        assert loaded >= 0.9 * prompt
