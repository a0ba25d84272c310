"""`cornplug encoder`: a flag that cannot be is said before anything is read or listened at."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cornplug.checkpoints.model_family import PRECISION_VARIABLES
from cornplug.encoder_service import server, server_flags
from cornplug.encoder_service.replica import count_cores
from cornplug.encoder_service.server import main
from cornplug.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "field", "remedy"),
    [
        (("--threads", "0"), "--threads", "1 or more"),
        (("--device", "tpu"), "--device", "cuda:N"),
        (("--device", "cuda:x"), "--device", "cuda:N"),
        (("--device", "cuda:4096"), "--device", "--device cpu"),
        (("--device", "cpu", "--replicas", str(count_cores() + 1)), "--replicas", f"1 to {count_cores()}"),
        (("--device", "cpu", "--replicas", "-1"), "--replicas", "or 0"),
    ],
)
def test_server_flags_bad_value_is_named_with_remedy(flags: tuple[str, ...], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(["--model", "/nowhere", *flags])
    assert error.value.field == field
    assert remedy in error.value.remedy


def test_server_flags_of_another_precision_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's images set one of these; the value counts in the keys (`numeric_class`)."""
    for name in PRECISION_VARIABLES:
        monkeypatch.setenv(name, "1")
    server_flags.check_flags(
        server_flags.build_parser("").parse_args(["--model", "/nowhere", "--device", "cpu"])
    )


def test_server_flags_help_has_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--replicas", "--compile", "--threads", "--device"):
        entry = text[text.rindex(flag) :].split("\n  --")[0]
        assert "default" in entry, flag


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("device", "replicas", "asked", "threads"),
    [
        ("cpu", 2, 3, 1),
        ("cpu", 0, 3, 3),
        ("cpu", 0, None, max(1, count_cores() - 1)),
        ("cuda:0", 0, None, 1),
        ("cuda", 0, 3, 3),
    ],
)
def test_server_torch_threads_where_cores_only_prepare_are_one(
    monkeypatch: pytest.MonkeyPatch, device: str, replicas: int, asked: int | None, threads: int
) -> None:
    class Registry:
        @staticmethod
        def open(*args: Any, **options: Any) -> Registry:
            return Registry()

        def loaded_models(self) -> tuple[()]:
            return ()

    given: list[int] = []

    def open_replicas(devices: list[str], settings: Any, models: Any) -> list[Any]:
        given.append(settings.threads)
        return []

    monkeypatch.setattr(server, "ModelRegistry", Registry)
    monkeypatch.setattr(server, "open_replicas", open_replicas)
    torch.set_num_threads(2)
    args = argparse.Namespace(
        model=["m"], dtype="float32", device=device, compile=False, replicas=replicas, threads=asked
    )
    server._open_models(args, print)
    assert torch.get_num_threads() == threads
    assert given == ([3] if replicas else [])
