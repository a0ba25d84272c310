"""A byte-level tokenizer that needs no download: bytes, pairs of lower-case letters, specials."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Final

PRINTABLE: Final = range(0x20, 0x7F)
"""Bytes that a tiny model may say, so that its output is readable text."""


def vocabulary() -> dict[str, int]:
    """Token -> id: 256 bytes at their own value (in byte-level BPE's alphabet), then 676 pairs."""
    alphabet = [chr(b) if _is_plain(b) else "" for b in range(256)]
    spare = iter(range(256, 512))
    symbols = [symbol or chr(next(spare)) for symbol in alphabet]
    pairs = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    return {token: i for i, token in enumerate(symbols + pairs)}


def write(
    folder: Path, *, special: Sequence[str], eos: str, pad: str, chat_template: str
) -> Mapping[str, int]:
    """Write tokenizer.json, its config and the chat template; ids of all tokens, specials last."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = vocabulary()
    merges = [(a, b) for a in ascii_lowercase for b in ascii_lowercase]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(chat_template)
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids


def _is_plain(byte: int) -> bool:
    """Whether byte-level BPE writes this byte as itself (GPT-2's bytes_to_unicode)."""
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
