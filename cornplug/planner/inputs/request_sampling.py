"""Sampling of requests from the length distributions or the trace of a request class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs import length_distributions, traces
from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.inputs.schema import RequestMedia, RequestSpec


@dataclass(frozen=True)
class HitShares:
    """Hit rates of the caches that the samples assume."""

    embedding: Mapping[str, float]
    """Encoder -> fraction of its items whose embedding is cached. The default for other encoders is 0."""
    prefix: float
    """Fraction of requests whose shared prefix is cached."""


def sample_requests(
    request: RequestSpec,
    rng: np.random.Generator,
    n: int,
    *,
    patches_per_token: Mapping[str, int],
    hits: HitShares,
) -> list[SampledRequest]:
    """Draw `n` requests. The tokens of media items are part of the prompt, whether or not the items'
    embeddings are cached.

    `patches_per_token` is by encoder, with a default of 1. The shared prefix is at the start of the prompt's
    text, so after a hit at most the text's KV is cached. Raises ConfigError as `traces.read` does.
    """
    text, output = _text_and_output(request, rng, n)
    tokens = text.copy()
    patches: list[list[int]] = [[] for _ in range(n)]
    for media in request.media:
        per_token = patches_per_token.get(media.encoder, 1)
        hit_rate = hits.embedding.get(media.encoder, 0.0)
        owner, item_tokens = _items(media, rng, n)
        np.add.at(tokens, owner, item_tokens)
        missed = rng.random(len(owner)) >= hit_rate
        for i, size in zip(owner[missed].tolist(), (item_tokens[missed] * per_token).tolist(), strict=True):
            patches[i].append(size)
    cached = _cached(request, rng, text, hits.prefix)
    units = length_distributions.sample(request.generates.units, rng, n) if request.generates else np.zeros(n)
    return [
        SampledRequest(prompt_tokens, cached_tokens, tuple(items), output_tokens, float(work))
        for prompt_tokens, cached_tokens, items, output_tokens, work in zip(
            tokens.tolist(), cached.tolist(), patches, output.tolist(), units.tolist(), strict=True
        )
    ]


def _text_and_output(
    request: RequestSpec, rng: np.random.Generator, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if request.trace is None:
        return (
            length_distributions.sample(request.prompt, rng, n),
            np.maximum(length_distributions.sample(request.output, rng, n), 1),
        )
    trace = traces.read(request.trace, request.trace_format)
    # Use both lengths of the same recorded request, because prompt and output may be correlated.
    rows = rng.integers(len(trace.at_s), size=n)
    return trace.prompt_tokens[rows], trace.output_tokens[rows]


def _items(
    media: RequestMedia, rng: np.random.Generator, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the media items of `n` requests. Returns two arrays with an entry for each item: the index of the
    item's request, and the item's number of tokens."""
    owner = np.repeat(np.arange(n), length_distributions.sample(media.items, rng, n))
    return owner, length_distributions.sample(media.tokens, rng, len(owner))


def _cached(
    request: RequestSpec, rng: np.random.Generator, text: NDArray[np.int64], hit_rate: float
) -> NDArray[np.int64]:
    if request.prefix is None:
        return np.zeros_like(text)
    shared = np.minimum(text, request.prefix.tokens)
    return np.where(rng.random(len(text)) < hit_rate, shared, 0)
