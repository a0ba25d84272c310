"""Lineages of media through SGLang's room: the keys that vLLM's room must make too."""

from __future__ import annotations

from types import SimpleNamespace

import lineage_vectors as vectors
import pytest
from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

from cornplug.identity import page_key
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv_pages.page_hash_index import PageHashIndex
from cornplug.sglang_hooks.media import placeholder_tokens

from ..hooked import hook_of
from ..kv_rig import PLAIN, hashes_of
from ..media_rig import item

get_multimodal_inputs = hook_of(placeholder_tokens, "Scheduler._get_multimodal_inputs")


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("case", vectors.CASES)
def test_page_keys_of_media_equal_vectors_of_both_engines(
    case: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From items as the tokenizer names them, over the tokens that SGLang itself makes of these."""
    placeholder_tokens.forget_all()
    monkeypatch.setattr(activation, "is_on", lambda: True)
    items = []
    for medium in vectors.CASES[case]:
        items.append(item(start=medium.offset, rows=medium.rows))
        placeholder_tokens.assign_key(items[-1], medium.key)
    padded = MultimodalProcessorOutput.build_padded_input_ids(vectors.tokens(vectors.CASES[case]), items)
    assert padded is not None
    hashes = hashes_of(padded, page_size)
    index = PageHashIndex(page_size, vectors.PAGE_TOKENS, is_unkeyed=placeholder_tokens.is_unkeyed)
    index.record(None, hashes, padded, PLAIN)
    assert None in index.find(hashes)  # nobody has named them yet
    get_multimodal_inputs(SimpleNamespace(mm_items=items), None, None)
    index.record(None, hashes, padded, PLAIN)
    links = []
    for page in index.find(hashes):
        assert page is not None
        links += [part.links[-1] for part in index.overlaps(page)]
    keys = [page_key(vectors.SECRET, vectors.ROOT, vectors.PAGE_TOKENS, link).hex() for link in links]
    assert list(dict.fromkeys(keys)) == vectors.known()[case]
