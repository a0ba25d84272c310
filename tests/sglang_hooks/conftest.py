"""SGLang on a CPU, before anything of it is imported."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cornplug.engine_common import engine_state

from .zygote import Zygote

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# What SGLang compiles stays in the user's cache, though tests have a cache of their own otherwise: compiling
# takes ten seconds and more. Each environment has a folder, because torch compiles again if a path differs.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_ENVIRONMENT = hashlib.sha256(os.path.realpath(sys.prefix).encode()).hexdigest()[:12]
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR",
    str(
        _CACHE / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_cpu_{_ENVIRONMENT}"
    ),
)


@pytest.fixture(autouse=True)
def original_weights() -> Iterator[None]:
    engine_state.current().mark_weights_unknown(False)
    # Tests write their checkpoints while the "server" runs.
    with mock.patch.object(engine_state, "file_clock_ns", return_value=2**63):
        engine_state.record_engine_start()
    engine_state.current().publish_costs(encode_row_s=0, is_fetch_faster=True)
    yield
    engine_state.current().mark_weights_unknown(False)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """What starts processes of SGLang quickly."""
    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()
