"""Page keys of whole requests: what changes them, what does not, and their frozen values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from cornplug import identity
from cornplug.identity import media_item_lineage, placeholder_tokens
from cornplug.kv_page import PageGeometry
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.media.mm_identifiers import key_of

GOLDEN = Path(__file__).parents[2] / "golden" / "page_keys.json"
SECRET = bytes(range(32))
A, B = "cp1-" + "aa" * 32, "cp1-" + "bb" * 32
PLACEHOLDER = 32000


def feature(
    identifier: str, offset: int, length: int, mask: list[bool] | None = None
) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset, length, None if mask is None else torch.tensor(mask))
    return MultiModalFeatureSpec(None, "image", identifier, place)


def prompt(length: int, *media: tuple[int, int]) -> list[int]:
    tokens = [(11 * i) % 997 for i in range(length)]
    for offset, size in media:
        tokens[offset : offset + size] = [PLACEHOLDER] * size
    return tokens


def root(**spec: Any) -> bytes:
    lm, salt = spec.pop("lm", b"lm" * 16), spec.pop("salt", None)
    page = PageGeometry(page_tokens=32, heads=2, layers=2, dim=64, dtype=spec.pop("dtype", "float32"))
    return identity.kv_root(SECRET, lm, {"config": "x", "page": page.spec(), **spec}, salt)


def keys(tokens: list[int], *features: MultiModalFeatureSpec, page: int = 32, **spec: Any) -> list[bytes]:
    return PageKeys(SECRET, root(**spec), page, features).keys_until(tokens, len(tokens))


def test_page_keys_are_one_per_whole_page() -> None:
    tokens = prompt(100)
    assert len(keys(tokens)) == 3
    assert len(set(keys(tokens))) == 3
    assert PageKeys(SECRET, root(), 32, ()).keys_until(tokens, 31) == []
    assert keys(tokens)[:2] == keys(tokens[:64])


def test_page_keys_depend_on_all_tokens_before() -> None:
    tokens = prompt(96)
    first = [tokens[0] + 1, *tokens[1:]]
    assert not set(keys(tokens)) & set(keys(first))
    last = [*tokens[:-1], tokens[-1] + 1]
    assert keys(tokens)[:2] == keys(last)[:2]
    assert keys(tokens)[2] != keys(last)[2]


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "tenant"}, {"salt": ""}, {"lm": b"other lm"}, {"lora": "ab"}, {"dtype": "bfloat16"},
        {"quantization": "fp8"}, {"max_model_len": 4096},
    ],
)  # fmt: skip
def test_page_keys_change_with_every_root_input(change: dict[str, Any]) -> None:
    tokens = prompt(96)
    assert not set(keys(tokens)) & set(keys(tokens, **change))


def test_page_keys_of_another_page_size_differ() -> None:
    tokens = prompt(128)
    assert not set(keys(tokens, page=32)) & set(keys(tokens, page=64))


@given(st.data())
def test_page_keys_extended_equal_keys_made_at_once(data: st.DataObject) -> None:
    tokens = prompt(400, (20, 70), (130, 40))
    features = [feature(B, 130, 40), feature(A, 20, 70, [i % 3 != 0 for i in range(70)])]
    whole = keys(tokens, *features)
    growing = PageKeys(SECRET, root(), 32, features)
    ends = data.draw(st.lists(st.integers(0, 400), max_size=8))
    for end in ends:
        known = tokens[: max([end, *ends[: ends.index(end)]])]
        assert growing.keys_until(known, end) == whole[: end // 32]


def test_page_keys_of_swapped_images_differ() -> None:
    tokens = prompt(160, (10, 40), (70, 40))
    there = keys(tokens, feature(A, 10, 40), feature(B, 70, 40))
    swapped = keys(tokens, feature(B, 10, 40), feature(A, 70, 40))
    assert not set(there) & set(swapped)
    # The order in which vLLM lists them says nothing.
    assert keys(tokens, feature(B, 70, 40), feature(A, 10, 40)) == there


def test_page_keys_of_image_at_two_places_differ() -> None:
    tokens = prompt(160, (0, 32), (64, 32))
    twice = keys(tokens, feature(A, 0, 32), feature(A, 64, 32))
    assert len(set(twice)) == len(twice)
    assert twice[:2] == keys(prompt(160, (0, 32)), feature(A, 0, 32))[:2]
    assert twice[2] != keys(tokens, feature(A, 0, 32), feature(B, 64, 32))[2]


def test_page_keys_of_shifted_image_differ() -> None:
    tokens = prompt(96, (0, 96))
    assert keys(tokens, feature(A, 1, 95))[0] != keys(tokens, feature(A, 0, 95))[0]


def test_page_keys_of_other_row_count_differ_from_first_row() -> None:
    """Which rows a processor makes of an image may depend on how many there are in the prompt (h2ovl)."""
    tokens = prompt(160, (40, 80))
    few, more = keys(tokens, feature(A, 40, 72)), keys(tokens, feature(A, 40, 80))
    assert few[0] == more[0] == keys(tokens)[0]
    assert not set(few[1:]) & set(more[1:])


def test_page_keys_number_rows_and_keep_tokens_between() -> None:
    """SGLang knows no others. Those that stand for themselves are in the chain as they are."""
    masked = [i % 10 != 9 for i in range(80)]
    rows = placeholder_tokens(media_item_lineage(b"\xaa" * 32, 72))
    there = iter([rows[i % 4] for i in range(72)])
    tokens = prompt(160, (40, 80))
    seen = [next(there) if 40 <= i < 120 and masked[i - 40] else tokens[i] for i in range(160)]
    assert keys(tokens, feature(A, 40, 80, masked)) == keys(seen)


def test_page_keys_follow_mask_of_embedded_positions() -> None:
    """Rows count on: the embedding at a position is named by its row, not by its position."""
    tokens = prompt(32, (0, 8))
    full = keys(tokens, feature(A, 0, 8))
    assert keys(tokens, feature(A, 0, 8, [True] * 8)) == full
    gap = keys(tokens, feature(A, 0, 8, [True] * 3 + [False] + [True] * 4))
    other_gap = keys(tokens, feature(A, 0, 8, [True] * 4 + [False] + [True] * 3))
    assert len({*full, *gap, *other_gap}) == 3
    # Where nothing is embedded the tokens speak for themselves.
    assert keys(tokens, feature(A, 0, 8, [False] * 8)) == keys(tokens)


def test_page_keys_ignore_token_at_placeholder() -> None:
    tokens = prompt(32, (4, 8))
    others = [5 if token == PLACEHOLDER else token for token in tokens]
    assert keys(tokens, feature(A, 4, 8)) == keys(others, feature(A, 4, 8))


@pytest.mark.parametrize(
    "foreign", ["some-uuid", "local-" + "aa" * 32, "7:" + A, "cp1-" + "aa" * 31, "cp1-" + "AA" * 32]
)
def test_page_keys_end_before_foreign_medium(foreign: str) -> None:
    tokens = prompt(160, (70, 20), (100, 20))
    named = PageKeys(SECRET, root(), 32, [feature(A, 100, 20), feature(foreign, 70, 20)])
    assert named.limit == 70
    assert named.keys_until(tokens, 160) == keys(tokens)[:2]
    several = PageKeys(
        SECRET, root(), 32, [feature(foreign, 100, 20), feature("x", 70, 20), feature("y", 120, 9)]
    )
    assert several.limit == 70


def test_key_of_malformed_identifier_is_none() -> None:
    assert key_of(A) == b"\xaa" * 32
    assert key_of("cp1-" + "zz" * 32) is None
    assert key_of(A + "0") is None
    assert key_of(A + "\n") is None
    assert key_of("") is None


def vectors() -> dict[str, Any]:
    """Whole requests, as JSON holds them."""
    masked = [i % 4 != 3 for i in range(40)]
    cases: dict[str, tuple[list[int], list[MultiModalFeatureSpec], dict[str, Any]]] = {
        "text": (prompt(100), [], {}),
        "text, salted": (prompt(100), [], {"salt": "tenant-1"}),
        "text, 64-token pages": (prompt(130), [], {"page": 64}),
        "one picture": (prompt(100, (5, 40)), [feature(A, 5, 40)], {}),
        "a picture with a mask": (prompt(100, (5, 40)), [feature(A, 5, 40, masked)], {}),
        "two pictures": (prompt(140, (5, 40), (60, 40)), [feature(A, 5, 40), feature(B, 60, 40)], {}),
        "a foreign picture behind ours": (
            prompt(140, (5, 40), (100, 20)),
            [feature(A, 5, 40), feature("uuid", 100, 20)],
            {},
        ),
    }
    return {
        name: [key.hex() for key in keys(tokens, *features, **spec)]
        for name, (tokens, features, spec) in cases.items()
    }


def test_page_keys_equal_golden_vectors() -> None:
    """A change here makes every store useless: it needs a new version in the key's domain name."""
    assert vectors() == json.loads(GOLDEN.read_text())
