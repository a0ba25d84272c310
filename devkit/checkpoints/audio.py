"""Tiny audio models: Whisper towers under small language models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.parts import (
    Text,
    make_folder,
    nested_llm_name,
    token_ids,
    write_json,
    write_tensors,
    write_weights,
)

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
_ULTRAVOX_CHAT: Final = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] in ('audio', 'audio_url') %}<|audio|>\n"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
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
    """A Qwen2-Audio. Returns `path`. Rows per audio: a quarter of its mel frames, 25 a second.

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
    write_weights(folder, "Qwen2AudioForConditionalGeneration", nested_llm_name, seeds, ids, dtype)
    return folder


def ultravox(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    audio: Mapping[str, Any] = TINY_WHISPER,
    seconds: int = 30,
    base: Path | str | None = None,
    tower_seed: int = 0,
    llm_seed: int = 1,
    max_positions: int = 4096,
    config: Mapping[str, Any] = MappingProxyType({}),
    dtype: str = "float32",
) -> Path:
    """An Ultravox v0.5. Returns `path`. Rows per audio: a sixteenth of its mel frames.

    With `base` the tower is not in it but in a Whisper, written there unless it is there already.
    `audio` holds WhisperConfig fields; else as `qwen2_audio`.
    """
    folder = make_folder(path)
    ids = tokenizers.write(
        folder,
        special=("<s>", "</s>", "<pad>", "<|audio|>"),
        eos="</s>",
        pad="<pad>",
        chat_template=_ULTRAVOX_CHAT,
    )
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("llama", ids)
    whisper = {
        "model_type": "whisper",
        "max_source_positions": seconds * FRAMES_A_SECOND // 2,
        **audio,
        **{"decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 16, "vocab_size": 64},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    }
    whole = {
        "model_type": "ultravox",
        "architectures": ["UltravoxModel"],
        "audio_token_index": ids["<|audio|>"],
        "vocab_size": text["vocab_size"],
        "hidden_size": 4 * hidden_size,
        **{"stack_factor": 8, "projector_act": "swiglu", "projector_ln_mid": True},
        **({"audio_config": whisper} if base is None else {"audio_model_id": str(base)}),
        "text_config": text,
        **token_ids(ids, "<s>", "</s>", "<pad>"),
        "torch_dtype": dtype,
        **config,
    }
    extractor = mel_json(audio["num_mel_bins"], seconds)
    tower, rest = _ultravox_shapes(whole, whisper)
    seeds = {"audio_tower.": tower_seed, "": llm_seed}
    if base is None:
        write_json(folder, config=whole, preprocessor_config=extractor)
        write_tensors(folder, tower | rest, seeds, ids, dtype)
        return folder
    write_json(folder, config=whole)
    write_tensors(folder, rest, seeds, ids, dtype)
    if not (Path(base) / "config.json").exists():
        whisper_folder = make_folder(base)
        write_json(
            whisper_folder,
            config={**whisper, "architectures": ["WhisperForConditionalGeneration"]},
            preprocessor_config=extractor,
        )
        decoder = {"model.decoder.layer_norm.weight": (audio["d_model"],)}
        write_tensors(whisper_folder, tower | decoder, seeds, ids, dtype, stored=_in_whisper)
    return folder


def whisper(path: Path | str, *, seed: int = 0, dtype: str = "float32") -> Path:
    """A Whisper, an encoder-decoder. Returns `path`. A prompt has 448 positions, as published."""
    folder = make_folder(path)
    special = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    ids = tokenizers.write(
        folder, special=special, eos="<|endoftext|>", pad="<|endoftext|>", chat_template=_ULTRAVOX_CHAT
    )
    whole = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        **TINY_WHISPER,
        **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 128},
        "vocab_size": len(ids),
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        **token_ids(ids, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    extractor = mel_json(TINY_WHISPER["num_mel_bins"]) | {"processor_class": "WhisperProcessor"}
    write_json(folder, config=whole, preprocessor_config=extractor)
    write_weights(folder, "WhisperForConditionalGeneration", lambda name: name, {"": seed}, ids, dtype)
    return folder


def _in_whisper(name: str) -> str:
    return name.replace("audio_tower.", "model.encoder.", 1)


Shapes = dict[str, tuple[int, ...]]


def _ultravox_shapes(config: Mapping[str, Any], whisper: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
    """Published names and shapes of the tower, and of all the rest."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    with torch.device("meta"):
        encoder = WhisperEncoder(WhisperConfig(**whisper))
        llm = LlamaForCausalLM(LlamaConfig(**config["text_config"]))
    stacked = whisper["d_model"] * config["stack_factor"]
    hidden, out = config["hidden_size"], config["text_config"]["hidden_size"]
    middle = hidden // 2 if config["projector_act"] == "swiglu" else hidden
    norm = {"ln_mid": (middle,)} if config["projector_ln_mid"] else {"ln_post": (out,)}
    projector = {"ln_pre": (stacked,), "linear_1": (hidden, stacked), "linear_2": (out, middle), **norm}
    return {f"audio_tower.{name}": tuple(t.shape) for name, t in encoder.state_dict().items()}, {
        **{f"multi_modal_projector.{name}.weight": shape for name, shape in projector.items()},
        **{f"language_model.{name}": tuple(t.shape) for name, t in llm.state_dict().items()},
    }


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
