"""Each rule of `formats.image` beside the engine that it is named after, on a table of odd files."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from cornplug.encoder_service.formats import image
from cornplug.encoder_service.formats.messages import DECODINGS, Decoding, decoding_of
from cornplug.errors import MediaError
from devkit.sglang_engine import sglang_python
from devkit.vllm_beds import next_vllm

from .. import hostile_images

SCRIPT: Final = Path(__file__).with_name("engine_decoder.py")
REPOSITORY: Final = Path(__file__).parents[3]
REFUSED_HERE: Final = frozenset({"jp2 cut short"})
"""Files that vLLM decodes as far as they go, and this service refuses as damaged."""


def odd_files() -> Mapping[str, bytes]:
    odd = {name: data for name, (data, _) in hostile_images.odd().items()}
    cut = ("cut short", "header only", "wrong checksum")
    broken = {n: data for n, (data, _) in hostile_images.hostile().items() if n.endswith(cut)}
    return odd | broken | {"rgb with a clear colour": hostile_images.clear_rgb()}


def ours(data: bytes, decoding: Decoding) -> list[Any] | None:
    """As `engine_decoder` has it."""
    try:
        rgb = image.to_engine_rgb(image.decode(data, 1 << 30, formats=hostile_images.FORMATS), decoding)
    except MediaError:
        return None
    return [rgb.width, rgb.height, hashlib.sha256(rgb.tobytes()).hexdigest()]


def interpreters() -> Mapping[Decoding, tuple[str, Path]]:
    """Rule -> (engine, an interpreter with it), of the environments of script/setup."""
    sglang = sglang_python()
    assert sglang is not None
    here = REPOSITORY / ".venv" / "bin" / "python"
    beside = next_vllm().parent / "python"
    found: dict[Decoding, tuple[str, Path]] = {}
    for engine, python in (("vllm", here), ("vllm", beside), ("sglang", sglang)):
        ask = f"import importlib.metadata; print(importlib.metadata.version({engine!r}))"
        version = subprocess.run([python, "-P", "-c", ask], check=True, capture_output=True, text=True)
        rule = decoding_of(engine, version.stdout.strip())
        assert rule is not None, f"{engine} {version.stdout}: no rule; add one to wire/messages.py"
        found[rule] = engine, python
    return found


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_rules_equal_each_installed_engine_on_odd_files(tmp_path: Path) -> None:
    files = odd_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    engines = interpreters()
    assert set(engines) == set(DECODINGS)
    for rule, (engine, python) in engines.items():
        ended = subprocess.run(
            [python, "-P", SCRIPT, engine, tmp_path], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        theirs = json.loads(ended.stdout.splitlines()[-1])
        assert theirs.keys() == files.keys()
        differ = {name for name, data in files.items() if ours(data, rule) != theirs[name]}
        assert differ <= REFUSED_HERE, rule
        assert all(ours(files[name], rule) is None for name in differ), rule


def test_decoding_of_unknown_release_is_none() -> None:
    assert decoding_of("vllm", "0.32.1+cpu") == "vllm-0.32"
    assert decoding_of("vllm", "0.34.0") is None
    assert decoding_of("sglang", "0.5.24") is None


@pytest.mark.filterwarnings("ignore")
def test_rules_agree_on_all_but_transparency_and_orientation() -> None:
    """So that engines of different releases share nearly every image."""
    differ = {
        name
        for name, data in odd_files().items()
        if len({json.dumps(ours(data, rule)) for rule in ("vllm-0.32", "vllm-0.33")}) > 1
    }
    assert differ == {"rgb with a clear colour"}
