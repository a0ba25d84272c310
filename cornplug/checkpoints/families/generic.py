"""Any family that has no file here: whatever it is, its identity needs no names.

    all tensors outside the decoder ─┐
    the whole config.json ───────────┼─> identity
    every processor's JSON ──────────┤
    versions of the code ────────────┘
transformers' own class computes it (`cornplug.encoder_service.towers.generic`). It gets only the tensors that
count here, so that no other one can change a row. Too much counts rather than too little: a miss, never a
wrong row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from cornplug.checkpoints.families.family import Json, ModelFamily, Spec

PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
)
"""Files of a checkpoint that a transformers processor reads settings from."""
_CODE: Final = ("transformers", "torchvision", "timm")
"""Packages with the code of towers and processors."""
_UNREAD_CONFIG: Final = (
    "_name_or_path",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
"""Of config.json: the service chooses the dtype, and `Checkpoint` counts a quantised tower by itself."""
_UNREAD_TOKENIZER: Final = ("chat_template", "name_or_path")
_DECODER: Final = re.compile(
    r"(^|\.)(language_model|text_model|llm|lm_head|embed_tokens)\."
    r"|^(thinker\.)?(model\.)?(layers\.\d+|norm)\."
    r"|^(talker|token2wav|code2wav|mtp)\."
)


def is_decoder(name: str) -> bool:
    """Whether a tensor of this published name is the decoder's or its head's.

    Of an unknown decoder the tensors count as the tower's: the identity then changes with them.
    """
    return _DECODER.search(name) is not None


def generic_family(config: Json, image_processor: Json) -> ModelFamily | None:
    """The family of a checkpoint that no file here describes; None for one that takes no images.

    `image_processor` is the JSON of its image processor.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or "image_processor_type" not in image_processor:
        return None
    return _named(name)


@cache
def _named(name: str) -> ModelFamily:
    return ModelFamily(
        name=name,
        tower_class="generic:GenericArchitecture",
        inputs={"image": ()},
        tower_prefixes=(),
        projector_prefixes=(),
        language_model_prefixes=(),
        shares_features=False,
        tower_spec=_tower,
        projector_spec=lambda config: {},
        preprocess_spec=dict,
        before_cut=lambda config, tensor: not is_decoder(tensor),
        generic=True,
    )


def _tower(config: Json) -> Spec:
    # The decoder's config counts too: some families scale rows by its width.
    return {"config": {k: v for k, v in config.items() if k not in _UNREAD_CONFIG}, "code": _versions()}


@cache
def _versions() -> Spec:
    found: Spec = {}
    for package in _CODE:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def processor_spec(files: Mapping[str, Json]) -> Spec:
    """Every setting of a checkpoint's processors, out of the contents of `PROCESSOR_FILES`."""
    return {
        name: {
            k: v for k, v in content.items() if name != "tokenizer_config.json" or k not in _UNREAD_TOKENIZER
        }
        for name, content in files.items()
    }
