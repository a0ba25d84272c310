"""transformers' own model of a checkpoint without its decoder, which is never allocated.

    config.json ──transformers' class, on the meta device──> decoder, head, other modalities' tower replaced
                                                                 └─ filled with the tower's tensors only

The state dict contains only the tensors that the tower's fingerprint covers. A tower that needs another
tensor is rejected, because that tensor could change a row without changing the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality
from cornplug.checkpoints.families.generic import NESTED, is_of_other
from cornplug.encoder_service.towers.decoder_recorder import DecoderRecorder, RemovedPart
from cornplug.errors import CheckpointError

REFUSALS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""Errors that transformers raises for a config or a processor that it does not support."""
DESCRIBE: Final = 'Serve another model, or describe the family (CONTRIBUTING.md, "Add a model family").'
_LOADED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
_NAMED: Final = 5
_NESTED_PREFIX: Final = f"{NESTED.removesuffix('_config')}."
"""Prefix of tensor names in the model that `NESTED` describes."""


def model_class(checkpoint: Checkpoint) -> tuple[type[transformers.PreTrainedModel], Any]:
    """Return transformers' class for media and text of this checkpoint's model_type, and its config.

    Raises CheckpointError("unknown_family") if transformers has no such class, or
    CheckpointError("bad_config").
    """
    kind, path = checkpoint.family.name, checkpoint.path
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = getattr(config, NESTED, config)
        mappings = (
            transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
            transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        )
        found = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    except REFUSALS as e:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot read config.json of model_type "
            f"{kind!r}: {e}. A checkpoint's own code is never run.",
            reason="bad_config",
        ) from e
    if found is None:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} has no model of images or audio, and text, for "
            f"model_type {kind!r}. {DESCRIBE}",
            reason="unknown_family",
        )
    return found, config


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, modality: Modality = "image"
) -> transformers.PreTrainedModel:
    """Return the model with the tower of a modality, in eval mode. On the device "meta" it has no weights.

    Raises CheckpointError as `model_class`, "unknown_family" if decoder and tower cannot be separated,
    "bad_tensors" naming tensors that are missing, quantised or of another shape, or "unreadable".
    """
    found, config = model_class(checkpoint)
    hollow = _without_decoder(
        found, modality, lambda: DecoderRecorder(hidden_size(checkpoint, config), dtype)
    )
    transformers.logging.disable_progress_bar()  # the service logs each step itself
    config.quantization_config = None
    del config.quantization_config  # for the decoder only: a quantised tower is rejected by its tensors
    try:
        if device.type == "meta":
            with device:
                return hollow(config).eval().requires_grad_(False)
        model, info = hollow.from_pretrained(
            None,
            config=config,
            state_dict=_tensors(checkpoint, modality),
            dtype=dtype,
            # Never the implementation in config.json, which may be a kernel from the hub.
            attn_implementation="sdpa" if found._supports_sdpa else "eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except REFUSALS as e:
        raise CheckpointError(
            f"{checkpoint.path}: {found.__name__} does not load: {e}", reason="bad_tensors"
        ) from e
    missing = sorted(info["missing_keys"] & model.state_dict().keys())
    if missing or info["mismatched_keys"]:
        wrong = [*missing, *(str(row) for row in sorted(info["mismatched_keys"]))]
        raise CheckpointError(
            f"{checkpoint.path}: {found.__name__} needs {', '.join(map(str, wrong[:_NAMED]))}: absent, of "
            "another shape, the decoder's, or another modality's",
            reason="bad_tensors",
        )
    return model.to(device).requires_grad_(False)


def _without_decoder(
    found: type[transformers.PreTrainedModel], modality: Modality, recorder: Callable[[], DecoderRecorder]
) -> type[transformers.PreTrainedModel]:
    """Return a subclass that removes decoder, head, and other modalities' towers directly after
    construction."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super(hollow, self).__init__(config, *args, **kwargs)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        holders = {id(decoder), id(head)}
        if any(id(part) in holders for part in (self, self.base_model)):
            raise CheckpointError(
                f"the decoder of {found.__name__} cannot be separated from its tower. {DESCRIBE}",
                reason="unknown_family",
            )
        gone: tuple[str, ...] = ()
        for name, module in list(self.named_modules()):
            other = is_of_other(f"{name}.", modality)
            if (id(module) in holders or other) and not name.startswith(gone):
                parent, _, child = name.rpartition(".")
                put = RemovedPart() if other or module is head else recorder()
                setattr(self.get_submodule(parent), child, put)
                gone = (*gone, f"{name}.")
        left = self.state_dict().keys()
        self.all_tied_weights_keys = {
            k: v for k, v in self.all_tied_weights_keys.items() if k in left and v in left
        }
        # Tensors that the class may omit are initialised randomly, and no key would report it.
        self._keys_to_ignore_on_load_missing = set()

    hollow: type[transformers.PreTrainedModel] = type(
        found.__name__, (found,), {"__init__": build, "__module__": found.__module__}
    )
    return hollow


def _tensors(checkpoint: Checkpoint, modality: Modality) -> Mapping[str, torch.Tensor]:
    """Return the tower's tensors by their names in the model that `NESTED` describes, or in the whole
    model."""
    out: dict[str, torch.Tensor] = {}
    for file, name in checkpoint.locate("tower", modality).values():
        try:
            with safe_open(file, framework="pt") as stored:
                # Copy to aligned memory, because on a CPU the last bits depend on the tensor's offset in the
                # file.
                tensor = stored.get_tensor(name).clone()
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"cannot read {file}: {e}", reason="unreadable") from e
        if tensor.dtype not in _LOADED:
            raise CheckpointError(
                f"{name} is {tensor.dtype}: quantised towers are not supported", reason="bad_tensors"
            )
        out[name.removeprefix(_NESTED_PREFIX) if NESTED in checkpoint.config else name] = tensor
    return out


def hidden_size(checkpoint: Checkpoint, config: Any) -> int:
    """Return the width of the decoder's rows. Raises CheckpointError("bad_config") if its config has none."""
    try:
        return int(config.get_text_config(decoder=True).hidden_size)
    except REFUSALS as e:
        raise CheckpointError(
            f"{checkpoint.path}: config.json has no hidden_size: {e}", reason="bad_config"
        ) from e
