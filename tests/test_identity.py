"""Keys: frozen by golden vectors, equal where inputs are equal, different where one differs.

A new scheme gets a new domain and new vectors: `python tests/test_identity.py` writes the
vectors that are not in the file yet, and changes none.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cornplug import identity

GOLDEN = Path(__file__).parent / "golden" / "identity.json"

SECRET = bytes(range(32))
A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))
SPEC = {"family": "llava", "layers": [23], "eps": 1e-05, "none": None, "text": "é", "on": True}
PIXELS = bytes(range(24))
WIDE = identity.placeholder_tokens(A)

Case = Callable[[], bytes]
CASES: dict[str, Case] = {
    "digest": lambda: identity.digest("domain", b"", b"part"),
    "keyed_digest": lambda: identity.keyed_digest(SECRET, "domain", b"part"),
    "canonical_json": lambda: identity.canonical_json(SPEC),
    "tensors_fingerprint": lambda: identity.tensors_fingerprint(
        [("b", "BF16", (2, 3), A), ("a", "F32", (), B), ("c", "F32", (0,), C)]
    ),
    "spec_fingerprint": lambda: identity.spec_fingerprint(SPEC),
    "model_identity": lambda: identity.model_identity(A, B, C),
    "pixels_digest": lambda: identity.pixels_digest("RGB", 4, 2, PIXELS),
    "frames_digest": lambda: identity.frames_digest(4, 2, [0.0, 0.5], [PIXELS, PIXELS[::-1]]),
    "processor_video_digest": lambda: identity.processor_video_digest(
        A, {"fps": 2.0, "frames_indices": [0, 4]}
    ),
    "samples_digest": lambda: identity.samples_digest(16_000, PIXELS),
    "array_digest": lambda: identity.array_digest("float32", (2, 3), PIXELS),
    "embedding_key": lambda: identity.embedding_key(SECRET, A, B, None),
    "embedding_key/salted": lambda: identity.embedding_key(SECRET, A, B, "tenant"),
    "feature_key": lambda: identity.feature_key(SECRET, A, B, [C, A], None),
    "kv_root": lambda: identity.kv_root(SECRET, A, SPEC, "tenant"),
    "media_item_lineage": lambda: identity.media_item_lineage(A, 1196),
    "placeholder_tokens": lambda: struct.pack("<4Q", *identity.placeholder_tokens(B)),
    "hash_chain": lambda: b"".join(identity.hash_chain(b"", list(range(32)))),
    "hash_chain/wide": lambda: b"".join(identity.hash_chain(A, [5, *WIDE * 4][:16])),
    "page_key": lambda: identity.page_key(SECRET, A, 64, B),
    "page_keys": lambda: b"".join(identity.page_keys(SECRET, A, 64, [B, C])),
    "media_digest_with_options": lambda: identity.media_digest_with_options(A, {"max_pixels": 784}),
    "trainer_identity": lambda: identity.trainer_identity(A, B, "step 7"),
    "identity_with_overrides": lambda: identity.identity_with_overrides(A, {"dtype": "float16"}),
}

NAMES_IN_GOLDEN = {
    "keyed_digest": "keyed",
    "canonical_json": "canonical",
    "media_item_lineage": "medium_lineage",
    "hash_chain": "chain",
    "hash_chain/wide": "chain/wide",
    "media_digest_with_options": "medium_with_options",
    "trainer_identity": "of_trainer",
    "identity_with_overrides": "overridden",
}
"""Names of vectors in the file whose functions have other names now."""


def golden_name(case: str) -> str:
    return NAMES_IN_GOLDEN.get(case, case)


def test_identity_every_public_function_has_a_golden_vector() -> None:
    public = {
        name
        for name, value in inspect.getmembers(identity, inspect.isfunction)
        if value.__module__ == identity.__name__ and not name.startswith("_")
    }
    assert {name.partition("/")[0] for name in CASES} == public
    assert json.loads(GOLDEN.read_text()).keys() == {golden_name(case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_identity_keys_equal_golden_vectors(case: str) -> None:
    assert CASES[case]().hex() == json.loads(GOLDEN.read_text())[golden_name(case)]


def test_digest_is_sha256_of_length_prefixed_parts() -> None:
    plain = b"".join(struct.pack(">Q", len(p)) + p for p in (b"name", b"", b"xyz"))
    assert identity.digest("name", b"", b"xyz") == hashlib.sha256(plain).digest()


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_digest_tells_every_split_of_its_parts_apart(a: list[bytes], b: list[bytes]) -> None:
    assert (identity.digest("d", *a) == identity.digest("d", *b)) == (a == b)


# --- keys ---

KeyParts = tuple[bytes, bytes, bytes, str | None]
digests = st.binary(min_size=32, max_size=32)
key_parts = st.tuples(digests, digests, digests, st.none() | st.text(max_size=5))


@given(key_parts, key_parts)
def test_embedding_key_is_equal_only_for_equal_inputs(a: KeyParts, b: KeyParts) -> None:
    assert (identity.embedding_key(*a) == identity.embedding_key(*b)) == (a == b)


@given(key_parts, st.integers(0, 2), st.integers(0, 255))
def test_embedding_key_any_flipped_bit_changes_it(parts: KeyParts, which: int, bit: int) -> None:
    changed: list[bytes | str | None] = list(parts)
    changed[which] = _flip(parts[which], bit)  # type: ignore[arg-type]
    assert identity.embedding_key(*changed) != identity.embedding_key(*parts)  # type: ignore[arg-type]


def test_embedding_key_no_salt_and_empty_salt_differ() -> None:
    keys = {identity.embedding_key(SECRET, A, B, salt) for salt in (None, "", "x")}
    roots = {identity.kv_root(SECRET, A, SPEC, salt) for salt in (None, "", "x")}
    features = {identity.feature_key(SECRET, A, B, [C], salt) for salt in (None, "", "x")}
    assert len(keys) == len(roots) == len(features) == 3


def test_identity_kinds_of_keys_never_meet() -> None:
    keys = [
        identity.embedding_key(SECRET, A, B, None),
        identity.feature_key(SECRET, A, B, [], None),
        identity.kv_root(SECRET, A, {}, None),
        identity.page_key(SECRET, A, 64, B),
    ]
    assert len(set(keys)) == len(keys)


def test_feature_key_depends_on_number_and_order_of_inputs() -> None:
    keys = {identity.feature_key(SECRET, A, B, inputs, None) for inputs in ([], [A], [A, B], [B, A], [A, A])}
    assert len(keys) == 5


def test_identity_lineage_is_of_one_key_and_row_count() -> None:
    lineages = {identity.media_item_lineage(key, rows) for key in (A, B) for rows in (0, 1, 2, 256)}
    assert len(lineages | {A, B}) == 10
    with pytest.raises(ValueError, match="32 bytes"):
        identity.media_item_lineage(A[:31], 1)
    with pytest.raises(ValueError, match="rows"):
        identity.media_item_lineage(A, -1)


def test_options_and_overrides_change_only_what_they_touch() -> None:
    assert identity.media_digest_with_options(A, {}) == A == identity.identity_with_overrides(A, {})
    touched = {
        identity.media_digest_with_options(A, {"x": 1}),
        identity.media_digest_with_options(A, {"x": 2}),
        identity.identity_with_overrides(A, {"x": 1}),
    }
    assert len(touched | {A}) == 4


# --- specs and weights ---

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_canonical_does_not_depend_on_the_order_of_fields(spec: dict[str, object]) -> None:
    reordered = dict(reversed(list(spec.items())))
    assert identity.canonical_json(spec) == identity.canonical_json(reordered)
    assert json.loads(identity.canonical_json(spec)) == spec


@pytest.mark.parametrize("value", [math.nan, math.inf, b"bytes", {1, 2}, object()])
def test_canonical_refuses_what_json_cannot_carry(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        identity.canonical_json({"field": value})


ROW = ("w", "F32", (2, 3), A)


@pytest.mark.parametrize(
    "other",
    [
        ("v", "F32", (2, 3), A),
        ("w", "BF16", (2, 3), A),
        ("w", "F32", (3, 2), A),
        ("w", "F32", (6,), A),
        ("w", "F32", (2, 3), B),
    ],
)
def test_identity_every_field_of_a_tensor_counts(other: tuple[str, str, tuple[int, ...], bytes]) -> None:
    assert identity.tensors_fingerprint([ROW]) != identity.tensors_fingerprint([other])


def test_identity_order_of_tensors_does_not_count() -> None:
    other = ("a", "F32", (1,), B)
    assert identity.tensors_fingerprint([ROW, other]) == identity.tensors_fingerprint([other, ROW])
    assert identity.tensors_fingerprint([ROW, other]) != identity.tensors_fingerprint([ROW])
    with pytest.raises(ValueError, match="twice"):
        identity.tensors_fingerprint([ROW, ROW])


# --- media ---


def test_identity_lossless_container_keeps_the_image() -> None:
    picture = Image.frombytes("RGB", (31, 17), hashlib.shake_256(b"picture").digest(31 * 17 * 3))
    seen = {
        _decoded_digest(picture, "PNG"),
        _decoded_digest(picture, "BMP"),
        _decoded_digest(picture, "TIFF"),
    }
    seen.add(_decoded_digest(picture, "WEBP", lossless=True))
    assert seen == {identity.pixels_digest("RGB", 31, 17, picture.tobytes())}


@given(st.integers(0, len(PIXELS) * 8 - 1))
def test_identity_flipped_bit_of_an_image_counts(bit: int) -> None:
    changed = _flip(PIXELS, bit)
    assert identity.pixels_digest("RGB", 4, 2, changed) != identity.pixels_digest("RGB", 4, 2, PIXELS)


def test_identity_mode_and_size_of_equal_bytes_count() -> None:
    seen = {
        identity.pixels_digest(mode, w, h, PIXELS)
        for mode, w, h in (("RGB", 4, 2), ("RGB", 2, 4), ("RGBA", 3, 2), ("L", 6, 4))
    }
    assert len(seen) == 4


def test_identity_rate_and_every_sample_of_audio_count() -> None:
    seen = {identity.samples_digest(rate, PIXELS[:size]) for rate in (8000, 16_000) for size in (20, 24)}
    assert len(seen) == 4


def test_array_digest_dtype_and_shape_of_equal_bytes_count() -> None:
    seen = {
        identity.array_digest(dtype, shape, PIXELS)
        for dtype, shape in (("float32", (6,)), ("int32", (6,)), ("float32", (2, 3)), ("float32", (6, 1)))
    }
    assert len(seen) == 4


# --- the page chain ---

tokens = st.lists(st.integers(0, (1 << 62) - 1), min_size=16, max_size=64).map(
    lambda t: t[: len(t) // 16 * 16]
)


@given(tokens, st.integers(0, 4), digests | st.just(b""))
def test_identity_advancing_link_by_link_equals_at_once(ids: list[int], cut: int, prior: bytes) -> None:
    head, tail = ids[: cut * 16], ids[cut * 16 :]
    first = identity.hash_chain(prior, head)
    assert first + identity.hash_chain(first[-1] if first else prior, tail) == identity.hash_chain(prior, ids)


@given(tokens, st.data())
def test_identity_changed_token_changes_later_links(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    before, after = identity.hash_chain(b"", ids), identity.hash_chain(b"", changed)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < at // 16 for i in range(len(same))]


def test_chain_is_the_published_scheme() -> None:
    narrow, wide = list(range(16)), [1 << 32, *range(15)]
    first = hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in narrow)).digest()
    second = hashlib.sha256(first + b"\xff" + b"".join(t.to_bytes(8, "little") for t in wide)).digest()
    assert identity.hash_chain(b"", narrow + wide) == [first, second]
    assert identity.hash_chain(b"", [*narrow[:15], (1 << 32) - 1]) != identity.hash_chain(
        b"", [*narrow[:15], 1 << 32]
    )


def link_by_definition(prior: bytes, link: list[int]) -> bytes:
    wide = max(link) >= 1 << 32
    packed = b"".join(token.to_bytes(8 if wide else 4, "little") for token in link)
    return hashlib.sha256(prior + (b"\xff" if wide else b"") + packed).digest()


@given(
    st.lists(st.integers(0, (1 << 32) + 1) | st.integers(0, 200_000), min_size=64, max_size=64),
    st.lists(st.integers(0, 200_000), min_size=64, max_size=64),
    digests | st.just(b""),
)
def test_chain_of_mixed_widths_is_that_of_its_links(mixed: list[int], text: list[int], prior: bytes) -> None:
    for ids in (text, mixed, text + mixed, mixed + text):
        expected, last = [], prior
        for at in range(0, len(ids), 16):
            last = link_by_definition(last, ids[at : at + 16])
            expected.append(last)
        assert identity.hash_chain(prior, ids) == identity.hash_chain(prior, tuple(ids)) == expected


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_chain_refuses_tokens_beyond_64_bits(wrong: int) -> None:
    with pytest.raises(struct.error):
        identity.hash_chain(b"", [*range(15), wrong])


def test_chain_wants_whole_links() -> None:
    assert identity.hash_chain(A, []) == []
    with pytest.raises(ValueError, match="17 tokens"):
        identity.hash_chain(b"", list(range(17)))


@given(digests)
def test_placeholder_tokens_are_beyond_any_vocabulary(lineage: bytes) -> None:
    assert all(1_000_000 <= token < 1 << 63 for token in identity.placeholder_tokens(lineage))


@given(digests, digests)
def test_placeholder_tokens_tell_media_apart(a: bytes, b: bytes) -> None:
    masked = [[w & ((1 << 62) - 1) for w in struct.unpack(">4Q", x)] for x in (a, b)]
    same = masked[0] == masked[1]
    assert (identity.placeholder_tokens(a) == identity.placeholder_tokens(b)) == same


@given(st.lists(st.integers(0, 999_999), min_size=16, max_size=16), digests, st.integers(0, 15))
def test_identity_link_with_placeholder_differs_from_tokens(
    plain: list[int], lineage: bytes, at: int
) -> None:
    with_medium = [*plain[:at], identity.placeholder_tokens(lineage)[at % 4], *plain[at + 1 :]]
    cut_to_32_bits = [token & ((1 << 32) - 1) for token in with_medium]
    assert identity.hash_chain(b"", with_medium) != identity.hash_chain(b"", plain)
    if cut_to_32_bits != with_medium:
        assert identity.hash_chain(b"", with_medium) != identity.hash_chain(b"", cut_to_32_bits)


def test_frames_and_times_enter_the_digest_and_microseconds_are_enough() -> None:
    frames = [PIXELS, PIXELS[::-1]]
    same = identity.frames_digest(4, 2, [0.0, 0.5], frames)
    assert identity.frames_digest(4, 2, [1e-9, 0.5 - 1e-9], (memoryview(f) for f in frames)) == same
    others = {
        identity.frames_digest(4, 2, [0.0, 0.6], frames),
        identity.frames_digest(4, 2, [0.0, 0.5], frames[::-1]),
        identity.frames_digest(2, 4, [0.0, 0.5], frames),
        identity.frames_digest(4, 2, [0.0], frames[:1]),
        identity.pixels_digest("RGB", 4, 2, PIXELS),
        identity.array_digest("uint8", (2, 2, 4, 3), PIXELS + PIXELS[::-1]),
    }
    assert len(others) == 6
    assert same not in others


@pytest.mark.parametrize(
    ("times_s", "frames"),
    [([0.0], []), ([], [PIXELS]), ([0.0], [PIXELS[1:]]), ([math.nan], [PIXELS]), ([math.inf], [PIXELS])],
)
def test_identity_contradictory_video_has_no_digest(times_s: list[float], frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"frame|zip"):
        identity.frames_digest(4, 2, times_s, frames)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_placeholder_tokens_short_lineage_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        identity.placeholder_tokens(bytes(size))


@given(st.lists(digests, max_size=4), digests)
def test_page_keys_are_keyed_digests_of_their_parts(values: list[bytes], root: bytes) -> None:
    expected = [
        identity.keyed_digest(SECRET, "cornplug-page-v3", root, struct.pack(">Q", 64), value)
        for value in values
    ]
    assert identity.page_keys(SECRET, root, 64, values) == expected


def test_page_key_page_size_and_root_enter_it() -> None:
    keys = {identity.page_key(SECRET, root, size, C) for root in (A, B) for size in (16, 64)}
    assert len(keys) == 4


def _flip(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def _decoded_digest(picture: Image.Image, container: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, container, **options)
    decoded = Image.open(file)
    return identity.pixels_digest(decoded.mode, *decoded.size, decoded.tobytes())


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    GOLDEN.write_text(
        json.dumps({golden_name(name): call().hex() for name, call in CASES.items()} | known, indent=1) + "\n"
    )
