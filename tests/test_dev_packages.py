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


def test_dev_packages_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="page_unified"):
        hicache._slots(torch.zeros(1), "page_unified", 0)


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


def test_dev_packages_slots_of_accepted_drafts_are_copied_in_all_layers() -> None:
    kernel = load("sgl-kernel-cpu", "sgl_kernel_speculative", file="sgl_kernel/speculative.py")
    buffers = [torch.randn(8, 2, 3), torch.randn(8, 1, 5).to(torch.bfloat16)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    sizes = torch.tensor([buffer[0].nbytes for buffer in buffers])
    before = [buffer.clone() for buffer in buffers]
    # Slot 4 is read before it is written.
    kernel.copy_all_layer_kv_cache_cpu(addresses, sizes, torch.tensor([3, 4]), torch.tensor([4, 6]))
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer, old[[0, 1, 2, 4, 6, 5, 6, 7]])


N, B = 5, 2
# Parents of the nodes of a tree: a root with two children, of which the second has two.
PARENTS = [-1, 0, 0, 2, 2]


def tree(parents: list[int]) -> Any:
    """Each node's ancestors and itself, as SGLang's corpus says them."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def test_dev_packages_trees_of_drafts_are_walked_by_the_models_choice() -> None:
    kernel = load("sgl-kernel-cpu", "sgl_kernel_speculative", file="sgl_kernel/speculative.py")
    mask = torch.stack([tree(PARENTS), tree([-1, 0, 1, 2, 3])]).flatten()
    positions = torch.zeros(B * N, dtype=torch.int64)
    index, child, sibling = (torch.zeros(B, N, dtype=torch.int64) for _ in range(3))
    lengths = torch.tensor([10, 20])
    kernel.reconstruct_indices_from_tree_mask(mask, lengths, positions, index, child, sibling, B, N)
    assert positions.tolist() == [10, 11, 11, 12, 12, 20, 21, 22, 23, 24]
    assert child.tolist() == [[1, -1, 3, -1, -1], [1, 2, 3, 4, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1], [-1] * N]

    predicts = torch.zeros(B * N, dtype=torch.int32)
    accepted = torch.full((B, N), -1, dtype=torch.int32)
    count = torch.zeros(B, dtype=torch.int32)
    # The model says 52 after the root, 54 after that, then 60; of the chain it says nothing.
    kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor([[50, 51, 52, 53, 54], [50, 51, 52, 53, 54]]),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor([[52, 0, 54, 0, 60], [99, 0, 0, 0, 0]]),
    )
    assert (accepted.tolist(), count.tolist()) == ([[0, 2, 4, -1, -1], [5, -1, -1, -1, -1]], [2, 0])
    assert predicts[[0, 2, 4, 5]].tolist() == [52, 54, 60, 99]

    slots, target = torch.arange(100, 110), torch.zeros(B * N, dtype=torch.int64)
    kernel.fill_accept_out_cache_loc_cpu(accepted, slots, target)
    assert target.tolist() == [100, 102, 104, 105, 0, 0, 0, 0, 0, 0]


def test_dev_packages_proposals_of_a_draft_model_are_a_tree() -> None:
    kernel = load("sgl-kernel-cpu", "sgl_kernel_speculative", file="sgl_kernel/speculative.py")
    mask = torch.zeros(B * N * N, dtype=torch.bool)
    positions = torch.zeros(B * N, dtype=torch.int64)
    index, child, sibling = (torch.full((B, N), -1, dtype=torch.int64) for _ in range(3))
    # Two proposals for each place. The root's are 0 and 1; of 0 and 1 those in the next step are 2 to 5.
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 1]])
    selected = torch.tensor([[0, 1, 4, 5], [0, 1, 2, 3]])
    kernel.build_tree_kernel_efficient_cpu(
        parents, selected, torch.tensor([10, 20]), mask, positions, index, child, sibling, 2, 2, N, 1
    )
    assert torch.equal(mask.view(B, N, N), torch.stack([tree(PARENTS), tree([-1, 0, 0, 1, 1])]))
    assert positions.tolist() == [10, 11, 11, 12, 12, 20, 21, 21, 22, 22]
    assert child.tolist() == [[1, -1, 3, -1, -1], [1, 3, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1], [-1, 2, -1, 4, -1]]

    mask = torch.zeros(2 * 2 * 2, dtype=torch.bool)
    index, child, sibling = (torch.full((2, 2), -1, dtype=torch.int64) for _ in range(3))
    kernel.build_tree_kernel_efficient_cpu(
        torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([3, 4]),
        mask, positions, index, child, sibling, 1, 1, 2, 1,
    )  # fmt: skip
    assert (mask.tolist(), child.tolist()) == ([True, False, True, True] * 2, [[1, -1]] * 2)


def test_dev_packages_places_and_last_tokens_of_drafts() -> None:
    kernel = load("sgl-kernel-cpu", "sgl_kernel_speculative", file="sgl_kernel/speculative.py")
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    found = torch.zeros(4, dtype=torch.int64)
    rows, lengths = torch.tensor([2, 0]), torch.tensor([3, 6])
    kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, found, 8, 1, 2)
    assert found.tolist() == [19, 20, 6, 7]
    last = torch.zeros(2, dtype=torch.int32)
    tokens = torch.tensor([[7, 8, -1], [9, -1, -1]], dtype=torch.int32)
    kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 1], dtype=torch.int32), last, 3)
    assert last.tolist() == [8, 9]


def test_dev_packages_drafts_attend_to_their_ancestors_only() -> None:
    heads, dim, before = 2, 8, 6
    slots = torch.randperm(32)[: before + N]
    pool = SimpleNamespace(k=torch.randn(32, heads, dim), v=torch.randn(32, heads, dim))
    pool.get_key_buffer, pool.get_value_buffer = lambda _: pool.k, lambda _: pool.v

    def write(_layer: object, at: Any, k: Any, v: Any) -> None:
        pool.k[at], pool.v[at] = k.view(-1, heads, dim), v.view(-1, heads, dim)

    pool.set_kv_buffer = write
    backend = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=slots.view(1, -1))
    )
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, tp_k_head_num=heads, qk_head_dim=dim, scaling=dim**-0.5
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(draft_token_num=N, custom_mask=tree(PARENTS).flatten()),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([before]),
        out_cache_loc=slots[before:],
    )
    q, k, v = (torch.randn(N, heads * dim) for _ in range(3))
    found = hicache._verify_drafts(None, backend, q, k, v, layer, batch)
    for i, mask in enumerate(tree(PARENTS)):
        at = torch.cat([slots[:before], slots[before:][mask]])
        scores = torch.einsum("hd,nhd->hn", q[i].view(heads, dim), pool.k[at]) * dim**-0.5
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), pool.v[at])
        assert torch.allclose(found[i], expected.flatten(), atol=1e-5)


def test_dev_packages_lora_memory_is_not_pinned_without_gpu() -> None:
    unpinned = hicache.UnpinnedTorch()
    assert unpinned.tensor([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]
    assert unpinned.zeros((2, 3), pin_memory=True).shape == (2, 3)
    assert unpinned.int32 is torch.int32
    assert unpinned.Tensor is torch.Tensor
