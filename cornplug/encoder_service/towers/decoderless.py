"""Loads transformers' own model for a checkpoint, without the decoder, for which no memory is allocated.

    config.json ──transformers' class, on the meta device──> decoder, head, other modalities' tower replaced
                                                                 └─ filled with the tower's tensors only
Only the tensors that the tower's fingerprint covers are loaded. A tower that needs other tensors is refused.
A change of those tensors would change embeddings but not their keys.

`DecoderRecorder` replaces the decoder. It ends the forward pass and returns the rows that the decoder would
receive:

    whole model's forward ──> token embeddings ──the item's rows put in──> decoder
                                   (a mark)                                   └─ raises DecoderReached(rows)
The rows of a media item are therefore read at the decoder's input, after everything that the family's code
does with them. All token embeddings have a value that no tower computes. The positions with other values
therefore belong to the media item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality
from cornplug.checkpoints.generic_family import NESTED_CONFIG_FIELD, is_other_modality
from cornplug.encoder_service.towers.base import format_names
from cornplug.errors import CheckpointError

DEEPSTACK_ARGUMENT: Final = "deepstack_visual_embeds"
"""Name of a decoder's argument for outputs of several tower layers. The decoder adds them to the outputs of
its own first layers."""
_POSITION_ARGUMENTS: Final = frozenset({"attention_mask", "position_ids"})
"""Names of a decoder's arguments that describe positions of rows, not their content."""
TRANSFORMERS_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""Errors that transformers raises for a config or a processor that it does not support."""
UNSUPPORTED_HINT: Final = (
    'Serve another model, or describe the family (CONTRIBUTING.md, "Add a model family").'
)
_LOADABLE_DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.bool,
)
_NESTED_PREFIX: Final = f"{NESTED_CONFIG_FIELD.removesuffix('_config')}."
"""Prefix of tensor names in the model that `NESTED_CONFIG_FIELD` describes."""


class DecoderReached(Exception):
    """Raised instead of running the decoder, to end a model's forward pass."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__("the decoder was reached")
        self.rows = rows
        """Rows of the media item in the order of the prompt, of shape (rows, width). Deepstack levels are
        concatenated along the width.
        """


class TokenMark(nn.Module):
    """Module that replaces token embeddings. Each element of its output is
    the most negative finite value of the dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width = width
        self.dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """Weight of an embedding for up to 2**24 tokens. It is an expanded tensor that takes no memory."""
        return self._filled_tensor(1).expand(1 << 24, self._width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding of each token, of shape (*ids.shape, width)."""
        return self._filled_tensor(*ids.shape, self._width, device=ids.device)

    def _filled_tensor(self, *shape: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.full(shape, torch.finfo(self.dtype).min, dtype=self.dtype, device=device)


class DecoderRecorder(nn.Module):
    """Module that replaces a decoder, and raises `DecoderReached` when it is called.

    Raises CheckpointError("unknown_family") if the decoder needs more data about a media item than rows in
    the prompt and deepstack levels at the same positions.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = TokenMark(width, dtype)

    def get_input_embeddings(self) -> nn.Module:
        """Return the module that replaces the token embeddings."""
        return self.embed_tokens

    def get_decoder(self) -> nn.Module:
        """Return itself."""
        return self

    def get_per_layer_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Some models call this method of their decoder to look up additional inputs for
        tokens."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> None:
        if inputs_embeds is None or inputs_embeds.shape[0] != 1:
            raise CheckpointError("the decoder does not accept embeddings", reason="unknown_family")
        levels, places = kwargs.pop(DEEPSTACK_ARGUMENT, None) or (), kwargs.pop("visual_pos_masks", None)
        more = [
            name
            for name, value in kwargs.items()
            if name not in _POSITION_ARGUMENTS and any(_float_flags(value))
        ]
        if more:
            raise CheckpointError(
                f"the decoder also needs {', '.join(more)} for a medium, not only rows",
                reason="unknown_family",
            )
        marked = (inputs_embeds[0] == torch.finfo(inputs_embeds.dtype).min).all(-1)
        if not bool(marked.any()) or bool(marked.all()):
            raise CheckpointError(
                "rows of media cannot be distinguished from embeddings of tokens", reason="unknown_family"
            )
        rows = inputs_embeds[0, ~marked]
        if levels and not (
            all(level.shape == rows.shape for level in levels)
            and isinstance(places, torch.Tensor)
            and torch.equal(places.reshape(-1), ~marked)
        ):
            raise CheckpointError("the deepstack levels do not match the rows", reason="unknown_family")
        raise DecoderReached(torch.cat([rows, *(level.to(rows.dtype) for level in levels)], dim=-1))


class RemovedModule(nn.Module):
    """Module that replaces a part of the model that this tower does not need. A call of the module raises
    CheckpointError."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise CheckpointError(
            "this tower needs a part of the model for another modality", reason="unknown_family"
        )


def _float_flags(value: Any) -> Iterator[bool]:
    """Yield, for each tensor in a nested value, whether it is floating-point."""
    if isinstance(value, torch.Tensor):
        yield value.is_floating_point()
    elif isinstance(value, Mapping):
        yield from (found for part in value.values() for found in _float_flags(part))
    elif isinstance(value, list | tuple):
        yield from (found for part in value for found in _float_flags(part))


