"""transformers' own model of a checkpoint without its decoder, which never takes memory.

    config.json ──transformers' class, on the meta device──> decoder and head replaced by nothing
                                                                 └─ filled with the tower's tensors only
The state dict holds only the tensors that the tower's fingerprint counts. A tower that needs another one is
refused, so that none changes a row without changing the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.errors import CheckpointError

REFUSALS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""What transformers raises for a config or a processor that it cannot use."""
DESCRIBE: Final = 'Serve another model, or describe the family (CONTRIBUTING.md, "A family").'
_LOADED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
_NAMED: Final = 5


def model_class(checkpoint: Checkpoint) -> tuple[type[transformers.PreTrainedModel], Any]:
    """transformers' class for images and text of this checkpoint's model_type, and its config.

    Raises CheckpointError: "unknown_family" for a type that transformers has no such class for; "bad_config".
    """
    kind, path = checkpoint.family.name, checkpoint.path
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        mapping = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        found = mapping[type(config)] if type(config) in mapping else None  # noqa: SIM401 (it has no defaults)
    except REFUSALS as e:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} does not read config.json of model_type "
            f"{kind!r}: {e}. A checkpoint's own code is never run.",
            reason="bad_config",
        ) from e
    if found is None:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} has no model of images and text for model_type "
            f"{kind!r}. {DESCRIBE}",
            reason="unknown_family",
        )
    return found, config


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> transformers.PreTrainedModel:
    """The model, in eval mode. On the device "meta" it has no weights.

    Raises CheckpointError: as `model_class`; "unknown_family" where the decoder cannot be told from the
    tower; "bad_tensors" that names tensors which are missing, quantised, or of another shape; "unreadable".
    """
    found, config = model_class(checkpoint)
    hollow = _without_decoder(found)
    transformers.logging.disable_progress_bar()  # the service's log has a line of its own for each step
    config.quantization_config = None
    del config.quantization_config  # of the decoder only: a quantised tower is refused by its tensors
    try:
        if device.type == "meta":
            with device:
                return hollow(config).eval().requires_grad_(False)
        model, info = hollow.from_pretrained(
            None,
            config=config,
            state_dict=_tensors(checkpoint),
            dtype=dtype,
            # Never what config.json asks for, which may be a kernel from the hub.
            attn_implementation="sdpa" if found._supports_sdpa else "eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
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
            "another shape, or the decoder's",
            reason="bad_tensors",
        )
    return model.to(device).requires_grad_(False)


def _without_decoder(found: type[transformers.PreTrainedModel]) -> type[transformers.PreTrainedModel]:
    """A subclass that drops decoder and head as soon as it has been built."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super(hollow, self).__init__(config, *args, **kwargs)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        holders = {id(decoder), id(head)}
        if any(id(part) in holders for part in (self, self.base_model)):
            raise CheckpointError(
                f"the decoder of {found.__name__} cannot be told from its tower. {DESCRIBE}",
                reason="unknown_family",
            )
        for name, module in list(self.named_modules()):
            if id(module) in holders:
                parent, _, child = name.rpartition(".")
                setattr(self.get_submodule(parent), child, nn.Identity())
        left = self.state_dict().keys()
        self.all_tied_weights_keys = {
            k: v for k, v in self.all_tied_weights_keys.items() if k in left and v in left
        }
        # A tensor that its class may do without is drawn at random, and no key would say so.
        self._keys_to_ignore_on_load_missing = set()

    hollow: type[transformers.PreTrainedModel] = type(
        found.__name__, (found,), {"__init__": build, "__module__": found.__module__}
    )
    return hollow


def _tensors(checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """The tower's tensors by their published names."""
    out: dict[str, torch.Tensor] = {}
    for file, name in checkpoint.locate("tower").values():
        try:
            with safe_open(file, framework="pt") as stored:
                # Copied to aligned memory: on a CPU the last bits depend on where in the file a tensor began.
                out[name] = stored.get_tensor(name).clone()
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"cannot read {file}: {e}", reason="unreadable") from e
        if out[name].dtype not in _LOADED:
            raise CheckpointError(
                f"{name} is {out[name].dtype}: a quantised tower is not served", reason="bad_tensors"
            )
    return out


def hidden_size(checkpoint: Checkpoint, config: Any) -> int:
    """Width of the decoder's rows by its config. Raises CheckpointError("bad_config") where it says none."""
    try:
        return int(config.get_text_config(decoder=True).hidden_size)
    except REFUSALS as e:
        raise CheckpointError(
            f"{checkpoint.path}: config.json names no hidden_size: {e}", reason="bad_config"
        ) from e
