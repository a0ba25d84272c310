"""`cornplug encoder`: a flag that cannot be is said before anything is read or listened at."""

from __future__ import annotations

import pytest

from cornplug.encoder_service.replicas.pool import cores
from cornplug.encoder_service.server import main
from cornplug.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "field", "remedy"),
    [
        (("--threads", "0"), "--threads", "1 or more"),
        (("--device", "tpu"), "--device", "cuda:N"),
        (("--device", "cuda:x"), "--device", "cuda:N"),
        (("--device", "cuda:4096"), "--device", "--device cpu"),
        (("--device", "cpu", "--replicas", str(cores() + 1)), "--replicas", f"1 to {cores()}"),
        (("--device", "cpu", "--replicas", "-1"), "--replicas", "or 0"),
    ],
)
def test_server_flags_bad_value_is_named_with_remedy(flags: tuple[str, ...], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(["--model", "/nowhere", *flags])
    assert error.value.field == field
    assert remedy in error.value.remedy


def test_server_flags_help_has_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--replicas", "--compile", "--threads", "--device"):
        entry = text[text.rindex(flag) :].split("\n  --")[0]
        assert "default" in entry, flag
