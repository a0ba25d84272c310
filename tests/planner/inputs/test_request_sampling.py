"""Draws: what adds to a prompt, and what caches take off the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornplug.planner.inputs.request_sampling import HitRates, SampledRequest, sample_requests
from cornplug.planner.inputs.schema import (
    Histogram,
    LogNormal,
    RampGeneration,
    RequestMedia,
    RequestSpec,
    SharedPrefix,
)

COLD = HitRates({}, 0.0)
PATCHES = {"vit": 4}


def _draw(n: int = 4000, hits: HitRates = COLD, seed: int = 0, **fields: Any) -> list[SampledRequest]:
    request = RequestSpec(name="r", rate=1, **fields)
    return sample_requests(request, np.random.default_rng(seed), n, patches_per_token=PATCHES, hits=hits)


def test_request_sampling_text_has_no_patches() -> None:
    assert set(_draw(10, prompt=100, output=20)) == {SampledRequest(100, 0, (), 20, 0.0)}


def test_request_sampling_media_add_tokens_and_patches() -> None:
    one = _draw(1, prompt=100, media=[RequestMedia(encoder="vit", items=3, tokens=256)])[0]
    assert one.prompt_tokens == 100 + 3 * 256
    assert one.patches == (1024, 1024, 1024)


def test_request_sampling_unknown_encoder_has_one_patch_per_token() -> None:
    assert _draw(1, media=[RequestMedia(encoder="other", tokens=50)])[0].patches == (50,)


def test_request_sampling_embedding_hit_saves_patches_not_tokens() -> None:
    media = [RequestMedia(encoder="vit", items=2, tokens=10), RequestMedia(encoder="ear", tokens=5)]
    drawn = _draw(prompt=7, media=media, hits=HitRates({"vit": 0.75}, 0.0))
    assert {d.prompt_tokens for d in drawn} == {32}
    assert np.mean([d.patches.count(40) for d in drawn]) == pytest.approx(2 * 0.25, abs=0.04)
    assert all(d.patches.count(5) == 1 for d in drawn), "the other encoder has no cache"


def test_shared_prefix_hit_covers_text_only() -> None:
    fields = {"prompt": Histogram(values=[100, 900], weights=[1, 1]), "prefix": SharedPrefix(tokens=500)}
    media = [RequestMedia(encoder="vit", tokens=256)]
    drawn = _draw(hits=HitRates({}, 0.6), media=media, **fields)
    assert {d.cached_tokens for d in drawn} == {0, 100, 500}, "never a picture's tokens"
    assert np.mean([d.cached_tokens > 0 for d in drawn]) == pytest.approx(0.6, abs=0.03)
    assert all(d.cached_tokens == 0 for d in _draw(**fields))
    assert all(d.cached_tokens == 0 for d in _draw(hits=HitRates({}, 1.0))), "no prefix, no hits"


def test_shared_prefix_of_whole_prompt_computes_one_token() -> None:
    one = _draw(1, hits=HitRates({}, 1.0), prompt=64, prefix=SharedPrefix(tokens=64))[0]
    assert (one.cached_tokens, one.computed_tokens) == (64, 1)


def test_ramp_generation_drawn_units_match_mean() -> None:
    units = [
        d.units for d in _draw(generates=RampGeneration(generator="tts", units=LogNormal(mean=8, cv=0.5)))
    ]
    assert np.mean(units) == pytest.approx(8, rel=0.05)


def test_request_sampling_empty_output_has_one_token() -> None:
    assert _draw(1, output=0)[0].output_tokens == 1


def test_request_sampling_trace_keeps_pairs_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("at_s,prompt_tokens,output_tokens\n0,1000,10\n1,2000,20\n2,3000,30\n")
    drawn = _draw(300, trace=file, media=[RequestMedia(encoder="vit", tokens=1)])
    assert {(d.prompt_tokens, d.output_tokens) for d in drawn} == {(1001, 10), (2001, 20), (3001, 30)}


def test_request_sampling_of_one_seed_is_the_same() -> None:
    fields = {"prompt": LogNormal(mean=600), "media": [RequestMedia(encoder="vit", items=2, tokens=9)]}
    assert _draw(50, seed=3, **fields) == _draw(50, seed=3, **fields) != _draw(50, seed=4, **fields)
