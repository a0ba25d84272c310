"""The demo's three models, made on the spot: real shapes and tensor names, random weights.

`helpdesk` and `catalogue` are LLaVA-1.5s: the same CLIP tower bit for bit, language models of
another width and depth, and a projector each. `archive` is a Qwen2-VL with another tower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cornplug.commands.fingerprint import describe
from devkit import checkpoints

# CLIP at LLaVA's resolution (576 rows an image), as wide as makes a pass take about a second.
CLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 512,
}
QWEN2_VISION: Final[Mapping[str, Any]] = {"depth": 6, "embed_dim": 320, "num_heads": 4, "mlp_ratio": 4}
DTYPE: Final = "float32"
"""Of weights and engines: greedy tokens can then be compared one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One app: its name, and the folder of the checkpoint that its engine serves."""

    name: str
    model: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Apps:
    """The demo's apps; the first two share a tower."""

    helpdesk: App
    catalogue: App
    archive: App

    def __iter__(self) -> Iterator[App]:
        return iter((self.helpdesk, self.catalogue, self.archive))


def make(folder: Path) -> Apps:
    """Write the three checkpoints below `folder`."""
    helpdesk = checkpoints.llava(
        folder / "helpdesk", hidden_size=384, layers=6, heads=6, vision=CLIP, llm_seed=1
    )
    catalogue = checkpoints.llava(
        folder / "catalogue", hidden_size=512, layers=8, heads=8, kv_heads=4, vision=CLIP, llm_seed=2
    )
    archive = checkpoints.qwen2_vl(
        folder / "archive", hidden_size=256, layers=4, heads=4, vision=QWEN2_VISION, max_pixels=28 * 28 * 256
    )
    return Apps(
        helpdesk=App(name="helpdesk", model=helpdesk),
        catalogue=App(name="catalogue", model=catalogue),
        archive=App(name="archive", model=archive),
    )


def fingerprints(app: App) -> dict[str, str]:
    """Part -> fingerprint in hex, as `cornplug fingerprint` prints it."""
    report = describe(str(app.model), DTYPE)
    return {part: str(report[part]) for part in ("tower", "projector", "language_model")}
