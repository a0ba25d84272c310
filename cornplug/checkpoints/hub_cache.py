"""Location of a checkpoint's folder and its JSON files. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from cornplug.checkpoints.families import Modality
from cornplug.errors import CheckpointError

_MAX_JSON_BYTES: Final = 16 << 20
_PROCESSORS: Final[Mapping[Modality, tuple[str, tuple[str, ...]]]] = {
    "image": ("image_processor", ("preprocessor_config.json",)),
    "video": ("video_processor", ("video_preprocessor_config.json", "preprocessor_config.json")),
    "audio": ("feature_extractor", ("preprocessor_config.json",)),
}
"""Places where transformers 5 finds a processor: a field in processor_config.json, then separate files."""


def processor_jsons(path: Path) -> dict[Modality, dict[str, Any]]:
    """Return the JSON of each modality's processor, or an empty dictionary if there is none."""
    together = read_json(path / "processor_config.json") or {}
    return {modality: _processor(path, together, modality) for modality in _PROCESSORS}


def cached_snapshot(model: str, revision: str | None, cache_dir: str | None = None) -> Path:
    """Return the folder of a hub id in the local or given cache. Raises CheckpointError("not_found")."""
    # Its import takes longer than reading a checkpoint folder.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as e:
        raise CheckpointError(
            f"{model} is neither a folder nor in the local Hugging Face cache. Run: hf download {model}",
            reason="not_found",
        ) from e


def _processor(path: Path, together: Mapping[str, Any], modality: Modality) -> dict[str, Any]:
    nested, files = _PROCESSORS[modality]
    found = together.get(nested)
    if isinstance(found, dict):
        return found
    given = (read_json(path / name) for name in files)
    return next((content for content in given if content is not None), {})


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object, or return None if the file does not exist."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes.", reason="bad_config")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}.", reason="unreadable") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a JSON object: {e}.", reason="bad_config") from e
