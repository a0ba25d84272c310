"""Prompt of a request as a chain of hashes, one per step of bytes. It indicates which engine may have its KV.

The hashes only select an engine. The engine's own keys decide which KV is valid, so a wrong guess only costs
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash

STEP_BYTES: Final = 512
STEP_TOKENS: Final = 128
"""Tokens of one step, with four bytes of text per token."""
_MEDIUM_STEPS: Final = 2
"""Number of steps that represent one image, audio clip or video."""
_HEAD: Final = ("model", "cache_salt", "tools", "chat_template_kwargs")
"""Fields that change the first tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Hashes of a prompt's first 1, 2, ... steps."""

    steps: tuple[int, ...]
    conversation: bytes
    """Digest of the prompt up to the user's first message, which is the same in all turns of a
    conversation."""
    tokens: int
    """Estimated tokens of the whole prompt."""


NO_PREFIX: Final = PromptPrefix((), b"", 0)
"""Prefix of a request without a prompt."""


def prompt_prefix(body: Mapping[str, Any]) -> PromptPrefix:
    """Return the prefix of the body of a chat or completion request."""
    head = _bytes({name: body[name] for name in _HEAD if body.get(name) is not None})
    parts, first = [head], None
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else [body.get("prompt")]:
        parts.append(_bytes(_short(message)))
        if first is None and (not isinstance(message, dict) or message.get("role") == "user"):
            first = len(parts)
    conversation = xxhash.xxh3_128_digest(b"".join(parts[:first])[: 64 * STEP_BYTES])
    text = b"".join(parts)
    return PromptPrefix(tuple(_chain(text)), conversation, -(-len(text) * STEP_TOKENS // STEP_BYTES))


def _chain(text: bytes) -> Iterator[int]:
    running = xxhash.xxh3_64()
    for start in range(0, len(text) - STEP_BYTES + 1, STEP_BYTES):
        running.update(text[start : start + STEP_BYTES])
        yield running.intdigest()


def _bytes(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _short(value: Any) -> Any:
    """Replace each medium by a digest with the length of `_MEDIUM_STEPS`."""
    if isinstance(value, str) and value.startswith("data:"):
        return xxhash.xxh3_128_hexdigest(value.encode()) * (_MEDIUM_STEPS * STEP_BYTES // 32)
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, dict):
        if isinstance(sound := value.get("input_audio"), dict) and isinstance(sound.get("data"), str):
            return {**value, "input_audio": _short(f"data:{sound['data']}")}
        return {name: _short(one) for name, one in value.items()}
    return value
