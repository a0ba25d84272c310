"""Prints, as JSON, what an engine's own code decodes the files of a folder to.

Runs in the engine's environment:

    python -P engine_decoder.py vllm|sglang FOLDER

Each file's name -> [width, height, SHA-256 of the RGB pixels]; null for a file that the engine refuses.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def of_vllm() -> Callable[[bytes], Any]:
    """The image of a chat request, as it goes to the model's processor."""
    from vllm.multimodal.media.image import ImageMediaIO

    io = ImageMediaIO()
    return lambda data: io.load_bytes(data).media


def of_sglang() -> Callable[[bytes], Any]:
    """As `of_vllm`."""
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    return lambda data: BaseMultimodalProcessor._load_single_item(data, Modality.IMAGE)


def main(engine: str, folder: str) -> None:
    decode = of_vllm() if engine == "vllm" else of_sglang()
    found: dict[str, list[Any] | None] = {}
    for path in sorted(Path(folder).iterdir()):
        try:
            image = decode(path.read_bytes())
        except (ValueError, RuntimeError):  # an engine's refusals
            found[path.name] = None
            continue
        if image.mode != "RGB":
            raise SystemExit(f"{path.name}: {engine} passes on an image of mode {image.mode}")
        digest = hashlib.sha256(image.tobytes()).hexdigest()
        found[path.name] = [image.width, image.height, digest]
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
