"""Tiny checkpoints of any model_type that transformers knows, with a processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.parts import Text, draw, make_folder, token_ids

TINY_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_TINY: Final[Mapping[str, Mapping[str, Any]]] = {
    "vision_config": TINY_VISION,
    "audio_config": {"num_mel_bins": 80},
}
_SPECIAL: Final = ("<s>", "</s>", "<pad>")
_PLACEHOLDERS: Final = ("image_token", "video_token", "audio_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyFamily:
    """One model_type: what differs from Llama's decoder, `TINY_VISION`, and a processor without settings."""

    vision: Mapping[str, Any] | None = field(default_factory=dict)
    """None: it has no such tower."""
    audio: Mapping[str, Any] | None = None
    text: Mapping[str, Any] = field(default_factory=lambda: {"model_type": "llama"})
    config: Mapping[str, Any] = field(default_factory=dict)
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[str] = ("<image>",)
    """Special tokens; the first stands for an image."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer, such as `image_token`."""
    token_fields: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Fields of config.json -> the token or tokens whose ids they hold."""
    nested: str = ""
    """Field of config.json that holds all but `outer`; "" for a flat one."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[str, ...] = ("image",)
    """The modalities that the encoder service serves."""


def any_family(
    path: Path | str,
    model_type: str,
    made_of: AnyFamily,
    *,
    tower_seed: int = 0,
    audio_seed: int = 0,
    llm_seed: int = 1,
) -> Path:
    """A checkpoint of that type, as transformers saves it, in float32. Returns `path`."""
    import torch
    import transformers

    folder = make_folder(path)
    named = {f"{made_of.media[0]}_token": made_of.tokens[0], **made_of.named_tokens}
    special = tuple(dict.fromkeys((*_SPECIAL, *made_of.tokens, *named.values())))
    ids = tokenizers.write(folder, special=special, eos="</s>", pad="<pad>", chat_template="")
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "tokenizer_config.json", {"bos_token": "<s>", "extra_special_tokens": named})
    text = Text(64, 2, 2, None, None, 4096).config("llama", ids)
    places = {name: ids[token] for name, token in named.items() if name in _PLACEHOLDERS}
    more: dict[str, Any] = {
        name: ids[tokens] if isinstance(tokens, str) else [ids[token] for token in tokens]
        for name, tokens in made_of.token_fields.items()
    }
    towers = {"vision_config": made_of.vision, "audio_config": made_of.audio}
    whole: dict[str, Any] = {
        **{f"{name}_{form}": place for name, place in places.items() for form in ("id", "index")},
        **{name: {**_TINY[name], **tower} for name, tower in towers.items() if tower is not None},
        "text_config": {**text, **token_ids(ids, "<s>", "</s>", "<pad>"), **made_of.text},
        **token_ids(ids, "<s>", "</s>", "<pad>"),
        "tie_word_embeddings": False,
        **more,
        **made_of.config,
    }
    whole = {made_of.nested: whole} if made_of.nested else whole
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **whole, **made_of.outer}))
    config = transformers.AutoConfig.from_pretrained(folder)
    known = type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    kind = transformers.AutoModelForMultimodalLM if known else transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(config)
    inner = getattr(model, made_of.nested.removesuffix("_config")) if made_of.nested else model
    decoder = {id(tensor) for tensor in inner.get_decoder().parameters()}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(
                draw(
                    name,
                    tuple(tensor.shape),
                    llm_seed
                    if id(tensor) in decoder or "lm_head" in name
                    else audio_seed
                    if "audio" in name
                    else tower_seed,
                )
            )
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made_of.image_processor))
    (folder / "processor_config.json").write_text(json.dumps(made_of.processor))
    return folder


def _edit(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
