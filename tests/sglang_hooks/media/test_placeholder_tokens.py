from __future__ import annotations

from types import SimpleNamespace

import pytest

from cornplug.identity import placeholder_tokens
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.media import placeholder_tokens as tokens_module

from ..hooked import hook_of
from ..media_rig import item

get_multimodal_inputs = hook_of(tokens_module, "Scheduler._get_multimodal_inputs")


@pytest.fixture(autouse=True)
def fresh() -> None:
    tokens_module.forget_all()


def test_placeholder_tokens_of_added_medium_are_keyed() -> None:
    tokens_module.remember_identity(b"a" * 32)
    assert all(
        tokens_module.is_keyed(v) and not tokens_module.is_unkeyed(v) for v in placeholder_tokens(b"a" * 32)
    )
    assert all(tokens_module.is_unkeyed(v) for v in placeholder_tokens(b"b" * 32))
    assert not tokens_module.is_unkeyed(151_655)


def test_placeholder_tokens_over_limit_forget_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_MAX_IDENTITIES", 2)
    for letter in (b"a", b"b", b"a", b"c"):
        tokens_module.remember_identity(letter * 32)
    keyed = {
        letter: [tokens_module.is_keyed(value) for value in placeholder_tokens(letter * 32)]
        for letter in (b"a", b"b", b"c")
    }
    assert keyed == {b"a": [True] * 4, b"b": [False] * 4, b"c": [True] * 4}


def test_placeholder_tokens_equal_sglang_padding_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "is_on", lambda: True)
    ours, theirs = item(1), item(2)
    tokens_module.assign_key(ours, b"k" * 32)
    theirs.set_hash(12345)
    get_multimodal_inputs(SimpleNamespace(mm_items=[ours, theirs]), None, None)
    assert all(tokens_module.is_keyed(v) for v in ours.padding_values())
    assert all(tokens_module.is_unkeyed(v) for v in theirs.padding_values())


def test_placeholder_tokens_of_rows_alone_are_unkeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV behind such a medium is not shared; the medium's rows are."""
    monkeypatch.setattr(activation, "is_on", lambda: True)
    alone = item(1)
    tokens_module.assign_key(alone, b"k" * 32, embedding_only=True)
    get_multimodal_inputs(SimpleNamespace(mm_items=[alone]), None, None)
    assert tokens_module.key_of(alone) == b"k" * 32
    assert all(tokens_module.is_unkeyed(v) for v in alone.padding_values())
    tokens_module.assign_key(alone, b"k" * 32)
    get_multimodal_inputs(SimpleNamespace(mm_items=[alone]), None, None)
    assert all(tokens_module.is_keyed(v) for v in alone.padding_values())


def test_placeholder_tokens_foreign_identity_gives_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's processors set one of what a client may claim, where no hook of ours has seen the item."""
    monkeypatch.setattr(activation, "is_on", lambda: True)
    kimi, hashed = item(1), item(2)
    kimi.set_identity(b"k" * 32)
    tokens_module.assign_key(hashed, b"h" * 32)
    hashed.set_hash(12345)
    get_multimodal_inputs(SimpleNamespace(mm_items=[kimi, hashed]), None, None)
    assert all(tokens_module.is_unkeyed(v) for one in (kimi, hashed) for v in one.padding_values())
    tokens_module.assign_key(kimi, b"o" * 32)
    assert tokens_module.key_of(kimi) == b"o" * 32
    tokens_module.clear_key(kimi)
    kimi.set_identity(b"k" * 32)
    assert tokens_module.key_of(kimi) is None


def test_placeholder_tokens_follow_row_count() -> None:
    """SGLang's tokens differ from the first on: its own prefix and embedding caches tell them apart."""
    few, more, same = item(1, rows=8), item(1, rows=9), item(1, rows=9, start=5)
    for one in (few, more, same):
        tokens_module.assign_key(one, b"k" * 32)
        assert tokens_module.key_of(one) == b"k" * 32
    assert not set(few.padding_sequence(8)) & set(more.padding_sequence(9))
    assert few.hash != more.hash
    assert more.padding_sequence(9) == same.padding_sequence(9)
    assert (more.hash, more.identity) == (same.hash, same.identity)


def test_placeholder_tokens_count_rows_of_all_runs() -> None:
    whole, broken = item(1, rows=8), item(1)
    broken.offsets = [(0, 2), (4, 6), (8, 9)]
    for one in (whole, broken):
        tokens_module.assign_key(one, b"k" * 32)
    assert whole.identity == broken.identity


def test_key_of_moved_item_stays_and_of_cut_item_ends() -> None:
    """As SGLang moves the items of a session's later turns."""
    one = item(1, rows=8)
    tokens_module.assign_key(one, b"k" * 32)
    one.offsets = [(100, 107)]
    assert tokens_module.key_of(one) == b"k" * 32
    one.offsets = [(100, 106)]
    assert tokens_module.key_of(one) is None


@pytest.mark.parametrize("said", [True, "k" * 32, b"k" * 31, None])
def test_key_of_value_set_by_client_is_none(said: object) -> None:
    one = item(1)
    one.set_identity(b"k" * 32)
    one.set("cornplug_key", said)
    assert tokens_module.key_of(one) is None


def test_placeholder_tokens_inactive_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "is_on", lambda: False)
    ours = item(1)
    tokens_module.assign_key(ours, b"k" * 32)
    get_multimodal_inputs(SimpleNamespace(mm_items=[ours]), None, None)
    assert all(tokens_module.is_unkeyed(v) for v in ours.padding_values())


def test_placeholder_tokens_of_replaced_tower_stand_for_unkeyed_media(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "is_on", lambda: True)
    monkeypatch.setattr(tokens_module.weights_guard, "epoch", lambda: 2)
    late, ours = item(1), item(2)
    tokens_module.assign_key(late, b"k" * 32)
    tokens_module.assign_key(ours, b"n" * 32, epoch=2)
    get_multimodal_inputs(SimpleNamespace(mm_items=[late, ours]), None, None)
    assert all(tokens_module.is_unkeyed(token) for token in late.padding_sequence(4))
    assert not any(tokens_module.is_unkeyed(token) for token in ours.padding_sequence(4))
    tokens_module.forget_all()
    assert all(tokens_module.is_unkeyed(token) for token in ours.padding_sequence(4))
