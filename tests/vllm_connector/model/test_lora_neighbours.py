"""Requests without an adapter beside those with one: vLLM 0.32 mixes them up on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.ops.torch_ops import bgmv_shrink
from vllm.platforms import current_platform

from cornplug.vllm_connector import compat


def mixes_them_up() -> bool:
    """Whether the installed kernel computes a row without an adapter (-1) under the last one."""
    rows, adapters, out = torch.ones(2, 4), torch.ones(1, 3, 4), torch.zeros(2, 3)
    bgmv_shrink(rows, adapters, out, torch.tensor([0, -1]))
    return bool(out[1].any())


def config(lora: object) -> Any:
    return SimpleNamespace(lora_config=lora)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has other kernels")
def test_adapts_neighbours_says_what_the_kernel_does() -> None:
    assert compat.may_apply_foreign_adapter(config(object())) == mixes_them_up()


def test_adapts_neighbours_is_of_engines_with_adapters_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.may_apply_foreign_adapter(config(None))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert not compat.may_apply_foreign_adapter(config(object()))
