"""Names of the rules by which engines decode an image to pixels (`media.image`).

Releases of an engine may decode images differently, so the service decodes each image in the same way as the
engine that will use the embedding. Does not need torch.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Decoding = Literal["vllm-0.32", "vllm-0.33", "sglang-0.5.23"]
"""Decoding rule of an engine, named after the release that introduced it."""
DECODINGS: Final[tuple[Decoding, ...]] = get_args(Decoding)
DEFAULT: Final[Decoding] = "vllm-0.33"
"""Rule for requests to the HTTP API that do not set a rule."""
HEADER: Final = "x-cornplug-decoding"
"""HTTP header that sets the rule for all images of a request."""

_RELEASES: Final[tuple[tuple[str, str, Decoding], ...]] = (
    ("vllm", "0.32.", "vllm-0.32"),
    ("vllm", "0.33.", "vllm-0.33"),
    ("sglang", "0.5.23", "sglang-0.5.23"),
)


def decoding_of(engine: str, version: str) -> Decoding | None:
    """Return the rule of a release of "vllm" or "sglang", or None for a release that is not listed."""
    return next((d for e, start, d in _RELEASES if e == engine and version.startswith(start)), None)


def known(name: str) -> Decoding | None:
    """Return the rule with this name, or None."""
    return next((d for d in DECODINGS if d == name), None)
