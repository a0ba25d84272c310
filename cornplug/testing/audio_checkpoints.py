"""Tiny audio models: Whisper towers under small language models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cornplug.testing import tokenizers
from cornplug.testing.checkpoint_parts import Text, make_folder, token_ids, write_json, write_weights

TINY_WHISPER: Final[Mapping[str, Any]] = {
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 64,
}
_QWEN2_AUDIO_SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>",
)  # fmt: skip
_QWEN2_AUDIO_CHAT: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] in ('audio', 'audio_url') %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FRAMES_A_SECOND: Final = 100


def qwen2_audio(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    audio: Mapping[str, Any] = TINY_WHISPER,
    seconds: int = 30,
    tower_seed: int = 0,
    llm_seed: int = 1,
    max_positions: int = 4096,
    config: Mapping[str, Any] = MappingProxyType({}),
    dtype: str = "float32",
) -> Path:
    """A Qwen2-Audio. Returns `path`. Rows a sound: a quarter of its mel frames, 25 a second.

    `audio` holds Qwen2AudioEncoderConfig fields. `seconds` is the tower's context: 30 as
    published, which vLLM wants; less makes faster tests. `config` overrides fields of config.json.
    """
    folder = make_folder(path)
    ids = tokenizers.write(
        folder,
        special=_QWEN2_AUDIO_SPECIAL,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=_QWEN2_AUDIO_CHAT,
    )
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("qwen2", ids)
    whole = {
        "model_type": "qwen2_audio",
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "audio_token_index": ids["<|AUDIO|>"],
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "max_source_positions": seconds * FRAMES_A_SECOND // 2,
            **audio,
        },
        "text_config": text,
        "tie_word_embeddings": False,
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
        **config,
    }
    extractor = mel_json(audio["num_mel_bins"], seconds) | {"processor_class": "Qwen2AudioProcessor"}
    write_json(folder, config=whole, preprocessor_config=extractor)
    seeds = {"audio_tower.": tower_seed, "multi_modal_projector.": llm_seed, "": llm_seed}
    write_weights(folder, "Qwen2AudioForConditionalGeneration", _qwen2_audio_name, seeds, ids, dtype)
    return folder


def mel_json(bins: int, seconds: int = 30) -> dict[str, Any]:
    """preprocessor_config.json of a WhisperFeatureExtractor, as published."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": bins,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": seconds,
        "n_fft": 400,
        "n_samples": 16_000 * seconds,
        "nb_max_frames": FRAMES_A_SECOND * seconds,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }


def _qwen2_audio_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    return "language_model." + name if name.startswith("lm_head.") else name
