"""The kept server speaks to a real vLLM, and nothing of it is left afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devkit import checkpoints
from devkit.engines import RequestFailed, VllmServer, photos


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("vllm")
    with VllmServer(checkpoints.llava(folder / "llava"), log=folder / "vllm.log") as server:
        yield server
        pids = server.pids()
        assert len(pids) >= 2
    assert server.pids() == []


def test_text_is_answered_alike_twice(server: VllmServer) -> None:
    one, two = (server.chat("what is a cache", max_tokens=8) for _ in range(2))
    assert one.token_ids == two.token_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
    assert len(one.token_ids) == len(one.logprobs) == 8
    assert one.finish_reason == "length"
    assert 0 < one.ttft_s <= one.total_s


def test_pictures_change_the_answer(server: VllmServer) -> None:
    pictures = photos()[:2]
    one, two = (server.chat("what is this", images=[p.data], max_tokens=8) for p in pictures)
    assert one.prompt_tokens == two.prompt_tokens
    assert one.token_ids != two.token_ids


def test_metrics_count_the_prompt(server: VllmServer) -> None:
    before = server.metric("vllm:prompt_tokens_total", model_name="model")
    answer = server.chat("count these words", max_tokens=1)
    assert server.metric("vllm:prompt_tokens_total", model_name="model") - before == answer.prompt_tokens
    assert server.metric("vllm:no_such_metric") == 0


def test_a_bad_picture_is_an_error_with_its_status(server: VllmServer) -> None:
    with pytest.raises(RequestFailed) as error:
        server.chat("what is this", images=[b"no picture"])
    assert error.value.status == 400
