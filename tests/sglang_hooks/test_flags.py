"""Our flags through SGLang's own parser, and what they make of its settings before any process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import yaml
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache import host_memory
from sglang.srt.mem_cache.pool_host import base as pool_base
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from cornplug.errors import ConfigError
from cornplug.sglang_hooks import active, compat, flags, hicache_settings, plugin
from cornplug.testing import checkpoints

from .zygote import Zygote

GOLDEN = Path(__file__).parents[1] / "golden" / "sglang_flags.json"

ALL = [
    "--enable-cornplug", "--cornplug-app", "chat", "--cornplug-store", "/run/s.sock",
    "--cornplug-store-size", "1073741824", "--cornplug-encoder", "/run/e.sock",
    "--cornplug-store-deadline", "0.2", "--cornplug-encoder-deadline", "3", "--cornplug-page-tokens", "128",
]  # fmt: skip


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Compiling takes half a minute, and what is here tested does not need it.
    monkeypatch.setattr(hicache_settings, "compile_hash", lambda: None)
    load_plugins()
    yield
    active.turn_off()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "text"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    )
    return str(folder)


def given(model: str, *args: str) -> ServerArgs:
    return prepare_server_args(["--model-path", model, "--device", "cpu", *args])


def filled(model: str, *args: str) -> ServerArgs:
    record = given(model, *args)
    if active.is_on():
        hicache_settings.fill_in(record, active.config())
    return record


def differences(record: ServerArgs, stock: ServerArgs) -> dict[str, Any]:
    ours, theirs = msgspec.structs.asdict(record), msgspec.structs.asdict(stock)
    return {
        name: json.loads(value) if name.endswith("extra_config") else value
        for name, value in ours.items()
        if value != theirs[name] and name != "random_seed"
    }


def test_golden(text: str) -> None:
    """What each set of flags changes, field by field; {} without any."""
    stock = given(text)
    produced = {
        name: {"settings": differences(filled(text, *args), stock), "is_on": active.is_on()}
        for name, args in (("none", []), ("--enable-cornplug", ["--enable-cornplug"]), ("all", ALL))
    }
    assert produced == json.loads(GOLDEN.read_text())


def test_settings_reach_the_processes(text: str) -> None:
    given(text, *ALL)
    config = active.config()
    assert (config.engine.app, config.engine.page_tokens) == ("chat", 128)
    assert (config.store.socket, config.store.size_bytes) == (Path("/run/s.sock"), 1 << 30)
    assert (config.store.deadline_s, config.encoder.deadline_s) == (0.2, 3)
    assert config.encoder.socket == Path("/run/e.sock")


def test_settings_edited_under_a_server_change_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are asked for with each picture, on the scheduler's thread."""
    file = tmp_path / "cornplug.toml"
    file.write_text('[engine]\napp = "chat"\n')
    monkeypatch.setenv("CORNPLUG_CONFIG", str(file))
    given(text, "--enable-cornplug")
    assert active.config().engine.app == "chat"
    file.write_text("no settings")
    assert active.config().engine.app == "chat"
    with pytest.raises(ConfigError):
        given(text, "--enable-cornplug")


def test_any_option_turns_it_on(text: str) -> None:
    given(text)
    assert not active.is_on()
    given(text, "--cornplug-app", "chat")
    assert active.is_on()


def test_the_next_server_of_a_process_shares_only_when_asked(text: str) -> None:
    given(text, "--enable-cornplug")
    given(text)
    assert not active.is_on()


def test_a_config_file_says_the_same(text: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump({"enable-cornplug": True, "cornplug-app": "chat", "page-size": 128}))
    record = filled(text, "--config", str(file))
    assert active.config().engine.app == "chat"
    assert (record.page_size, record.enable_hierarchical_cache) == (128, True)


def test_given_settings_stay(text: str) -> None:
    record = filled(
        text, "--enable-cornplug", "--page-size", "32", "--enable-hierarchical-cache",
        "--hicache-ratio", "1.5", "--hicache-mem-layout", "layer_first",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", '{"prefetch_timeout_base": 7}',
    )  # fmt: skip
    assert (record.page_size, record.hicache_ratio) == (32, 1.5)
    assert (record.hicache_mem_layout, record.hicache_storage_prefetch_policy) == (
        "layer_first",
        "wait_complete",
    )
    extra = json.loads(record.hicache_storage_backend_extra_config)
    assert (extra["prefetch_timeout_base"], extra["prefetch_threshold"]) == (7, 32)
    assert extra["class_name"] == "CornplugStorage"


def test_our_own_storage_may_be_given_by_hand(text: str) -> None:
    by_hand = json.dumps(hicache_settings.BACKEND)
    record = filled(
        text, "--enable-cornplug", "--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic",
        "--hicache-storage-backend-extra-config", by_hand,
    )  # fmt: skip
    assert hicache_settings.is_ours(record)


