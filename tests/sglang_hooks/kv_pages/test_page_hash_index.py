"""The index of names against the plain chain of the whole sequence."""

from __future__ import annotations

import inspect
import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str

from cornplug.engine_common import lora_digests
from cornplug.engine_common.lora_digests import BackgroundLoraDigests, LoraDigests
from cornplug.errors import CheckpointError
from cornplug.identity import LINK_TOKENS, hash_chain, kv_root, page_key, placeholder_tokens
from cornplug.kv_page import PageGeometry
from cornplug.sglang_hooks.kv import early_lookup
from cornplug.sglang_hooks.kv_pages import namespace_roots, page_hash_index
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace, PageHashIndex
from cornplug.sglang_hooks.media import placeholder_tokens as tokens_module

from ..hooked import hook_of
from ..kv_rig import PLAIN, SECRET, hashes_of

load_lora_adapter = hook_of(namespace_roots, "LoRAManager._load_lora_adapter")
load_from_tensors = hook_of(namespace_roots, "LoRAManager._load_lora_adapter_from_tensors")
make_request = hook_of(namespace_roots, "Req.__init__")
storage_hash = hook_of(page_hash_index, "get_storage_hash_str")
write_backup_storage = hook_of(page_hash_index, "UnifiedRadixCache.write_backup_storage")
write_storage = hook_of(page_hash_index, "HybridCacheController.write_storage")

GOLDEN = Path(__file__).parents[2] / "golden" / "page_keys.json"
PAIRS = [(16, 64), (32, 64), (64, 64), (128, 64), (16, 16), (128, 128), (16, 128), (48, 16), (112, 16)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(11 * i + seed * i * i + seed) % 997 for i in range(length)]