def model_class(checkpoint: Checkpoint) -> tuple[type[transformers.PreTrainedModel], Any]:
    """Return transformers' multimodal class for this checkpoint's model_type, and the checkpoint's config.

    Raises CheckpointError("unknown_family") if transformers has no multimodal class for the model_type, and
    CheckpointError("bad_config") if config.json cannot be read.
    """
    kind, path = checkpoint.family.name, checkpoint.path
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = getattr(config, NESTED_CONFIG_FIELD, config)
        mappings = (
            transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
            transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        )
        found = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    except TRANSFORMERS_ERRORS as e:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot read config.json of model_type "
            f"{kind!r}: {e}. A checkpoint's own code is never run.",
            reason="bad_config",
        ) from e
    if found is None:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} has no model of images or audio, and text, for "
            f"model_type {kind!r}. {UNSUPPORTED_HINT}",
            reason="unknown_family",
        )
    return found, config


def load_without_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, modality: Modality = "image"
) -> transformers.PreTrainedModel:
    """Load the model with the tower of a modality, in eval mode. On the device "meta" it has no weights.

    Raises the same errors as `model_class`. Raises CheckpointError("unknown_family") if decoder and tower
    cannot be separated, ("bad_tensors") with the names of tensors that are missing, quantised or of another
    shape, or ("unreadable").
    """
    found, config = model_class(checkpoint)
    hollow = _decoderless_class(
        found, modality, lambda: DecoderRecorder(hidden_size(checkpoint, config), dtype)
    )
    transformers.logging.disable_progress_bar()  # the service logs each step itself
    config.quantization_config = None
    # It concerns only the decoder. `_read_tower_tensors` rejects a quantised tower.
    del config.quantization_config
    try:
        if device.type == "meta":
            with device:
                return hollow(config).eval().requires_grad_(False)
        model, info = hollow.from_pretrained(
            None,
            config=config,
            state_dict=_read_tower_tensors(checkpoint, modality),
            dtype=dtype,
            # Do not use the implementation named in config.json, which may be a kernel from the hub.
            attn_implementation="sdpa" if found._supports_sdpa else "eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below
        )
    except TRANSFORMERS_ERRORS as e:
        raise CheckpointError(
            f"{checkpoint.path}: {found.__name__} does not load: {e}", reason="bad_tensors"
        ) from e
    missing = sorted(info["missing_keys"] & model.state_dict().keys())
    if missing or info["mismatched_keys"]:
        wrong = [*missing, *(str(row) for row in sorted(info["mismatched_keys"]))]
        raise CheckpointError(
            f"{checkpoint.path}: {found.__name__} needs "
            f"{format_names(wrong)}, which are "
            "missing, of another shape, or part of the decoder or of another modality",
            reason="bad_tensors",
        )
    return model.to(device).requires_grad_(False)


def _decoderless_class(
    found: type[transformers.PreTrainedModel], modality: Modality, recorder: Callable[[], DecoderRecorder]
) -> type[transformers.PreTrainedModel]:
    """Return a subclass whose constructor replaces the decoder, the head, and the towers of other
    modalities."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super(hollow, self).__init__(config, *args, **kwargs)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        holders = {id(decoder), id(head)}
        if any(id(part) in holders for part in (self, self.base_model)):
            raise CheckpointError(
                f"the decoder of {found.__name__} cannot be separated from its tower. {UNSUPPORTED_HINT}",
                reason="unknown_family",
            )
        gone: tuple[str, ...] = ()
        for name, module in list(self.named_modules()):
            other = is_other_modality(f"{name}.", modality)
            if (id(module) in holders or other) and not name.startswith(gone):
                parent, _, child = name.rpartition(".")
                put = RemovedModule() if other or module is head else recorder()
                setattr(self.get_submodule(parent), child, put)
                gone = (*gone, f"{name}.")
        left = self.state_dict().keys()
        self.all_tied_weights_keys = {
            k: v for k, v in self.all_tied_weights_keys.items() if k in left and v in left
        }
        # Report all missing tensors. Otherwise the tensors in this set would be initialised randomly.
        self._keys_to_ignore_on_load_missing = set()

    hollow: type[transformers.PreTrainedModel] = type(
        found.__name__, (found,), {"__init__": build, "__module__": found.__module__}
    )
    return hollow


def _read_tower_tensors(checkpoint: Checkpoint, modality: Modality) -> Mapping[str, torch.Tensor]:
    """Return the tower's tensors by their names in transformers' model. If the checkpoint's config contains
    `NESTED_CONFIG_FIELD`, the result is for the nested model, without the prefix of the names."""
    out: dict[str, torch.Tensor] = {}
    for file, name in checkpoint.locate("tower", modality).values():
        try:
            with safe_open(file, framework="pt") as stored:
                # Copy to aligned memory. On a CPU, the last bits of results depend on the tensor's offset in
                # the file.
                tensor = stored.get_tensor(name).clone()
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"cannot read {file}: {e}", reason="unreadable") from e
        if tensor.dtype not in _LOADABLE_DTYPES:
            raise CheckpointError(
                f"{name} is {tensor.dtype}: quantised towers are not supported", reason="bad_tensors"
            )
        out[name.removeprefix(_NESTED_PREFIX) if NESTED_CONFIG_FIELD in checkpoint.config else name] = tensor
    return out


def hidden_size(checkpoint: Checkpoint, config: Any) -> int:
    """Return the width of the decoder's rows. Raises CheckpointError("bad_config") if the config does not
    contain it."""
    try:
        return int(config.get_text_config(decoder=True).hidden_size)
    except TRANSFORMERS_ERRORS as e:
        raise CheckpointError(
            f"{checkpoint.path}: config.json has no hidden_size: {e}", reason="bad_config"
        ) from e
