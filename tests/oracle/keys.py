"""The keys of a deployment, by the real code of the room of the engine that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cornplug.kv_page import PageGeometry

from .deployments import Deployment
from .numbers import PAGE

SECRET: Final = bytes(range(32))
ENGINE: Final = "vllm" if importlib.util.find_spec("vllm") else "sglang"
room: Final[Any] = importlib.import_module(f".{ENGINE}_room", __package__)


@dataclass(frozen=True)
class Keys:
    embedding: bytes
    pages: tuple[bytes, ...]


def keys(deployment: Deployment, folder: Path, adapter: Path | None, rows: int) -> Keys:
    """Raises CheckpointError where nothing would be shared."""
    model = room.engine_model(deployment, folder)
    identity = model.kv_identity()
    medium = room.lineage(deployment, model.tower_identity().identity, SECRET)
    page = PageGeometry(page_tokens=PAGE, heads=2, layers=2, dim=16, dtype=deployment.dtype)
    return Keys(medium, room.pages(deployment, identity, page, adapter, medium, rows, SECRET))
