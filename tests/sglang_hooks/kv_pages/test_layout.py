"""Host pools as pages: against naive indexing, and against SGLang's own writes and copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.errors import LayoutError
from cornplug.sglang_hooks.kv_pages import layout as kv_layout
from cornplug.sglang_hooks.kv_pages.layout import (
    ModelKV,
    host_pages,
    page_geometry,
    quantised_format,
    rank_heads,
    verify_layout,
)

from ..kv_rig import DIM, HEADS, LAYERS, LAYOUTS, Controller, device_pool, host_pool, latent_pool


def naive(layout: str, size: int, slot: int, h: int, layer: int, plane: int, t: int) -> tuple[int, ...]:
    match layout:
        case "layer_first":
            return plane, layer, slot + t, h
        case "page_first":
            return plane, slot + t, layer, h
        case "page_first_direct":
            return plane, slot // size, layer, t, h
        case _:
            return plane, slot // size, h, t, layer


@settings(max_examples=60)
@given(st.sampled_from(LAYOUTS), st.sampled_from([16, 64]), st.data())
def test_host_pages_equal_naive_indexing(layout: str, size: int, data: st.DataObject) -> None:
    host = host_pool(device_pool(size), layout)
    host.kv_buffer.copy_(torch.arange(host.kv_buffer.numel()).view(host.kv_buffer.shape) % 251)
    slot = size * data.draw(st.integers(0, host.page_num - 1))
    page = host_pages(host).page(slot)
    assert page.shape == (HEADS, LAYERS, 2, size, DIM)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in page.shape[:4])
    assert torch.equal(page[at], host.kv_buffer[naive(layout, size, slot, *at)])
    page[at] = -1.0
    assert (host.kv_buffer[naive(layout, size, slot, *at)] == -1).all()
    assert (host.kv_buffer == -1).sum() == DIM


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_sglang_write_passes_and_restores_pools(layout: str) -> None:
    device = device_pool(16)
    host = host_pool(device, layout)
    host.kv_buffer.normal_()
    before, free = host.kv_buffer.clone(), host.available_size()
    device_before = [buffer.clone() for buffer in (*device.k_buffer, *device.v_buffer)]
    verify_layout(host_pages(host), Controller(device, host))
    assert torch.equal(host.kv_buffer, before)
    assert host.available_size() == free
    after = (*device.k_buffer, *device.v_buffer)
    assert all(torch.equal(a, b) for a, b in zip(after, device_before, strict=True))


def test_verify_of_a_full_host_pool_passes_once_it_has() -> None:
    device = device_pool(16)
    full, known = (host_pool(device, "layer_first") for _ in range(2))
    verify_layout(host_pages(known), Controller(device, known))
    for host in (full, known):
        assert host.alloc(host.available_size()) is not None
    with pytest.raises(LayoutError, match="flush the cache"):
        verify_layout(host_pages(full), Controller(device, full))
    verify_layout(host_pages(known), Controller(device, known))
    with pytest.raises(LayoutError, match="no free page"):
        verify_layout(host_pages(known), Controller(device_pool(16), known))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_verify_fp8_pool_moves_every_byte(layout: str, dtype: torch.dtype) -> None:
    device = device_pool(16, dtype=dtype)
    host = host_pool(device, layout)
    written = []
    write = type(device).set_kv_buffer

    def seen(pool: object, layer: object, at: object, k: torch.Tensor, v: torch.Tensor, **more: int) -> None:
        written.append(k.dtype)
        write(pool, layer, at, k, v, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device), "set_kv_buffer", seen)
        verify_layout(host_pages(host), Controller(device, host))
    # As attention writes it: not as bytes, which SGLang would cast to numbers.
    assert set(written) == {dtype}


def test_page_geometry_of_fp8_is_of_one_engine_format_and_attention() -> None:
    device = device_pool(16, dtype=torch.float8_e4m3fn)
    pages = host_pages(host_pool(device, "page_first"))

    def spec(**more: str) -> dict[str, object]:
        return page_geometry(pages, ModelKV(HEADS, LAYERS, {}), page_tokens=64, **more).spec()

    assert quantised_format(device.dtype) == "fp8_e4m3"
    own = spec(quantised="fp8_e4m3", attention="fa3 fa3")
    assert (own["engine"], own["quantised"], own["dtype"]) == ("sglang fa3 fa3", "fp8_e4m3", "uint8")
    assert own != spec(quantised="fp8_e5m2", attention="fa3 fa3")
    assert own != spec(quantised="fp8_e4m3", attention="triton triton")
    with pytest.raises(LayoutError):
        spec()  # bytes of no format
    plain = host_pages(host_pool(device_pool(16), "page_first"))
    with pytest.raises(LayoutError, match="host pool of dtype bfloat16"):
        page_geometry(plain, ModelKV(HEADS, LAYERS, {}), page_tokens=64, quantised="fp8_e4m3", attention="x")
    # Two backends differ in nothing where values have the model's dtype.
    geometries = [
        page_geometry(plain, ModelKV(HEADS, LAYERS, {}), page_tokens=64, attention=name)
        for name in ("fa3 fa3", "triton triton")
    ]
    assert geometries[0] == geometries[1]


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ({}, ""),
        ({"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}, ""),
        ({"sliding_window": 4096, "use_sliding_window": False}, ""),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sglang"),
        ({"sliding_window": 4096}, "sglang"),
        ({"text_config": {"sliding_window": 1024, "layer_types": ["sliding_attention"]}}, "sglang"),
        ({"vision_config": {"sliding_window": 7}, "text_config": {"vocab_size": 9}}, ""),
    ],
)
def test_page_geometry_of_windows_is_sglangs_alone(config: dict[str, object], engine: str) -> None:
    """vLLM has such pages with `--disable-hybrid-kv-cache-manager`, and no test compares the two."""
    pages = host_pages(host_pool(device_pool(16), "page_first"))
    page = page_geometry(pages, ModelKV(HEADS, LAYERS, config), page_tokens=64)
    assert page.engine == engine


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_host_pages_of_latent_pool_pass_verify(layout: str) -> None:
    device = latent_pool(16)
    host = host_pool(device, layout)
    verify_layout(host_pages(host), Controller(device, host))
    page = host_pages(host).page(32)
    page[0, 1, 0, 5] = 3.0
    row = {"layer_first": (1, 37, 0), "page_first": (37, 1, 0), "page_first_direct": (2, 1, 5, 0)}[layout]
    assert (host.kv_buffer[row] == 3).all()


@pytest.mark.parametrize("swap", [(1, 3, 0, 2), (0, 1, 3, 2)])
def test_verify_other_axis_order_is_refused(swap: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_pool(16, heads=3)
    host = host_pool(device, "layer_first")
    monkeypatch.setitem(kv_layout._MHA_DIMENSIONS, "layer_first", swap)
    with pytest.raises(LayoutError) as refused:
        verify_layout(host_pages(host), Controller(device, host))
    assert refused.value.reason == "layout"
    assert host.available_size() == host.size


def test_verify_copy_swapping_k_and_v_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_pool(16)
    host = host_pool(device, "page_first")
    write = type(device).set_kv_buffer

    def swapped(
        pool: object, layer: object, at: object, k: torch.Tensor, v: torch.Tensor, **more: int
    ) -> None:
        write(pool, layer, at, v, k, **more)

    monkeypatch.setattr(type(device), "set_kv_buffer", swapped)
    with pytest.raises(LayoutError, match="back up"):
        verify_layout(host_pages(host), Controller(device, host))


def test_verify_load_that_copies_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_pool(16)
    host = host_pool(device, "page_first")
    monkeypatch.setattr(type(host), "load_to_device_per_layer", lambda *args, **kwargs: None)
    with pytest.raises(LayoutError, match="load"):
        verify_layout(host_pages(host), Controller(device, host))


def test_host_pages_of_unknown_pool_are_refused() -> None:
    class Other(type(host_pool(device_pool(16), "page_first"))):  # type: ignore[misc]
        pass

    host = host_pool(device_pool(16), "page_first")
    host.__class__ = Other
    with pytest.raises(LayoutError) as refused:
        host_pages(host)
    assert refused.value.reason == "attention_kind"
    host = host_pool(device_pool(16), "page_first")
    host.layout = "page_unified"
    with pytest.raises(LayoutError):
        host_pages(host)
    host.layout, host.target_layer_num = "page_first", LAYERS - 1
    with pytest.raises(LayoutError) as refused:
        host_pages(host)
    assert refused.value.reason == "speculative"


def test_page_geometry_missing_layer_is_refused() -> None:
    pages = host_pages(host_pool(device_pool(16), "page_first"))
    with pytest.raises(LayoutError):
        page_geometry(pages, ModelKV(HEADS, LAYERS + 1, {}), page_tokens=64)


def test_rank_heads_follow_tensor_parallel_rank() -> None:
    pages = host_pages(host_pool(device_pool(16, heads=2), "page_first"))
    page = page_geometry(pages, ModelKV(4, LAYERS, {}), page_tokens=64)
    assert rank_heads(pages, page, 2, 1) == (range(2, 4), True)
    with pytest.raises(LayoutError):
        rank_heads(pages, page, 1, 0)
    latent = host_pages(host_pool(latent_pool(16), "page_first"))
    page = page_geometry(latent, ModelKV(16, LAYERS, {}), page_tokens=64)
    assert (page.shape, page.engine) == ((1, LAYERS, 1, 64, 16), "sglang")
    assert rank_heads(latent, page, 2, 0) == (range(1), True)
    assert rank_heads(latent, page, 2, 1) == (range(1), False)
