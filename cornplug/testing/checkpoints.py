"""Checkpoints with random weights, made on the spot: a few MB for tests, any size for timing.

Weights are drawn tensor by tensor from (seed of the part, name), so two checkpoints of one
`tower_seed` hold the same tower bit for bit whatever their language models are. Names,
configs and tokenizers are in the published form, which vLLM and SGLang load unchanged.

Greedy decoding says printable text and never stops early: the rows of `lm_head` for
special and unprintable tokens are zero, so that others always win.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cornplug.testing import tokenizers

if TYPE_CHECKING:
    import torch

TINY_CLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
CLIP_L_336: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
"""The shape of LLaVA-1.5's tower: 0.3 billion parameters, 576 rows a picture."""
TINY_QWEN2_VISION: Final[Mapping[str, Any]] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2}

_CLIP_PIXELS: Final[Mapping[str, Any]] = {
    "do_resize": True,
    "resample": 3,
    "do_center_crop": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
}
_LLAVA_CHAT: Final = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>\n"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_QWEN2_CHAT: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN2_SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Text:
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int | None
    intermediate_size: int | None
    max_positions: int

    def config(self, model_type: str, ids: Mapping[str, int]) -> dict[str, Any]:
        return {
            "model_type": model_type,
            "vocab_size": math.ceil(len(ids) / 64) * 64,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size or 2 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


def llava(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vision: Mapping[str, Any] = TINY_CLIP,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A LLaVA-1.5: CLIP tower, two-layer projector, Llama. Returns `path`.

    `vision` holds CLIPVisionConfig fields (`TINY_CLIP`, `CLIP_L_336`, or `{**TINY_CLIP, ...}`).
    The projector has `llm_seed` unless it is given one of its own. Rows a picture:
    (image_size / patch_size) squared.
    """
    folder = _folder(path)
    ids = tokenizers.write(
        folder,
        special=("<s>", "</s>", "<pad>", "<image>"),
        eos="</s>",
        pad="<pad>",
        chat_template=_LLAVA_CHAT,
    )
    text = _Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("llama", ids)
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": ids["<image>"],
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "clip_vision_model", **vision},
        "text_config": text,
        **_token_ids(ids, "<s>", "</s>", "<pad>"),
        "torch_dtype": dtype,
    }
    edge = vision["image_size"]
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        **_CLIP_PIXELS,
        "size": {"shortest_edge": edge},
        "crop_size": {"height": edge, "width": edge},
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    _write_json(folder, config=config, preprocessor_config=pixels, processor_config=processor)
    seeds = {
        "vision_tower.": tower_seed,
        "multi_modal_projector.": llm_seed if projector_seed is None else projector_seed,
        "": llm_seed,
    }
    _write_weights(folder, "LlavaForConditionalGeneration", _llava_name, seeds, ids, dtype)
    return folder


def qwen2_vl(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vision: Mapping[str, Any] = TINY_QWEN2_VISION,
    tower_seed: int = 0,
    llm_seed: int = 1,
    max_positions: int = 4096,
    max_pixels: int = 28 * 28 * 64,
    dtype: str = "float32",
) -> Path:
    """A Qwen2-VL. Returns `path`. Rows a picture: its pixels after resizing / 28 squared."""
    folder = _folder(path)
    ids = tokenizers.write(
        folder, special=_QWEN2_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=_QWEN2_CHAT
    )
    text = _Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config(
        "qwen2_vl", ids
    )
    half = hidden_size // heads // 2
    # Frequencies for time, height and width, in the published proportion of 1 : 1.5 : 1.5.
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    config = {
        **text,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
        "vision_config": {
            **{"model_type": "qwen2_vl", "in_chans": 3, "patch_size": 14, "spatial_patch_size": 14},
            **{"spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": hidden_size, **vision},
        },
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        **_token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        **{k: v for k, v in _CLIP_PIXELS.items() if k != "do_center_crop"},
        **{"min_pixels": 56 * 56, "max_pixels": max_pixels},
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    }
    _write_json(folder, config=config, preprocessor_config=pixels)
    seeds = {"visual.merger.": llm_seed, "visual.": tower_seed, "": llm_seed}
    _write_weights(folder, "Qwen2VLForConditionalGeneration", _qwen2_vl_name, seeds, ids, dtype)
    return folder


def qwen2_text(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    llm_seed: int = 1,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A Qwen2 without a tower. Returns `path`."""
    folder = _folder(path)
    ids = tokenizers.write(
        folder, special=_QWEN2_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=_QWEN2_CHAT
    )
    text = _Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("qwen2", ids)
    config = {
        **text,
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1e6,
        **_token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    _write_json(folder, config=config)
    _write_weights(folder, "Qwen2ForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    return folder


def _folder(path: Path | str) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _token_ids(ids: Mapping[str, int], bos: str, eos: str, pad: str) -> dict[str, int]:
    return {"bos_token_id": ids[bos], "eos_token_id": ids[eos], "pad_token_id": ids[pad]}


def _write_json(folder: Path, **files: Mapping[str, Any]) -> None:
    token_ids = {k: files["config"][k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {**files, "generation_config": token_ids}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))


def _llava_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.").removeprefix("vision_model.")
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    return "language_model." + name if name.startswith("lm_head.") else name


def _qwen2_vl_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def _write_weights(
    folder: Path,
    architecture: str,
    published: Callable[[str], str],
    seeds: Mapping[str, int],
    ids: Mapping[str, int],
    dtype: str,
) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # names and shapes only
        model = getattr(transformers, architecture)(config)
    tensors = {}
    for memory_name, meta in model.state_dict().items():
        name = published(memory_name)
        seed = next(seed for prefix, seed in seeds.items() if name.startswith(prefix))
        tensors[name] = _draw(name, tuple(meta.shape), seed).to(getattr(torch, dtype))
        if name.endswith("lm_head.weight"):
            tensors[name] *= _speakable(ids, meta.shape[0])[:, None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _draw(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A float32 tensor that depends on seed and name only, at a scale that keeps activations near 1."""
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    noise = torch.randn(shape, generator=generator)
    if len(shape) < 2:
        return 1 + 0.1 * noise if "norm" in name.lower() and name.endswith("weight") else 0.1 * noise
    embedding = "embed" in name and "patch" not in name
    # A gain above 1 makes attention peaked and greedy outputs depend on the whole prompt.
    return noise if embedding else 1.5 * noise / math.sqrt(math.prod(shape[1:]))


def _speakable(ids: Mapping[str, int], rows: int) -> torch.Tensor:
    import torch

    mask = torch.zeros(rows)
    mask[list(tokenizers.PRINTABLE)] = 1
    letters = [i for token, i in ids.items() if 256 <= i < len(tokenizers.vocabulary()) and token.isalpha()]
    mask[letters] = 1
    return mask