def expected(tokens: list[int], page_tokens: int) -> list[bytes]:
    links = hash_chain(b"", tokens[: len(tokens) // page_tokens * page_tokens])
    step = page_tokens // LINK_TOKENS
    return links[step - 1 :: step]


def check(index: PageHashIndex, tokens: list[int], hashes: list[str]) -> None:
    """Every page's parts are those of the store pages that hold its tokens."""
    wanted = expected(tokens, index.page_tokens)
    for i, page in enumerate(index.find(hashes)):
        assert page is not None
        start = i * index.page_size
        parts = index.overlaps(page)
        covered = 0
        for part in parts:
            at = start + part.sglang_slice.start
            assert wanted[at // index.page_tokens] in part.links
            assert part.store_slice.start == at % index.page_tokens
            assert (
                part.store_slice.stop - part.store_slice.start
                == part.sglang_slice.stop - part.sglang_slice.start
            )
            covered += part.sglang_slice.stop - part.sglang_slice.start
        known = (start + index.page_size - 1) // index.page_tokens < len(wanted)
        assert covered == (index.page_size if known else 0)


@pytest.mark.parametrize(("page_size", "page_tokens"), PAIRS)
@settings(max_examples=15)
@given(data=st.data())
def test_page_hash_index_parts_equal_plain_chain(
    page_size: int, page_tokens: int, data: st.DataObject
) -> None:
    index = PageHashIndex(page_size, page_tokens)
    pages = data.draw(st.integers(1, 20))
    tokens = prompt(pages * page_size, data.draw(st.integers(0, 9)))
    hashes = hashes_of(tokens, page_size)
    done = 0
    while done < pages:  # as nodes of a tree come, in pieces
        more = data.draw(st.integers(1, pages - done))
        piece = tokens[done * page_size : (done + more) * page_size]
        index.record(hashes[done - 1] if done else None, hashes[done : done + more], piece, PLAIN)
        done += more
        if data.draw(st.booleans()):
            index.record(None, hashes[:done], tokens[: done * page_size], PLAIN)
    check(index, tokens, hashes)


@pytest.mark.parametrize(("page_size", "page_tokens"), [(16, 64), (32, 64), (64, 64), (128, 64)])
def test_page_hash_index_forked_prefix_keeps_both(page_size: int, page_tokens: int) -> None:
    index = PageHashIndex(page_size, page_tokens)
    shared = prompt(5 * page_size)
    a, b = shared + prompt(11 * page_size, 1), shared + prompt(11 * page_size, 2)
    for tokens in (a, b, a):
        index.record(None, hashes_of(tokens, page_size), tokens, PLAIN)
    check(index, a, hashes_of(a, page_size))
    check(index, b, hashes_of(b, page_size))


def test_siblings_of_small_page_fill_store_page() -> None:
    index = PageHashIndex(16, 64)
    tokens = prompt(128)
    hashes = hashes_of(tokens, 16)
    index.record(None, hashes, tokens, PLAIN)
    assert [name for name, _ in index.siblings(hashes[7])] == hashes[4:8]


def test_page_hash_index_page_without_prefix_is_not_recorded() -> None:
    index = PageHashIndex(64, 64)
    tokens = prompt(192)
    hashes = hashes_of(tokens, 64)
    index.record(hashes[0], hashes[1:], tokens[64:], PLAIN)
    assert index.find(hashes) == [None, None, None]
    index.record(None, hashes[:1], tokens[:64], PLAIN)
    index.record(hashes[0], hashes[1:], tokens[64:], CacheNamespace(None, "tenant"))
    assert index.find(hashes)[1:] == [None, None]


def test_page_hash_index_over_limit_drops_oldest() -> None:
    index = PageHashIndex(16, 16, max_bytes=10 * (page_hash_index._PAGE_BYTES + page_hash_index._END_BYTES))
    old, new = prompt(128), prompt(128, 3)
    index.record(None, hashes_of(old, 16), old, PLAIN)
    index.record(None, hashes_of(new, 16), new, PLAIN)
    assert len(index) == 10
    check(index, new, hashes_of(new, 16))
    assert index.find(hashes_of(old, 16))[0] is None


def test_page_hash_index_ends_before_foreign_medium() -> None:
    ours, foreign = placeholder_tokens(b"o" * 32), placeholder_tokens(b"f" * 32)
    index = PageHashIndex(16, 16, is_unkeyed=lambda token: token in foreign)
    tokens = prompt(96)
    tokens[20:24], tokens[70:74] = ours, foreign
    hashes = hashes_of(tokens, 16)
    index.record(None, hashes, tokens, PLAIN)
    assert [page is not None for page in index.find(hashes)] == [True] * 4 + [False] * 2
    assert [page.link for page in index.find(hashes[:4]) if page] == hash_chain(b"", tokens[:64])
    index.record(hashes[4], hashes[5:], tokens[80:], PLAIN)
    assert index.find(hashes)[5] is None


def test_page_hash_index_unaligned_sizes_are_refused() -> None:
    for sizes in ((1, 64), (24, 64), (48, 64), (64, 40)):
        with pytest.raises(ValueError, match="page sizes"):
            PageHashIndex(*sizes)


# -- the same keys as vLLM's -------------------------------------------------------------------


PAGE = PageGeometry(page_tokens=32, heads=2, layers=2, dim=64, dtype="float32")


def roots(lm: bytes = b"lm" * 16, **spec: Any) -> NamespaceRoots:
    return NamespaceRoots(SECRET, PAGE, lambda: (lm, {"config": "x", **spec}))


@pytest.mark.parametrize(("name", "salt", "page"), [("text", None, 32), ("text, salted", "tenant-1", 32)])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_page_keys_equal_golden_keys_of_vllm(name: str, salt: str | None, page: int, page_size: int) -> None:
    golden = [bytes.fromhex(key) for key in json.loads(GOLDEN.read_text())[name]]
    tokens = [(11 * i) % 997 for i in range(128)]
    space = CacheNamespace(None, salt)
    index = PageHashIndex(page_size, page)
    hashes = hashes_of(tokens, page_size, space)
    index.record(None, hashes, tokens, space)
    root = roots().root(space)
    links = [link for p in index.find(hashes) if p for part in index.overlaps(p) for link in part.links]
    keys = [page_key(SECRET, root, page, link) for link in dict.fromkeys(links)]
    assert keys[: len(golden)] == golden


# -- roots --------------------------------------------------------------------------------------


def test_namespace_roots_of_all_namespaces_differ() -> None:
    made = roots()
    spaces = [
        PLAIN,
        CacheNamespace(None, "a"),
        CacheNamespace("a", None),
        CacheNamespace("a", "a"),
        CacheNamespace("", None),
        CacheNamespace("", "a"),
    ]
    assert len({made.root(space) for space in spaces}) == len(spaces)
    assert made.root(PLAIN) == roots().root(PLAIN) != roots(lm=b"other").root(PLAIN)


def test_namespace_roots_failed_identity_keeps_reason() -> None:
    def fail() -> tuple[bytes, dict[str, Any]]:
        raise CheckpointError("no such file", reason="missing_file")

    made = NamespaceRoots(
        SECRET, PageGeometry(page_tokens=64, heads=1, layers=1, dim=1, dtype="float32"), fail
    )
    assert made.wait(60)
    with pytest.raises(CheckpointError) as refused:
        made.root(PLAIN)
    assert refused.value.reason == "missing_file"


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_roots, "_paths", {})
    monkeypatch.setattr(namespace_roots, "_ambiguous_ids", set())
    monkeypatch.setattr(namespace_roots, "_files", BackgroundLoraDigests())
    monkeypatch.setattr(lora_digests, "_CHECK_TIMEOUT_S", 10)  # a busy machine
    monkeypatch.setattr(namespace_roots.activation, "is_on", lambda: True)


class _Loras(dict[str, Any]):
    """Of a manager that has loaded whatever it is asked for: one weight, which it applies."""

    def get(self, name: str, default: Any = None) -> Any:
        return SimpleNamespace(
            layers=[SimpleNamespace(weights={"layers.0.q_proj.lora_A": 0})], embedding_layers={}
        )


SGLANG_LORA = SimpleNamespace(loras=_Loras(), target_modules={"q_proj"})


def adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def load(name: str, path: str | None) -> None:
    load_lora_adapter(SGLANG_LORA, SimpleNamespace(lora_id=name, lora_path=path, lora_name=name))


def test_namespace_roots_follow_lora_content(adapters: None, tmp_path: Path) -> None:
    one, same, other = (adapter(tmp_path / n, w) for n, w in (("1", b"w"), ("2", b"w"), ("3", b"v")))
    for name, path in (("id-one", one), ("id-same", same), ("id-other", other)):
        load(name, path)
    made = roots()
    plain, first = made.root(PLAIN), made.root(CacheNamespace("id-one", None))
    assert first == made.root(CacheNamespace("id-same", None))
    assert (
        len(
            {
                plain,
                first,
                made.root(CacheNamespace("id-other", None)),
                made.root(CacheNamespace("userid-one", None)),
            }
        )
        == 4
    )
    # As vLLM has it (tracked_requests.py, _root).
    spec = {"config": "x", "page": PAGE.spec(), "lora": LoraDigests().digest(one).hex()}
    assert first == kv_root(SECRET, b"lm" * 16, spec, None)


def test_namespace_roots_of_unknown_lora_are_refused(adapters: None, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"w")
    load("id-gone", str(tmp_path / "nowhere"))
    load("id-changed", path)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"other")
    load_from_tensors(None, SimpleNamespace(lora_id="id-tensors"))
    for name, reason in (
        ("id-gone", "lora"),
        ("id-changed", "lora_changed"),
        ("id-tensors", "lora"),
        ("id-changed|elastic", "lora"),
    ):
        with pytest.raises(CheckpointError) as refused:
            roots().root(CacheNamespace(name, None))
        assert refused.value.reason == reason


def test_namespace_roots_of_disputed_lora_are_refused(adapters: None, tmp_path: Path) -> None:
    load("id-one", adapter(tmp_path / "a", b"w"))
    roots().root(CacheNamespace("id-one", None))
    make_request(None, SimpleNamespace(lora_id=None, extra_key="id-one"))
    with pytest.raises(CheckpointError):
        roots().root(CacheNamespace("id-one", None))


# -- the hooks ----------------------------------------------------------------------------------


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(page_hash_index.activation, "is_on", lambda: True)
    yield page_hash_index.open_index(16, 64)
    page_hash_index.close_index()


def looked_up(tokens: list[int], prior: str | None, *, bigram: bool = False, salt: str | None = None) -> Any:
    key = RadixKey(array("q", tokens), is_bigram=bigram, cache_salt=salt)
    # As bound by the hook that is in place in this process, or not.
    original = inspect.unwrap(get_storage_hash_str)
    return storage_hash(original, key, prior, page_size=16)


def test_page_hash_hooks_lookup_is_recorded(index: PageHashIndex) -> None:
    tokens = prompt(160)
    check(index, tokens, looked_up(tokens, None))
    salted = looked_up(tokens, None, salt="a")
    assert all(page and page.space == CacheNamespace(None, "a") for page in index.find(salted))


def test_page_hash_hooks_pairs_of_tokens_are_the_pages_of_the_first_ones(index: PageHashIndex) -> None:
    """As SGLang hashes beside an EAGLE draft: the last pair's second token lies beyond the page."""
    tokens = prompt(160)
    for beyond in (7, 8):
        hashes = looked_up([*tokens, beyond], None, bigram=True)
        check(index, tokens, hashes)
    assert hashes != looked_up(tokens, None)
    page, plain = index.find([hashes[-1], looked_up(tokens, None)[-1]])
    assert page is not None
    assert plain is not None
    assert (page.end, page.link) == (plain.end, plain.link)


@pytest.mark.parametrize("prefix", [0, 128])
def test_first_page_of_pairs_of_tokens_is_sglangs(index: PageHashIndex, prefix: int) -> None:
    tokens = prompt(257)
    hashes = hashes_of(tokens, 16, in_pairs=True)
    first = early_lookup.hash_first_page(
        index, array("q", tokens[prefix:]), array("q", tokens[:prefix]),
        hashes[prefix // 16 - 1] if prefix else None, PLAIN, in_pairs=True,
    )  # fmt: skip
    assert first == hashes[prefix // 16]


def test_first_page_of_forgotten_prefix_records_it(index: PageHashIndex) -> None:
    tokens = prompt(256)
    hashes = hashes_of(tokens, 16)
    first = early_lookup.hash_first_page(
        index, array("q", tokens[128:]), array("q", tokens[:128]), hashes[7], PLAIN
    )
    assert first == hashes[8]
    # As far as the page of the store goes, which the next pages are a part of.
    assert [page is not None for page in index.find(hashes)] == [True] * 12 + [False] * 4
    looked_up(tokens[128:], hashes[7])
    check(index, tokens, hashes)


def test_first_page_with_wrong_prefix_records_nothing(index: PageHashIndex) -> None:
    tokens, wrong = prompt(256), prompt(256, 5)
    hashes = hashes_of(tokens, 16)
    early_lookup.hash_first_page(index, array("q", tokens[128:]), array("q", wrong[:128]), hashes[7], PLAIN)
    looked_up(tokens[128:], hashes[7])
    assert set(index.find(hashes[8:])) == {None}


class Tree:
    is_eagle = False

    def __init__(self, prefix: list[str] | None) -> None:
        self.prefix = prefix or []

    def get_prefix_hash_values(self, node: int) -> list[str]:
        return self.prefix

    def prefetch_anchor_info(self, node: int) -> tuple[str | None, str | None]:
        return None, "tenant" if node else None


def queue(
    self: Any, host_indices: Any, token_ids: Any, hash_value: Any = None, prefix_keys: Any = None
) -> int:
    """As SGLang's `write_storage`."""
    return 7


def back_up(node: int, tokens: list[int], hashes: list[str], prefix: list[str] | None) -> None:
    def write(self: Any, node_id: int) -> None:
        assert write_storage(queue, None, None, array("q", tokens), hashes, prefix) == 7

    write_backup_storage(write, SimpleNamespace(tree_core=Tree(prefix)), node)


def test_page_hash_hooks_backup_of_pairs_of_tokens_is_recorded(index: PageHashIndex) -> None:
    tokens = prompt(257)
    hashes = hashes_of(tokens, 16, in_pairs=True)
    back_up(0, tokens[:129], hashes[:8], [])
    back_up(0, tokens[128:], hashes[8:], hashes[:8])
    check(index, tokens[:256], hashes)


def test_page_hash_hooks_backup_is_recorded(index: PageHashIndex) -> None:
    tokens = prompt(256)
    hashes = hashes_of(tokens, 16, CacheNamespace(None, "tenant"))
    back_up(1, tokens[:96], hashes[:6], [])
    back_up(1, tokens[96:], hashes[6:], hashes[:6])
    check(index, tokens, hashes)
    assert all(page and page.space.cache_salt == "tenant" for page in index.find(hashes))


def test_page_hash_hooks_backup_without_prefix_is_not_recorded(index: PageHashIndex) -> None:
    tokens = prompt(64)
    back_up(0, tokens, hashes_of(tokens, 16), None)
    write_storage(queue, None, None, array("q", tokens), hashes_of(tokens, 16), [])
    assert len(index) == 0


def test_page_hash_hooks_inactive_record_nothing(
    index: PageHashIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_hash_index.activation, "is_on", lambda: False)
    looked_up(prompt(64), None)
    back_up(0, prompt(64), hashes_of(prompt(64), 16), [])
    assert len(index) == 0


def test_page_hash_hooks_record_only_known_media(index: PageHashIndex) -> None:
    identity = b"\x07" * 32
    tokens = prompt(128)
    tokens[64:68] = placeholder_tokens(identity)
    assert set(index.find(looked_up(tokens, None))[4:]) == {None}
    tokens_module.remember_identity(identity)
    check(index, tokens, looked_up(tokens, None))


def advance_of_index() -> Any:
    """How an index that the hooks fill computes the chain."""
    with mock.patch.object(page_hash_index, "PageHashIndex") as index:
        page_hash_index.open_index(16, 64)
    page_hash_index.close_index()
    return index.call_args.kwargs["compute_chain"]


@pytest.mark.parametrize("prior", [b"", bytes(range(32))])
def test_native_chain_equals_python_chain(prior: bytes) -> None:
    advance, tokens = advance_of_index(), prompt(64)
    assert advance is not hash_chain
    tokens[20:24] = placeholder_tokens(b"o" * 32)
    for made in (tokens, array("q", tokens)):
        assert advance(prior, made) == hash_chain(prior, made)


def test_changed_native_hash_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_hash_index, "_native_chain", lambda prior, tokens: [b"other"])
    assert advance_of_index() is hash_chain


def test_sglang_page_hashes_equal_get_hash_str() -> None:
    tokens = prompt(64)
    assert hashes_of(tokens, 16) == get_hash_str(tokens, None, 16)
