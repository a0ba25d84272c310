"""The seal of engines' HTTP requests: whatever is changed, swapped, repeated or old does not open."""

from __future__ import annotations

import time

import pytest
from expected_errors import expect_error

from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.formats.engine_seal import MAX_AGE_S, EngineSeal, InvalidSeal, SealChecker
from cornplug.errors import EncoderRefused, EncoderUnavailable

SECRET, OTHER = b"s" * 32, b"o" * 32


def test_seal_request_and_answer_open_for_the_holders_of_the_secret() -> None:
    seal = EngineSeal.new(SECRET)
    body = seal.seal_request(b"pixels of a picture")
    assert b"pixels" not in body
    theirs = SealChecker(SECRET).check(seal.authorization)
    assert theirs.open_request(body) == b"pixels of a picture"
    answer = theirs.seal_reply(b"rows of it")
    assert b"rows" not in answer
    assert seal.open_reply(answer) == b"rows of it"
    # A service that restarted answers a replayed request: no key and nonce serve two texts.
    assert theirs.seal_reply(b"rows of it") != answer


def test_seal_every_flipped_byte_and_every_truncation_is_noticed() -> None:
    seal = EngineSeal.new(SECRET)
    body, answer = seal.seal_request(b"pixels"), seal.seal_reply(b"rows")
    for sealed, opened in ((body, seal.open_request), (answer, seal.open_reply)):
        for i in range(len(sealed)):
            with pytest.raises(InvalidSeal):
                opened(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :])
            with pytest.raises(InvalidSeal):
                opened(sealed[:i])


def test_seal_answer_of_another_request_or_direction_does_not_open() -> None:
    one, two = EngineSeal.new(SECRET), EngineSeal.new(SECRET)
    with pytest.raises(InvalidSeal):
        two.open_reply(one.seal_reply(b"rows"))
    with pytest.raises(InvalidSeal):
        two.open_request(one.seal_request(b"pixels"))
    with pytest.raises(InvalidSeal):
        one.open_reply(bytes(32) + one.seal_request(b"pixels"))


def test_seal_checker_replays_old_proofs_and_other_secrets_are_refused() -> None:
    now = time.time()
    checker = SealChecker(SECRET, clock=lambda: now)
    seal = EngineSeal.new(SECRET)
    checker.check(seal.authorization)
    with expect_error(EncoderRefused, reason="unauthorized", match="already received"):
        checker.check(seal.authorization)
    with expect_error(EncoderRefused, reason="unauthorized", match="secret_file"):
        checker.check(EngineSeal.new(OTHER).authorization)
    fresh = EngineSeal.new(SECRET).authorization
    for text in ("", "Bearer x", fresh[:-8], fresh.lower(), engine_seal.SCHEME, engine_seal.SCHEME + "é"):
        with pytest.raises(EncoderRefused) as e:
            checker.check(text)
        assert e.value.reason == "unauthorized"
    for shift in (MAX_AGE_S + 5, -MAX_AGE_S - 5):
        with expect_error(EncoderRefused, reason="unauthorized", match="clocks"):
            SealChecker(SECRET, clock=lambda shift=shift: now + shift).check(fresh)  # type: ignore[misc]


def test_seal_checker_salts_are_remembered_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_seal, "MAX_SEEN_SALTS", 3)
    checker = SealChecker(SECRET)
    seals = [EngineSeal.new(SECRET) for _ in range(5)]
    for seal in seals:
        checker.check(seal.authorization)
    with pytest.raises(EncoderRefused):
        checker.check(seals[2].authorization)
    checker.check(seals[1].authorization)  # forgotten


def test_seal_other_version_is_told_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = EngineSeal.new(SECRET)
    monkeypatch.setattr(engine_seal, "PROTOCOL_VERSION", 99)
    body, answer = seal.seal_request(b"x"), seal.seal_reply(b"")
    monkeypatch.undo()
    assert seal.open_request(body) is None
    with expect_error(EncoderUnavailable, reason="encoder_version", match="version 99"):
        seal.open_reply(answer)
