"""What the checkpoints of `checkpoints` are made of: text config, chat template, JSON files, weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from devkit import tokenizers

if TYPE_CHECKING:
    import torch

QWEN2_CHAT: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

CLIP_PIXELS: Final[Mapping[str, Any]] = {
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


@dataclass(frozen=True, slots=True)
class Text:
    """A language model's size; `None` stands for as many KV heads as heads, and twice the width."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int | None
    intermediate_size: int | None
    max_positions: int

    def config(self, model_type: str, ids: Mapping[str, int]) -> dict[str, Any]:
        """config.json's fields that all families have, for a vocabulary of `ids` rounded up to 64."""
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


def make_folder(path: Path | str) -> Path:
    """`path`, made if need be."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def qwen2_tokenizer(folder: Path) -> Mapping[str, int]:
    """Write the tokenizer that every Qwen2 here has; its vocabulary."""
    return tokenizers.write(
        folder, special=QWEN2_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=QWEN2_CHAT
    )


def nested_llm_name(name: str) -> str:
    """transformers 5's name in memory -> the one published where an LLM lies below `language_model.`."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    return "language_model." + name if name.startswith("lm_head.") else name


def token_ids(ids: Mapping[str, int], bos: str, eos: str, pad: str) -> dict[str, int]:
    """config.json's ids of three special tokens."""
    return {"bos_token_id": ids[bos], "eos_token_id": ids[eos], "pad_token_id": ids[pad]}


def write_json(folder: Path, **files: Mapping[str, Any]) -> None:
    """`config` and other `files`, and a generation_config.json with the special tokens of `config`."""
    special = {k: files["config"][k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {**files, "generation_config": special}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))


def write_weights(
    folder: Path,
    architecture: str,
    published: Callable[[str], str],
    seeds: Mapping[str, int],
    ids: Mapping[str, int],
    dtype: str,
    *,
    turned: str | None = None,
) -> None:
    """model.safetensors with the tensors of transformers' `architecture` for the folder's config.

    `published` turns a name in memory into the one on the hub. `seeds`: the first prefix that fits counts.
    `turned`: part of the names of tensors whose last two dimensions are the other way round on the hub.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # names and shapes only
        model = getattr(transformers, architecture)(config)
    shapes = {
        published(name): tuple(meta.mT.shape if turned and turned in name else meta.shape)
        for name, meta in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    write_tensors(folder, shapes, seeds, ids, dtype)


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    seeds: Mapping[str, int],
    ids: Mapping[str, int],
    dtype: str,
    *,
    stored: Callable[[str], str] = lambda name: name,
) -> None:
    """model.safetensors with tensors drawn for these names and shapes, each under its `stored` name."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, shape in shapes.items():
        seed = next(seed for prefix, seed in seeds.items() if name.startswith(prefix))
        tensor = draw(name, shape, seed).to(getattr(torch, dtype))
        if name.endswith("lm_head.weight"):
            tensor *= _speakable(ids, shape[0])[:, None]
        tensors[stored(name)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def draw(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
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
    end = len(tokenizers.vocabulary())
    letters = [i for token, i in ids.items() if 256 <= i < end and token.isalpha()]
    mask[letters] = 1
    return mask
