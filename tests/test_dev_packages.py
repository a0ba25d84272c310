"""The development packages that let SGLang run without a GPU: their arithmetic, without SGLang."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

DEV = Path(__file__).parents[1] / "dev"
LAYERS, PAGES, PAGE, HEADS, DIM = 3, 4, 16, 2, 8
SLOTS = PAGES * PAGE
# The shape of one of K and V in SGLang's host pool, as its `init_kv_buffer` makes it.
SHAPES = {
    "layer_first": (LAYERS, SLOTS, HEADS, DIM),
    "page_first": (SLOTS, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (PAGES, HEADS, PAGE, LAYERS, DIM),
}


def load(package: str, module: str, *, file: str = "") -> ModuleType:
    spec = importlib.util.spec_from_file_location(module, DEV / package / (file or f"{module}.py"))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {module: loaded}):  # its own modules find it there
        spec.loader.exec_module(loaded)
    return loaded


hicache: Any = load("sglang-hicache-cpu", "sglang_hicache_cpu")


def at(layout: str, buffer: Any, slot: int, layer: int, head: int) -> Any:
    """The row of one token, by the layout's definition."""
    page, row = divmod(slot, PAGE)
    index = {
        "layer_first": (layer, slot, head),
        "page_first": (slot, layer, head),
        "page_first_direct": (page, layer, row, head),
        "page_head": (page, head, row, layer),
    }[layout]
    return buffer[index]


def pool(layout: str) -> SimpleNamespace:
    device = [tuple(torch.randn(SLOTS, HEADS, DIM) for _ in range(LAYERS)) for _ in "kv"]
    host = torch.zeros(2, *SHAPES[layout])
    return SimpleNamespace(
        layout=layout,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        k_buffer=host[0],
        v_buffer=host[1],
        device_k_buffers=device[0],
        device_v_buffers=device[1],
    )


@pytest.mark.parametrize("layout", SHAPES)
def test_dev_packages_saved_tokens_lie_in_layout_and_come_back(layout: str) -> None:
    p = pool(layout)
    on_device = torch.randperm(SLOTS)[: 2 * PAGE]
    on_host = torch.cat([torch.arange(3 * PAGE, 4 * PAGE), torch.arange(PAGE, 2 * PAGE)])
    hicache._save_mha(p, None, on_host, on_device, "direct")
    for host, device in ((p.k_buffer, p.device_k_buffers), (p.v_buffer, p.device_v_buffers)):
        for slot, token in zip(on_host.tolist(), on_device.tolist(), strict=True):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    assert torch.equal(at(layout, host, slot, layer, head), device[layer][token, head])
        assert int((host != 0).sum()) == 2 * PAGE * LAYERS * HEADS * DIM  # and nowhere else

    elsewhere = pool(layout)
    elsewhere.k_buffer, elsewhere.v_buffer = p.k_buffer, p.v_buffer
    before = elsewhere.device_k_buffers[0].clone()
    target = torch.randperm(SLOTS)[: 2 * PAGE]
    for layer in range(LAYERS + 1):  # the layer after the last is another pool's
        hicache._load_mha(elsewhere, None, on_host, target, layer, "direct")
    for mine, theirs in zip(p.device_v_buffers, elsewhere.device_v_buffers, strict=True):
        assert torch.equal(mine[on_device], theirs[target])
    untouched = sorted(set(range(SLOTS)) - set(target.tolist()))
    assert torch.equal(elsewhere.device_k_buffers[0][untouched], before[untouched])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_dev_packages_latents_come_back_equal(layout: str) -> None:
    shape = [1 if n == HEADS and i >= 2 else n for i, n in enumerate(SHAPES[layout])]
    device = tuple(torch.randn(SLOTS, 1, DIM) for _ in range(LAYERS))
    p = SimpleNamespace(
        layout=layout,
        kv_buffer=torch.zeros(shape),
        device_kv_buffers=device,
        _target_layer_indices=tuple(range(LAYERS)),
        _host_layer_by_controller={i: i for i in range(LAYERS)},
        _buffer_index_by_layer={i: i for i in range(LAYERS)},
    )
    on_host, on_device = torch.arange(PAGE, 2 * PAGE), torch.randperm(SLOTS)[:PAGE]
    hicache._save_mla(p, None, on_host, on_device, "direct")
    p.device_kv_buffers = tuple(torch.zeros_like(layer) for layer in device)
    for layer in range(LAYERS):
        hicache._load_mla(p, None, on_host, on_device, layer, "direct")
        assert torch.equal(p.device_kv_buffers[layer][on_device], device[layer][on_device])


def test_dev_packages_new_slots_are_in_their_requests_rows() -> None:
    kernel = load("sgl-kernel-cpu", "sgl_kernel", file="sgl_kernel/__init__.py")
    table = torch.zeros(4, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 5]), torch.tensor([4, 6])
    kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([7, 8, 9, 40]), 8)
    assert table[2].tolist() == [0, 7, 8, 9, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 0, 0, 40, 0, 0]
    assert int((table != 0).sum()) == 4
    found = torch.zeros(5, dtype=torch.int64)
    kernel.assign_extend_cache_locs_cpu(rows, table, starts, ends, found, 8)
    assert found.tolist() == [7, 8, 9, 40, 0]
    with pytest.raises(NotImplementedError):
        torch.ops.sgl_kernel.rmsnorm_cpu(torch.zeros(1))
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
