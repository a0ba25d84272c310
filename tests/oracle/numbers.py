"""What a deployment computes, by transformers: nothing of cornplug is asked here.

An image processor's pixels, the tower's and projector's rows, and K and V of the last layer for a prompt
with the image in it. Whatever transformers refuses is `Unusable`: no engine would start.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoImageProcessor,
    LlavaForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from devkit.checkpoints.llava import published_llava_name
from devkit.checkpoints.qwen import _flat_name

from .deployments import LENGTH, TEXT_BEFORE, Deployment, Names

PAGE: Final = 16

_CLASSES: Final[dict[str, tuple[Any, Names]]] = {
    "llava": (LlavaForConditionalGeneration, published_llava_name),
    "qwen2_vl": (Qwen2VLForConditionalGeneration, _flat_name),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, lambda name: name),
}
# What transformers raises for configs and weights that do not go together.
UNEXPECTED: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


_MOST_PIXELS: Final = 1 << 18
_MOST: Final = {
    **dict.fromkeys(("depth", "num_hidden_layers"), 8),
    **dict.fromkeys(("embed_dim", "hidden_size", "image_size", "out_hidden_size", "projection_dim"), 256),
    **dict.fromkeys(("intermediate_size", "num_position_embeddings"), 1024),
    **{"vocab_size": 4096, "patch_size": 64, "head_dim": 128},
}
"""A field that is gone from a file means the class's default, which may be a model of 7 billion."""


class Unusable(Exception):
    """transformers cannot run this deployment."""


@dataclass(frozen=True)
class Numbers:
    """Digests of values, so that thousands can be kept."""

    embedding: str
    pages: tuple[str, ...]
    """K and V of the last layer, a page each; as many as the prompt has whole pages."""
    rows: int
    """Of the embedding: how many tokens stand for the image."""


class Transformers:
    """Computes deployments; keeps the models of the configs that it saw last, for other weights."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, tuple[Any, dict[str, Any]]] = OrderedDict()

    def numbers(self, deployment: Deployment, folder: Path) -> Numbers:
        """Of the checkpoint as written in `folder`. Raises Unusable."""
        try:
            with torch.no_grad():
                return self._numbers(deployment, folder)
        except UNEXPECTED as e:
            raise Unusable(f"{type(e).__name__}: {e}"[:300]) from e

    def _numbers(self, deployment: Deployment, folder: Path) -> Numbers:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        asked = {**deployment.processor_kwargs, **deployment.options}
        pixels = dict(processor(images=deployment.image, return_tensors="pt", **asked))
        if pixels["pixel_values"].numel() > _MOST_PIXELS:
            raise Unusable("an image larger than this is meant for")
        model = self._model(deployment)
        dtype = getattr(torch, deployment.dtype)
        pixels["pixel_values"] = pixels["pixel_values"].to(dtype)
        pixels = {name: value for name, value in pixels.items() if name in ("pixel_values", "image_grid_thw")}
        features = model.model.get_image_features(**pixels)
        rows = torch.cat([row.reshape(-1, row.shape[-1]) for row in features.pooler_output])
        more = list(getattr(features, "deepstack_features", None) or ())
        _set_rope(model, deployment.max_model_len)
        image = getattr(model.config, "image_token_id", None)
        if not isinstance(image, int) or len(rows) > LENGTH:
            raise Unusable("no token for images, or an image of too many tokens")
        tokens = [*deployment.tokens[:TEXT_BEFORE], *[image] * len(rows), *deployment.tokens[TEXT_BEFORE:]]
        model.model.get_image_features = lambda *_args, **_kwargs: features
        try:
            ids = torch.tensor([tokens])
            # transformers 5 tells images from text by the processor's marks.
            marks = {"mm_token_type_ids": (ids == image).int()} if "image_grid_thw" in pixels else {}
            cache = model.model(input_ids=ids, use_cache=True, **pixels, **marks).past_key_values
        finally:
            del model.model.get_image_features
        last = cache.layers[-1]
        if not all(torch.isfinite(part).all() for part in (rows, last.keys, last.values)):
            # What is masked counts in a sum where it is no number, here as in some kernels.
            raise Unusable("values that are no numbers")
        whole = len(tokens) // PAGE
        pages = tuple(
            _digest([part[:, :, i * PAGE : (i + 1) * PAGE] for part in (last.keys, last.values)])
            for i in range(whole)
        )
        return Numbers(_digest([rows, *more]), pages, len(rows))

    def _model(self, deployment: Deployment) -> Any:
        """With this deployment's weights in it, until the next call."""
        kind, published = _CLASSES[deployment.family]
        config = updated(deployment.config, deployment.hf_overrides)
        if config.get("model_type") != deployment.family or config.get("architectures") != [kind.__name__]:
            raise Unusable("another class")
        key = json.dumps([config, deployment.dtype], sort_keys=True)
        if key not in self._models:
            made = CONFIG_MAPPING[deployment.family](**json.loads(json.dumps(config)))
            _check_sizes(made)
            with no_init_weights():
                model = kind(made).to(getattr(torch, deployment.dtype)).eval()
            self._models[key] = model, {}
            if len(self._models) > 8:
                # The first three are the families' own, which most cases share.
                self._models.pop(list(self._models)[3])
        model, loaded = self._models[key]
        weights = _merged(deployment)
        own = model.state_dict()
        for name, target in own.items():
            source = weights[published(name)]
            # An object stands for its values: no case changes a tensor in place.
            if loaded.get(name) is not source:
                if source.shape != target.shape:
                    raise Unusable(f"{name}: {tuple(source.shape)} for {tuple(target.shape)}")
                target.copy_(source)
                loaded[name] = source
        return model


def _check_sizes(config: Any) -> None:
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, most in _MOST.items():
            value = getattr(part, name, 0)
            if isinstance(value, int) and value > most:
                raise Unusable(f"{name} {value}: a model larger than this is meant for")


def _set_rope(model: Any, max_model_len: int) -> None:
    """Rotary frequencies as engines have them: they decide once, by the longest sequence allowed, what
    transformers decides by each sequence."""
    rotary = model.model.language_model.rotary_emb
    config = model.model.language_model.config
    if config.rope_parameters.get("rope_type") == "longrope":
        frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=max_model_len)
        rotary.rope_type, rotary.inv_freq, rotary.attention_scaling = "default", frequencies, scale


def _merged(deployment: Deployment) -> dict[str, torch.Tensor]:
    """The weights, with the adapter's products added where there is one."""
    weights = dict(deployment.tensors)
    if deployment.adapter is None:
        return weights
    tensors, config = deployment.adapter
    scale = config["lora_alpha"] / config["r"]
    for name, a in tensors.items():
        if ".lora_A." in name:
            of = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            weights[of] = weights[of] + scale * (b @ a)
    return weights


def updated(config: Any, overrides: Any) -> Any:
    """A config with an operator's overrides laid over it, nested ones too."""
    if not isinstance(config, dict) or not isinstance(overrides, dict):
        return overrides
    return {**config, **{key: updated(config.get(key), value) for key, value in overrides.items()}}


def _flat(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    else:
        for value in values:
            yield from _flat(value)


def _digest(values: Any) -> str:
    h = hashlib.sha256()
    for tensor in _flat(values):
        plain = tensor.detach().contiguous()
        h.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        # Zero has two forms, and no sum that follows tells them apart.
        h.update((plain.float() + 0.0).numpy().tobytes())
    return h.hexdigest()
