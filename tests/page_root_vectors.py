"""Roots of page keys as both engines' rooms must make them: the cases, and their frozen values.

A change of a value needs a new version in the domain's name. `python tests/page_root_vectors.py`
writes the values of cases that are not in the file yet, and changes none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from cornplug.kv_page import PageGeometry

GOLDEN: Final = Path(__file__).parent / "golden" / "page_roots.json"
SECRET: Final = bytes(range(32))
IDENTITY: Final = (b"lm" * 16, {"config": {"model_type": "qwen2"}, "dtype": "float32", "overrides": {}})
PAGE: Final = PageGeometry(page_tokens=64, heads=4, layers=4, dim=8, dtype="float32")


class Case(NamedTuple):
    """What a request says."""

    lora: bool
    salt: str | None


CASES: Final = {
    "plain": Case(False, None),
    "salted": Case(False, "tenant-1"),
    "salted with nothing": Case(False, ""),
    "adapted": Case(True, None),
    "adapted and salted": Case(True, "tenant-1"),
}


def adapter(folder: Path) -> str:
    """A LoRA's files, always the same. Returns their folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"]}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    return str(folder)


def known() -> dict[str, Any]:
    """Case -> root as hex."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


if __name__ == "__main__":
    import tempfile

    from cornplug.engine_common.lora_digests import LoraDigests
    from cornplug.engine_common.model_identity import page_root

    with tempfile.TemporaryDirectory() as place:
        lora = LoraDigests().digest(adapter(Path(place) / "lora"))
    made = {
        name: page_root(SECRET, IDENTITY, PAGE, adapter=lora if case.lora else None, salt=case.salt).hex()
        for name, case in CASES.items()
    }
    GOLDEN.write_text(json.dumps(made | (known() if GOLDEN.exists() else {}), indent=1) + "\n")
