"""A stock SGLang server, as script/setup makes it: answers as transformers does, and HiCache works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from devkit import checkpoints
from devkit.engines import photos, wait_until
from devkit.sglang_engine import SglangServer, sglang_python

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup"),
]

PROMPT = [(7 * i + 300) % 600 for i in range(300)]
STORABLE = 288
"""Of the prompt's tokens: whole pages of 16, and the last token is always computed."""


def expected(folder: Path) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens after PROMPT, and their log-probabilities."""
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    ids, logprobs = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(8):
            scores = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores[ids[-1]]))
    return ids[len(PROMPT) :], logprobs


@pytest.mark.parametrize(
    ("family", "layout", "backend"),
    [
        ("qwen2_vl", "page_head", "kernel"),
        ("deepseek_v2", "page_first_direct", "direct"),
    ],
)
def test_sglang_server_cold_and_from_storage_answers_as_transformers(
    tmp_path: Path, family: str, layout: str, backend: str
) -> None:
    folder: Path = getattr(checkpoints, family)(tmp_path / family)
    hicache = ["--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "2"]
    hicache += ["--hicache-io-backend", backend, "--hicache-mem-layout", layout]
    hicache += ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"]
    hicache += ["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}']
    pages = tmp_path / "pages"
    pages.mkdir()
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(pages)}
    with SglangServer(folder, *hicache, log=tmp_path / "log", env=env) as server:
        tokens, logprobs = expected(folder)
        cold = server.generate(PROMPT, max_tokens=8)
        assert list(cold.output_ids) == tokens
        assert cold.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert [row[0][0] for row in cold.top] == tokens
        assert {len(row) for row in cold.top} == {5}
        assert cold.cached_tokens == 0

        warm = server.generate(PROMPT, max_tokens=8)
        assert (warm.output_ids, warm.cached["device"]) == (cold.output_ids, STORABLE)

        wait_until(lambda: len(list(pages.iterdir())) >= STORABLE // 16, deadline_s=20, what="pages on disk")
        server.flush_cache()
        stored = server.generate(PROMPT, max_tokens=8)
        assert stored.cached == {"device": 0, "host": 0, "storage": STORABLE}
        assert stored.output_ids == cold.output_ids
        assert stored.logprobs == pytest.approx(logprobs, abs=1e-4)

        if family == "qwen2_vl":
            look_at_images(server)
        assert server.metric("sglang:prompt_tokens_total") > 3 * len(PROMPT)


def look_at_images(server: SglangServer) -> None:
    first, second = photos()[:2]
    answers: list[Any] = [
        server.chat("what is this?", images=[photo.data], max_tokens=8, top_logprobs=5)
        for photo in (first, second, first)
    ]
    assert answers[0].token_ids == answers[2].token_ids != answers[1].token_ids
    assert (
        [len(answer.token_ids) for answer in answers]
        == [len(answer.logprobs) for answer in answers]
        == [8] * 3
    )
    assert answers[0].cached_tokens == 0 < answers[2].cached_tokens
    assert {len(row) for row in answers[0].top_logprobs} == {5}
