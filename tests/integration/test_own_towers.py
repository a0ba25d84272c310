"""Embeddings of towers that only SGLang computes with: rows out of the store equal those of the tower.

The families that SGLang's servers share so in a dtype are the lines that passed here: script/docs writes
`cornplug/checkpoints/tested_releases.py` from the results that a run keeps. Here each line is shared on
trial (`devkit/family_trials.py`).

No encoder service runs. The server keeps no embeddings itself, so that a repeated medium comes out of the
store; `tests/sglang_hooks/media/test_tower_inputs.py` shows that another process has the same keys.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from integration.stack import count, forget_prefixes, same_answers, services
from PIL import Image

from cornplug.checkpoints.tested_releases import VALIDATED
from devkit import checkpoints
from devkit.engines import Answer, EngineServer, data_url, wait_until
from devkit.family_trials import trial_environment
from devkit.sglang_engine import sglang_python

pytestmark = pytest.mark.sglang_alone

MODELS: Mapping[str, Callable[[Path], Path]] = {
    "gemma3": checkpoints.gemma3,
    "internvl_chat": checkpoints.internvl_chat,
    "qwen2_audio": checkpoints.qwen2_audio,
}
LINES = (("gemma3", "image"), ("internvl_chat", "image"), ("qwen2_audio", "audio"))
PAIRED = ("gemma3", "internvl_chat")
"""Families that take two media in a request. Qwen2-Audio's is not one in SGLang 0.5.23: its
`Qwen2AudioMultimodalProcessor.process_mm_data_async` gives the lengths of all audio to the first item, and
`get_audio_feature` then misses them at the second."""
NO_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
needs_sglang = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")


def _image(seed: int) -> Mapping[str, Any]:
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize(((90, 80), (240, 100))[seed % 2]).save(out, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue())}}


def _audio(seed: int) -> Mapping[str, Any]:
    """One second and a half, or less, at 16 kHz, in Matroska: SGLang reads plain WAV with torchaudio only."""
    samples = np.random.default_rng(seed).normal(0, 4000, (1, 24_000 - 4_000 * seed)).astype("<i2")
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("pcm_s16le", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 16_000
        file.mux([*stream.encode(frame), *stream.encode(None)])
    url = f"data:audio/x-matroska;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}}


MEDIA: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "image": [_image(0), _image(1)],
    "audio": [_audio(0), _audio(1)],
}


def ask(server: EngineServer, media: Sequence[Mapping[str, Any]], salt: str) -> Answer:
    content = [*media, {"type": "text", "text": "What is it?"}]
    return server.chat([{"role": "user", "content": content}], max_tokens=6, cache_salt=salt, top_logprobs=5)


def each(server: EngineServer, modality: str, salt: str) -> list[Answer]:
    """The answers about each medium alone, by a server that has forgotten its prefixes."""
    forget_prefixes(server)
    return [ask(server, [medium], salt) for medium in MEDIA[modality]]


def embeddings(server: EngineServer, name: str, **labels: str) -> float:
    return count(server, f"{name}_total", kind="embedding", **labels)


@needs_sglang
@pytest.mark.support(
    "Families: stored embeddings equal the engine's", "{family}, {modality}", engine="sglang"
)
@pytest.mark.parametrize(
    ("family", "modality", "dtype"),
    [
        *(pytest.param(*line, "float32", id="-".join(line)) for line in LINES),
        *((*line, "bfloat16") for line in LINES),
    ],
)
def test_own_tower_stored_embeddings_equal_computed(
    family: str, modality: str, dtype: str, tmp_path: Path
) -> None:
    model = MODELS[family](tmp_path / family)
    with services(tmp_path, {"m": model}, {}) as stack:
        env = {**NO_CACHE, **trial_environment(tmp_path, (), own={modality: {family}})}
        server = stack.sglang("own", "m", "--dtype", dtype, env=env)
        stack.start(server=server)
        computed = each(server, modality, "first")
        assert embeddings(server, "hits") == 0
        stored = len(MEDIA[modality])
        # SGLang warms up with an image of its own.
        wait_until(
            lambda: embeddings(server, "saves", outcome="stored") >= stored, deadline_s=60, what="stored rows"
        )
        taken = each(server, modality, "first")
        assert embeddings(server, "hits", source="store") == stored, counters(server)
        same_answers(taken, computed)
        a_new_salt_is_computed(server, modality, computed)
        # In bfloat16 a pass over two images rounds otherwise than one over each.
        if family in PAIRED and dtype == "float32":
            two_in_one_request_are_the_same_two(server, modality)


def a_new_salt_is_computed(server: EngineServer, modality: str, computed: Sequence[Answer]) -> None:
    hits = embeddings(server, "hits")
    same_answers(each(server, modality, "second"), computed)
    assert embeddings(server, "hits") == hits
    # Else the comparison would say nothing: the model looks at its media.
    first, second = (answer.top_logprobs[0] for answer in computed)
    assert first != pytest.approx(second, abs=1e-3)


def two_in_one_request_are_the_same_two(server: EngineServer, modality: str) -> None:
    """Side by side in one pass of the tower, and one of them out of the store."""
    salts = (f"pair {i}" for i in itertools.count())
    alone, mixed = next(salts), next(salts)
    forget_prefixes(server)
    beside = ask(server, MEDIA[modality], alone)
    forget_prefixes(server)
    saves = embeddings(server, "saves", outcome="stored")
    ask(server, MEDIA[modality][1:], mixed)
    wait_until(
        lambda: embeddings(server, "saves", outcome="stored") > saves, deadline_s=60, what="a stored row"
    )
    forget_prefixes(server)
    hits = embeddings(server, "hits")
    same_answers([ask(server, MEDIA[modality], mixed)], [beside])
    assert embeddings(server, "hits") == hits + 1


def counters(server: EngineServer) -> dict[str, float]:
    """Hits, and misses by their reason: they explain a failure."""
    return {k: v for k, v in server.metrics().items() if k.startswith("cornplug_") and "_total" in k and v}


def test_validated_families_of_own_towers_have_a_line_here() -> None:
    recorded = {(family, kind.removeprefix("own ")) for *_, kind, family in VALIDATED if "own" in kind}
    assert recorded <= set(LINES)
