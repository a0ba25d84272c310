"""Lineages of media through vLLM's room: the keys that SGLang's room must make too."""

from __future__ import annotations

import lineage_vectors as vectors
import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from cornplug.vllm_connector.kv.page_keys import PageKeys


@pytest.mark.parametrize("case", vectors.CASES)
def test_page_keys_of_media_equal_vectors_of_both_engines(case: str) -> None:
    media = vectors.CASES[case]
    tokens = vectors.tokens(media)
    features = [
        MultiModalFeatureSpec(
            None, "image", f"cp1-{medium.key.hex()}", PlaceholderRange(medium.offset, medium.rows)
        )
        for medium in media
    ]
    keys = PageKeys(vectors.SECRET, vectors.ROOT, vectors.PAGE_TOKENS, features)
    assert [key.hex() for key in keys.keys_until(tokens, len(tokens))] == vectors.known()[case]


def test_lineages_of_other_row_counts_have_other_vectors() -> None:
    known = vectors.known()
    assert known.keys() == vectors.CASES.keys()
    whole, less = known["80 rows"], known["79 rows"]
    assert whole[0] == less[0]  # text
    assert not set(whole[1:]) & set(less[1:])
    eight, nine = known["80 rows, then 8"], known["80 rows, then 9"]
    assert eight[:4] == nine[:4] == known["80 rows"][:4]
    assert not set(eight[4:]) & set(nine[4:])
