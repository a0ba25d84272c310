"""Import a CUDA build of torchvision beside a CPU-only torch.

Such a torchvision cannot load its compiled half. Its Python half goes on without it, except
that `torchvision._meta_registrations` registers fake kernels for two operators whose schemas
only the compiled half would have defined, and dies with "operator torchvision::nms does not
exist". The finder below waits for that one import and defines the schemas if they are missing.
The operators themselves stay absent: calling them fails, as it should.

Loaded by a .pth in every process of the environment, so it imports nothing at start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_TRIGGER = "torchvision._meta_registrations"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class SchemaFinder:
    """Finds nothing. Being asked for `_TRIGGER` is its signal; then it steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _TRIGGER:
            sys.meta_path.remove(self)
            # torchvision imports .extension first, so whether the compiled half loaded is known.
            if not sys.modules["torchvision.extension"]._has_ops():
                _define_schemas()
        return None


def install() -> None:
    """Put the finder in front, once."""
    if _TRIGGER not in sys.modules and not any(isinstance(f, SchemaFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, SchemaFinder())


def _define_schemas() -> None:
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
