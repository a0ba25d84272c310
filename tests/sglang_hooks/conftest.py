"""SGLang on a CPU, before anything of it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .zygote import Zygote

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """What starts processes of SGLang quickly."""
    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()
