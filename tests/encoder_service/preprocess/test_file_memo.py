"""The memo of decoded files: names, bounds, tenants."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from cornplug.encoder_service.preprocess import preparer
from cornplug.encoder_service.preprocess.preparer import DecodedFile, DecodedFileCache, decoded_file_key

RULE = {"modality": "image", "max_pixels": 10}


def entry(number: int) -> DecodedFile:
    return DecodedFile(bytes([number]) * 32, (number, number))


def test_file_memo_full_drops_least_recently_used() -> None:
    memo = DecodedFileCache(2)
    for number in (1, 2):
        memo.add(None, bytes([number]), entry(number))
    assert memo.look_up(None, b"\x01") == entry(1)
    memo.add(None, b"\x03", entry(3))
    assert [memo.look_up(None, bytes([n])) for n in (1, 2, 3)] == [entry(1), None, entry(3)]
    assert len(memo) == 2


def test_file_memo_flood_of_one_tenant_leaves_others_entries() -> None:
    memo = DecodedFileCache(8)
    memo.add("a", b"f", entry(1))
    for number in range(100):
        memo.add("b", bytes([number]), entry(number))
    assert memo.look_up("a", b"f") == entry(1)
    assert memo.look_up("b", b"f") is None
    assert len(memo) == 8


def test_file_memo_number_of_tenants_is_bounded() -> None:
    memo = DecodedFileCache(10_000)
    for number in range(3000):
        memo.add(str(number), b"f", entry(1))
    assert len(memo) == preparer._MAX_TENANTS
    assert memo.look_up("2999", b"f") == entry(1)
    assert memo.look_up("0", b"f") is None


def test_file_memo_default_is_bounded_in_bytes_for_any_salts() -> None:
    """The figure of the configuration's docs; a salt of SGLang's protocol has any length."""
    memo = DecodedFileCache(4096)
    tracemalloc.start()
    try:
        for number in range(4096):
            name = hashlib.sha256(number.to_bytes(4, "big"))
            shape = (1000 + number, 2000 + number)
            memo.add(f"{number % 512:0100000}", name.digest(), preparer.DecodedFile(name.digest(), shape))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(memo) == 4096
    assert held < 600 * 4096, held


def test_file_memo_no_salt_and_empty_salt_are_two_tenants() -> None:
    memo = DecodedFileCache(8)
    memo.add(None, b"f", entry(1))
    memo.add("", b"f", entry(2))
    assert (memo.look_up(None, b"f"), memo.look_up("", b"f")) == (entry(1), entry(2))
    assert memo.look_up("a", b"f") is None


def test_file_memo_repeated_entry_counts_once() -> None:
    memo = DecodedFileCache(4)
    for _ in range(10):
        memo.add(None, b"f", entry(1))
    assert len(memo) == 1


def test_file_memo_of_no_files_remembers_nothing() -> None:
    memo = DecodedFileCache(0)
    memo.add(None, b"f", entry(1))
    assert memo.look_up(None, b"f") is None


def test_file_name_depends_on_rule_bytes_and_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        decoded_file_key(RULE, [b"ab"]),
        decoded_file_key(RULE, [b"a", b"b"]),
        decoded_file_key(RULE, [b"ba"]),
        decoded_file_key({**RULE, "max_pixels": 11}, [b"ab"]),
        decoded_file_key({**RULE, "rule": "sglang-0.5.23"}, [b"ab"]),
    ]
    monkeypatch.setattr(preparer, "pillow_version", "0.0")
    preparer._decoder_versions.cache_clear()
    names.append(decoded_file_key(RULE, [b"ab"]))
    monkeypatch.undo()
    preparer._decoder_versions.cache_clear()
    assert len(set(names)) == len(names)
    assert names[0] == decoded_file_key(dict(reversed(RULE.items())), [b"ab"])
