"""Sizes with and without units, as flags, files and variables take them."""

from __future__ import annotations

import argparse

import pytest

from cornplug.settings import parse_byte_size, parse_size_argument


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5kb", 1500), ("65536", 65536), ("7 b", 7)],
)
def test_bytes_of_units_give_bytes(text: str, size_bytes: int) -> None:
    assert parse_byte_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "4 gigs", "-1", "0", "GiB", "4IB", "4GiB 5GiB"])
def test_bytes_of_other_text_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write 64GiB"):
        parse_byte_size(text)


def test_parse_size_error_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=parse_size_argument)
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "4 gigs"])
    assert "argument --size: '4 gigs' is not a size: write 64GiB" in capsys.readouterr().err