@pytest.mark.parametrize(
    "args",
    [
        ["--disable-radix-cache"],
        ["--hicache-storage-backend", "file"],
        ["--hicache-storage-backend", "dynamic"],
        ["--hicache-storage-backend-extra-config", "@backend.json"],
        ["--enable-unified-cache-external-linker"],
        ["--enable-lmcache"],
        ["--page-size", "1"],
        ["--page-size", "24"],
        ["--page-size", "96"],
        ["--page-size", "32", "--cornplug-page-tokens", "48"],
        ["--chunked-prefill-size", "100"],
    ],
)
def test_a_setting_that_excludes_sharing_is_refused_by_both_names(text: str, args: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        filled(text, "--enable-cornplug", *args)
    assert args[0] in str(caught.value)
    assert "--enable-cornplug" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("size", ["16", "32", "64", "128", "192"])
def test_pages_that_divide_or_are_multiples(text: str, size: str) -> None:
    assert filled(text, "--enable-cornplug", "--page-size", size).page_size == int(size)


def test_embeddings_only_leaves_the_cache_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORNPLUG_ENGINE_SHARE_KV", "false")
    assert differences(filled(text, "--enable-cornplug", "--disable-radix-cache"), given(text)) == {
        "disable_radix_cache": True
    }


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--pp-size", "2"], "--pp-size 2"),
        (["--attn-dp-size", "2"], "--attn-dp-size 2"),
        (["--load-format", "dummy"], "--load-format dummy"),
        (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE"),
        (["--disaggregation-mode", "decode"], "--disaggregation-mode decode"),
    ],
)
def test_a_deployment_that_cannot_share_kv_runs_and_says_so_once(
    text: str, args: list[str], named: str
) -> None:
    # SGLang's parser takes all handlers from the root logger, pytest's too.
    with mock.patch.object(compat.logger, "warning") as warning:
        record = filled(text, "--enable-cornplug", *args)
    assert not record.enable_hierarchical_cache
    warning.assert_called_once()
    assert named in str(warning.call_args)


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"text_config": {"layers_block_type": ["mamba", "attention"]}},
        {"full_attention_interval": 4},
        {"index_topk": 2048},
    ],
)
def test_a_hybrid_model_runs_without_shared_kv(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some", **config}))
    assert not filled(str(tmp_path), "--enable-cornplug").enable_hierarchical_cache


def test_full_attention_in_every_layer_is_no_hybrid(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert filled(str(tmp_path), "--enable-cornplug").enable_hierarchical_cache


def test_without_room_for_hicache_the_server_starts_all_the_same(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang leaves 10 GiB of host memory alone, and with HiCache does not start where no more is free."""
    reserve = pool_base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    for free, shared in ((reserve, False), (reserve + (2 << 30), True)):
        monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda free=free, **_: free)
        assert bool(filled(text, "--enable-cornplug").enable_hierarchical_cache) == shared
    # Who asks for HiCache by name hears of it from SGLang.
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: reserve)
    assert (
        filled(text, "--enable-cornplug", "--enable-hierarchical-cache").hicache_storage_backend == "dynamic"
    )


def test_what_sglang_decides_itself_withdraws_kv(text: str) -> None:
    """Some models and attention backends set a page size or disable the radix cache by themselves."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    for decision in ({"page_size": 1}, {"page_size": 48}, {"disable_radix_cache": True}):
        record = filled(text, "--enable-cornplug")
        declare_resolution(record, "a model", **decision)
        hicache_settings.settle(record)
        settled = resolving_view(record)
        assert (settled.enable_hierarchical_cache, settled.hicache_storage_backend) == (False, None)


@pytest.mark.parametrize(
    ("model", "blind"),
    [("internvl", True), ("llava_next", True), ("llava_onevision", True), ("qwen2_vl", False)],
)
def test_a_model_whose_pictures_are_all_alike_in_the_prompt_shares_no_kv(
    tmp_path: Path, model: str, blind: bool
) -> None:
    """SGLang runs models that it has no class for with transformers' own. Once it has one, compare what it
    makes of their pictures (`test_families.py`), and see `compat.PROVEN`."""
    folder = getattr(checkpoints, model)(tmp_path / model)
    record = filled(str(folder), "--enable-cornplug", "--enable-multimodal")
    with mock.patch.object(compat.logger, "warning") as warning:
        hicache_settings.settle(record)
    assert resolving_view(record).enable_hierarchical_cache is not blind
    assert ("no prefix cache for pictures" in str(warning.call_args)) is blind


def test_settle_leaves_what_fits(text: str) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    record = filled(text, "--enable-cornplug")
    declare_resolution(record, "a model", page_size=128)
    hicache_settings.settle(record)
    assert resolving_view(record).enable_hierarchical_cache


def test_share_from_python(text: str) -> None:
    flags.share({"engine.app": "batch"})
    assert active.config().engine.app == "batch"
    with pytest.raises(ConfigError, match=r"engine\.nonsense"):
        flags.share({"engine.nonsense": "1"})


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.24")
    with pytest.raises(ConfigError, match="outside the tested range"):
        flags.share()
    monkeypatch.setattr(sys, "argv", ["serve", "--model-path", text, "--cornplug-app=chat"])
    with pytest.raises(SystemExit, match="outside the tested range"):
        plugin.register()
    monkeypatch.setattr(sys, "argv", ["serve", "--model-path", text])
    plugin.register()


def test_the_server_stops_before_any_process(zygote: Zygote, text: str) -> None:
    """The whole command: SGLang swallows what plugins raise, but not this."""
    args = ["--model-path", text, "--device", "cpu", "--enable-cornplug", "--disable-radix-cache"]
    done = zygote.run(*args, module="sglang.launch_server")
    assert done.returncode == 1
    assert "--disable-radix-cache: excludes --enable-cornplug" in done.stderr


def test_help_lists_them(zygote: Zygote) -> None:
    said = zygote.run("--help", module="sglang.launch_server").stdout
    assert all(flag in said for flag in ALL if flag.startswith("--"))
