"""Each check against a host in the state that it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cornplug import config
from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.commands import doctor
from cornplug.commands.engine_checks import ENGINES
from cornplug.commands.fingerprint import describe
from cornplug.encoder_service.formats.messages import ServedModel
from cornplug.errors import EncoderUnavailable
from cornplug.private_paths import read_secret
from devkit import checkpoints
from devkit.engines import StoreProcess

DOWN = EncoderUnavailable("no service", reason="encoder_down")


@pytest.fixture
def settings(short_path: Path) -> config.StoreConfig:
    return config.StoreConfig(
        socket=short_path / "s.sock", secret_file=short_path / "secret", size_bytes=64 << 20, autostart=False
    )


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llava(tmp_path_factory.mktemp("doctor") / "llava")


def statuses(findings: list[doctor.CheckResult]) -> list[tuple[str, str]]:
    return [(f.status, f.check) for f in findings]


def served(report: dict[str, str], *, name: str = "m") -> ServedModel:
    return ServedModel(
        name=name,
        family=report["family"],
        identity=bytes.fromhex(report["identity"]),
        tower_fp=bytes.fromhex(report["tower"]),
        projector_fp=bytes.fromhex(report["projector"]),
        spec_fp=bytes(32),
        dtype=report["dtype"],
        hidden_size=64,
    )


def test_doctor_secret_each_fault_has_a_finding(settings: config.StoreConfig) -> None:
    (absent,) = doctor.check_secret(settings)
    assert (absent.status, settings.secret_file.exists()) == ("ok", False)

    read_secret(settings.secret_file)
    (good,) = doctor.check_secret(settings)
    assert good.status == "ok"

    settings.secret_file.chmod(0o644)
    (open_,) = doctor.check_secret(settings)
    assert (open_.status, "chmod 600" in open_.remedy) == ("fail", True)

    settings.secret_file.write_bytes(b"short")
    (short,) = doctor.check_secret(settings)
    assert (short.status, "5 bytes" in short.what) == ("fail", True)


def test_doctor_store_that_is_down_has_a_remedy(settings: config.StoreConfig) -> None:
    assert statuses(list(doctor.check_store(settings))) == [("fail", "store"), ("ok", "shared memory")]
    assert not settings.secret_file.exists(), "looking must not make a secret"

    lazy = settings.model_copy(update={"autostart": True})
    read_secret(lazy.secret_file)
    assert statuses(list(doctor.check_store(lazy)))[0] == ("warn", "store")
    assert not lazy.socket.exists(), "looking must not start a store"


def test_doctor_store_that_answers_shows_its_usage(settings: config.StoreConfig) -> None:
    env = {"CORNPLUG_STORE_SECRET_FILE": str(settings.secret_file)}
    with StoreProcess(settings.socket, size="64MiB", env=env):
        (finding,) = doctor.check_store(settings)
    assert finding.status == "ok"
    assert "of 64 MiB used, 0 entries" in finding.what
    assert f"{64 << 20} bytes, as set by store.size_bytes" in finding.what
    assert "a quarter" in doctor.size_source(settings.model_copy(update={"size_bytes": None}), 1)
    assert "another" in doctor.size_source(settings, 1)


def test_doctor_shared_memory_too_small_is_a_warning(settings: config.StoreConfig) -> None:
    (small,) = doctor.check_shared_memory(settings.model_copy(update={"size_bytes": 1 << 60}))
    assert (small.status, "CORNPLUG_STORE_SIZE_BYTES" in small.remedy) == ("warn", True)
    (default,) = doctor.check_shared_memory(settings.model_copy(update={"size_bytes": None}))
    assert (default.status, "bytes, a quarter of that" in default.what) == ("ok", True)


def test_doctor_folder_each_fault_has_a_finding(
    settings: config.StoreConfig, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (good,) = doctor.check_folder(settings)
    assert (good.status, "mode 700" in good.what) == ("ok", True)
    short_path.chmod(0o770)
    (open_,) = doctor.check_folder(settings)
    assert (open_.status, "0770" in open_.what) == ("fail", True)
    inner = settings.model_copy(update={"socket": short_path / "run" / "s.sock"})
    (absent,) = doctor.check_folder(inner)
    assert (absent.status, "created on first use" in absent.what) == ("ok", True)
    (short_path / "run").mkdir(mode=0o700)
    (movable,) = doctor.check_folder(inner)
    assert (movable.status, "chmod +t" in movable.remedy) == ("warn", True)
    (short_path / "link").symlink_to("run")
    (link,) = doctor.check_folder(settings.model_copy(update={"socket": short_path / "link" / "s.sock"}))
    assert (link.status, "symbolic link" in link.what) == ("fail", True)


def test_doctor_checks_each_encoder_of_another_host(short_path: Path) -> None:
    urls = "http://127.0.0.1:1, http://127.0.0.1:2"
    said = {"encoder.engine_urls": urls, "store.secret_file": short_path / "s"}
    read_secret(short_path / "s")
    checked = [
        next(doctor.check_encoder(one.encoder, doctor.describe_encoder(one)))
        for one in doctor.settings_by_encoder(config.load(said))
    ]
    assert statuses(checked) == [("warn", "encoder")] * 2
    assert [one.what[:19] for one in checked] == ["http://127.0.0.1:1:", "http://127.0.0.1:2:"]
    read_secret(config.load().store.secret_file)
    own = config.load({"encoder.engine_urls": "http://127.0.0.1:1"})
    refused = next(doctor.check_encoder(own.encoder, doctor.describe_encoder(own)))
    assert (refused.status, "store.secret_file" in refused.what) == ("fail", True)


def test_doctor_encoder_that_is_down_is_a_warning(short_path: Path) -> None:
    settings = config.load({"encoder.socket": short_path / "e.sock", "store.secret_file": short_path / "s"})
    secrets: list[bytes] = []
    for _ in range(2):
        described = doctor.describe_encoder(settings)
        assert isinstance(described, EncoderUnavailable)
        assert statuses(list(doctor.check_encoder(settings.encoder, described))) == [("warn", "encoder")]
        # Without a secret no service can have run; one is not made by asking.
        assert settings.store.secret_file.exists() == bool(secrets)
        secrets.append(read_secret(settings.store.secret_file))


def test_doctor_model_that_encoder_serves_is_ok(llava: Path) -> None:
    report = describe(str(llava), "float32")
    described = (served(report),)
    assert statuses(list(doctor.check_model(str(llava), "float32", described))) == [("ok", "model")] * 2


def test_doctor_model_served_in_another_dtype_is_found(llava: Path) -> None:
    described = (served(describe(str(llava), "bfloat16"), name="half"),)
    _, finding = doctor.check_model(str(llava), "float32", described)
    assert finding.status == "warn"
    assert "same tower as half (bfloat16)" in finding.what
    assert f"--model {llava} --dtype float32" in finding.remedy


def test_doctor_model_without_tower_is_told_apart(tmp_path: Path) -> None:
    text = checkpoints.qwen2_text(tmp_path / "text")
    (finding,) = doctor.check_model(str(text), None, DOWN)
    assert (finding.status, "no tower" in finding.what) == ("ok", True)


def test_doctor_model_that_is_absent_fails(tmp_path: Path) -> None:
    (finding,) = doctor.check_model(str(tmp_path), None, DOWN)
    assert finding.status == "fail"


def test_report_is_json_and_the_status_says_failed(short_path: Path) -> None:
    (short_path / "secret").write_bytes(b"short")
    env = {**os.environ, "VLLM_PLUGINS": "none", "CORNPLUG_STORE_SECRET_FILE": str(short_path / "secret")}
    run = subprocess.run(
        [sys.executable, "-m", "cornplug.cli", "doctor", "--json"], capture_output=True, text=True, env=env
    )
    assert run.returncode == 1, run.stderr
    failed = {f["check"] for f in json.loads(run.stdout) if f["status"] == "fail"}
    assert failed == {"vllm plugin", "secret"}


def test_doctor_table_shows_brackets_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = doctor.CheckResult("warn", "extra", "missing", "pip install 'cornplug[encoder]'")
    monkeypatch.setattr(doctor, "run_checks", lambda *_: [finding])
    monkeypatch.setattr(doctor, "Console", lambda: Console(width=120))
    assert doctor.main([]) == 0
    assert "pip install 'cornplug[encoder]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "both", "remedy"),
    [(["--", "--tp", "2"], False, "--model"), (["--model", "m", "--", "--tp", "2"], True, "--engine")],
)
def test_doctor_flags_without_model_or_engine_name_what_is_missing(
    words: list[str],
    both: bool,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        VersionRange, "installed_version", lambda self: ["0.32.0", "0.5.23"][self.package == "sglang"]
    )
    monkeypatch.setattr(doctor.engine_checks, "ENGINES", ENGINES if both else ENGINES[:1])
    with pytest.raises(SystemExit):
        doctor.main(words)
    assert remedy in capsys.readouterr().err.splitlines()[-1]


def test_doctor_flags_reach_the_engine_behind_the_dtype(
    settings: config.StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(doctor.engine_checks, "check_plugins", lambda: ())
    monkeypatch.setattr(
        doctor.engine_checks, "check_sharing", lambda _, model, flags: asked.append((model, flags)) or ()
    )
    monkeypatch.setattr(doctor, "check_model", lambda *_: ())
    list(doctor.run_checks(config.Config(store=settings), ["m"], "float16", ["--tp", "2"], ENGINES[:1]))
    assert asked == [("m", ["--dtype", "float16", "--tp", "2"])]
