"""One request of a class, as every model of its time sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """Sizes of one request, drawn from its class's distributions."""

    prompt_tokens: int
    """All tokens of the prompt: text, shared prefix and media."""
    cached_tokens: int
    """Of these, tokens whose KV is in a cache."""
    patches: tuple[int, ...]
    """Patches of each item that must be encoded (the others' embeddings are cached)."""
    output_tokens: int
    """At least 1: the first token comes out of prefill."""
    units: float
    """Of a generator's work; 0 where there is none."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that prefill computes: at least one, as the engines do."""
        return max(self.prompt_tokens - self.cached_tokens, 1)
