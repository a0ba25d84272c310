"""Our flags through SGLang's own parser, and what they make of its settings before any process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache import host_memory
from sglang.srt.mem_cache.pool_host import base as pool_base
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.errors import ConfigError
from cornplug.sglang_hooks import activation, compat, flags
from cornplug.sglang_hooks.kv import exclusions, hicache_config
from devkit import checkpoints

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
    monkeypatch.setattr(hicache_config, "compile_hash", lambda: None)
    load_plugins()
    yield
    activation.turn_off()


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory enough for HiCache, whatever this machine has."""
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: 64 << 30)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "text"))


def given(model: str, *args: str) -> ServerArgs:
    return prepare_server_args(["--model-path", model, "--device", "cpu", *args])


def resolved(model: str, *args: str) -> dict[str, Any]:
    """What SGLang makes of a command line, with all that happens before any process."""
    record = given(model, *args)
    record.resolve_once()
    found: dict[str, Any] = record.resolved_dict()
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: json.loads(value) if name.endswith("extra_config") and value else value
        for name, value in ours.items()
        # A port and a seed are drawn anew for each.
        if value != theirs[name] and name not in ("random_seed", "nccl_port", "port")
    }


def shares_kv(found: dict[str, Any]) -> bool:
    return bool(found["hicache_storage_backend"] == "dynamic" and found["enable_hierarchical_cache"])


def test_flags_differences_equal_golden_file(text: str) -> None:
    """What each set of flags changes, field by field; {} without any."""
    stock = resolved(text)
    produced = {
        name: {"settings": differences(resolved(text, *args), stock), "is_on": activation.is_on()}
        for name, args in (("none", []), ("--enable-cornplug", ["--enable-cornplug"]), ("all", ALL))
    }
    assert produced == json.loads(GOLDEN.read_text())


def test_flags_settings_reach_activation_config(text: str) -> None:
    given(text, *ALL)
    config = activation.config()
    assert (config.engine.app, config.engine.page_tokens) == ("chat", 128)
    assert (config.store.socket, config.store.size_bytes) == (Path("/run/s.sock"), 1 << 30)
    assert (config.store.deadline_s, config.encoder.deadline_s) == (0.2, 3)
    assert config.encoder.socket == Path("/run/e.sock")


def test_activation_config_file_edited_later_is_ignored(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are asked for with each image, on the scheduler's thread."""
    file = tmp_path / "cornplug.toml"
    file.write_text('[engine]\napp = "chat"\n')
    monkeypatch.setenv("CORNPLUG_CONFIG", str(file))
    given(text, "--enable-cornplug")
    assert activation.config().engine.app == "chat"
    file.write_text("no settings")
    assert activation.config().engine.app == "chat"
    with pytest.raises(ConfigError):
        given(text, "--enable-cornplug")


def test_activation_tower_of_the_service_error_names_sglangs_own_way() -> None:
    with pytest.raises(ConfigError, match="--language-only --encoder-urls"):
        activation.turn_on({"engine.tower": "service"})


def test_activation_is_on_with_any_flag(text: str) -> None:
    given(text)
    assert not activation.is_on()
    given(text, "--cornplug-app", "chat")
    assert activation.is_on()


def test_activation_of_next_server_needs_flag(text: str) -> None:
    given(text, "--enable-cornplug")
    given(text)
    assert not activation.is_on()


def test_flags_in_sglang_config_file_are_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump({"enable-cornplug": True, "cornplug-app": "chat", "page-size": 128}))
    found = resolved(text, "--config", str(file))
    assert activation.config().engine.app == "chat"
    assert (found["page_size"], found["enable_hierarchical_cache"]) == (128, True)


def test_hicache_config_keeps_given_settings(text: str) -> None:
    found = resolved(
        text, "--enable-cornplug", "--page-size", "32", "--enable-hierarchical-cache",
        "--hicache-ratio", "1.5", "--hicache-mem-layout", "layer_first",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", '{"prefetch_timeout_base": 7}',
    )  # fmt: skip
    assert (found["page_size"], found["hicache_ratio"]) == (32, 1.5)
    assert (found["hicache_mem_layout"], found["hicache_storage_prefetch_policy"]) == (
        "layer_first",
        "wait_complete",
    )
    extra = json.loads(found["hicache_storage_backend_extra_config"])
    assert (extra["prefetch_timeout_base"], extra["prefetch_threshold"]) == (7, 32)
    assert extra["class_name"] == "CornplugStorage"


@pytest.mark.parametrize(
    ("args", "policy"),
    [
        ([], "write_through_selective"),
        (["--cornplug-save", "always"], "write_through"),
        (["--cornplug-save", "never"], "write_through"),
        (["--hicache-write-policy", "write_back"], "write_back"),
    ],
)
def test_hicache_config_second_sight_is_sglangs_selective_policy(
    text: str, args: list[str], policy: str
) -> None:
    found = resolved(text, "--enable-cornplug", *args)
    assert shares_kv(found)
    assert found["hicache_write_policy"] == policy


def test_hicache_config_accepts_backend_given_by_hand(text: str) -> None:
    by_hand = json.dumps(hicache_config.BACKEND)
    args = (
        "--enable-cornplug", "--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic",
        "--hicache-storage-backend-extra-config", by_hand,
    )  # fmt: skip
    assert shares_kv(resolved(text, *args))
    # Where nothing is shared the operator's HiCache stays, without a storage behind it.
    found = resolved(text, *args, "--load-format", "dummy")
    assert (found["enable_hierarchical_cache"], found["hicache_storage_backend"]) == (True, None)


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
        ["--hicache-host-memory-mode", "buffer_only"],
    ],
)
def test_flags_in_conflict_error_names_both(text: str, args: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(text, "--enable-cornplug", *args)
    assert args[0] in str(caught.value)
    assert "--enable-cornplug" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("size", ["16", "32", "64", "128", "192"])
def test_hicache_config_accepts_aligned_page_sizes(text: str, size: str) -> None:
    found = resolved(text, "--enable-cornplug", "--page-size", size, "--chunked-prefill-size", "768")
    assert shares_kv(found)
    assert found["page_size"] == int(size)


@pytest.mark.parametrize(("chunk", "page"), [("4096", 64), ("96", 32), ("48", 16), ("-1", 64)])
def test_hicache_config_page_size_divides_prefill_chunk(text: str, chunk: str, page: int) -> None:
    found = resolved(text, "--enable-cornplug", "--chunked-prefill-size", chunk)
    assert (shares_kv(found), found["page_size"]) == (True, page)


def test_flags_embeddings_only_leave_cache_settings(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = resolved(text, "--disable-radix-cache")
    monkeypatch.setenv("CORNPLUG_ENGINE_SHARE_KV", "false")
    assert differences(resolved(text, "--enable-cornplug", "--disable-radix-cache"), stock) == {}


STANDALONE = (
    *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)

# What is said, and the settings or the model's config under which KV is not shared.
PREFILL = ["--disaggregation-mode", "prefill", "--page-size", "64"]

REASONS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("--load-format dummy", ["--load-format", "dummy"], {}),
    ("--attn-dp-size 2", ["--attn-dp-size", "2", "--tp-size", "2"], {}),
    ("--pp-size with --disaggregation-mode", [*PREFILL, "--pp-size", "2"], {}),
    ("--enable-pd-role-switch", [*PREFILL, "--enable-pd-role-switch"], {}),
    ("--is-embedding", ["--is-embedding"], {}),
    ("--chunked-prefill-size 100", ["--chunked-prefill-size", "100"], {}),
    ("hybrid model", [], {"layer_types": ["full_attention", "sliding_attention"]}),
    ("hybrid model", [], {"attention_chunk_size": 64}),
    ("hybrid model", [], {"index_topk": 2048}),
    (
        "quantised KV cache",
        [],
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "kv_cache_quant_algo": "FP8",
            }
        },
    ),
    (
        "quantised KV cache",
        ["--kv-cache-dtype", "fp8_e4m3"],
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            }
        },
    ),
]


def _model(text: str, folder: Path, config: dict[str, Any]) -> str:
    """The checkpoint `text` with these fields in its config.json."""
    if not config:
        return text
    shutil.copytree(text, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


@pytest.mark.parametrize(("said", "args", "config"), REASONS)
@pytest.mark.parametrize(
    "own", [[], ["--enable-hierarchical-cache", "--page-size", "32"]], ids=["", "HiCache"]
)
def test_hicache_config_without_kv_sharing_equals_stock(
    text: str, tmp_path: Path, said: str, args: list[str], config: dict[str, Any], own: list[str]
) -> None:
    """No pinned pool, no copies, no pages of 64 for nothing; and what the operator gave stays."""
    model = _model(text, tmp_path / "model", config)
    stock = resolved(model, *args, *own)
    # SGLang's parser takes all handlers from the root logger, pytest's too.
    with mock.patch.object(compat.logger, "warning") as warning:
        found = resolved(model, "--enable-cornplug", *args, *own)
    if own and "--chunked-prefill-size" in args:
        assert shares_kv(found)  # 100 is no multiple of 32 either: SGLang's own affair, with its own page
        return
    assert differences(found, stock) == {}
    warning.assert_called_once()
    assert said in str(warning.call_args)


def test_hicache_config_of_prefill_server_shares_with_a_page_size_of_its_pair(text: str) -> None:
    """SGLang hands no KV over between servers of other page sizes: the operator sets it on both."""
    free = ["--disaggregation-mode", "prefill"]
    assert differences(resolved(text, "--enable-cornplug", *free), resolved(text, *free)) == {}
    assert shares_kv(resolved(text, "--enable-cornplug", *PREFILL))


def test_hicache_config_of_prefill_complete_stays_off(text: str) -> None:
    """Under this policy SGLang refuses to start with a storage."""
    late = ["--disaggregation-transfer-backend", "mooncake"]
    late += ["--disaggregation-decode-allocation-policy", "prefill_complete"]
    stock = resolved(text, *PREFILL, *late)
    assert differences(resolved(text, "--enable-cornplug", *PREFILL, *late), stock) == {}


def test_hicache_config_is_set_after_sglang_checks(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVFP4 on SM100 SGLang raises where HiCache is on: it must not be while that is asked."""
    from sglang.srt.arg_groups import kv_cache_hook

    original, seen = kv_cache_hook.handle_kv4_compatibility, []

    def asked(server_args: Any) -> None:
        seen.append(resolving_view(server_args).enable_hierarchical_cache)
        original(server_args)

    monkeypatch.setattr(kv_cache_hook, "handle_kv4_compatibility", asked)
    assert shares_kv(resolved(text, "--enable-cornplug"))
    assert seen == [False]


@pytest.mark.parametrize("declared", [True, False], ids=["layer_types", ""])
@pytest.mark.parametrize("in_one_pool", [True, False])
def test_hicache_config_windows_are_shared_out_of_one_pool(
    tmp_path: Path, declared: bool, in_one_pool: bool
) -> None:
    """SGLang decides for Gemma 3 that KV of windows lies in the pool of all layers, for all tokens."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    folder = checkpoints.gemma3(tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text.pop("layer_types", None)
    if declared:
        text["layer_types"] = ["sliding_attention"] * (text["num_hidden_layers"] - 1) + ["full_attention"]
    text["is_hybrid_swa"] = not in_one_pool
    (folder / "config.json").write_text(json.dumps(config))
    record = given(str(folder), "--enable-cornplug")
    declare_resolution(record, "a model", disable_hybrid_swa_memory=in_one_pool)
    with mock.patch.object(compat.logger, "warning") as warning:
        hicache_config.declare_settings(record)
    assert resolving_view(record).enable_hierarchical_cache is in_one_pool
    assert ("a hybrid model" in str(warning.call_args)) is not in_one_pool


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_hicache_config_fp8_kv_is_shared_but_for_latents(text: str, tmp_path: Path, dtype: str) -> None:
    args = ("--enable-cornplug", "--kv-cache-dtype", dtype)
    assert shares_kv(resolved(text, *args))
    with mock.patch.object(compat.logger, "warning") as warning:
        latents = str(checkpoints.deepseek_v2(tmp_path / "latents"))
        record = given(latents, *args)
        hicache_config.declare_settings(record)
    assert not resolving_view(record).enable_hierarchical_cache
    assert f"--kv-cache-dtype {dtype} with MLA" in str(warning.call_args)


def test_hicache_config_kv_of_four_bits_is_stock(text: str) -> None:
    record = given(text, "--enable-cornplug", "--kv-cache-dtype", "fp4_mx_block16")
    with mock.patch.object(compat.logger, "warning") as warning:
        hicache_config.declare_settings(record)
    assert not resolving_view(record).enable_hierarchical_cache
    assert "--kv-cache-dtype fp4_mx_block16: cornplug shares only" in str(warning.call_args)


@pytest.mark.parametrize(
    ("args", "page"),
    [
        # SGLang ends the start of a server with trees in pages of several tokens, but for flashinfer's.
        (("--attention-backend", "torch_native"), 1),
        (("--attention-backend", "torch_native", "--speculative-ngram-max-bfs-breadth", "1"), 64),
        (("--attention-backend", "flashinfer"), 64),
    ],
)
def test_hicache_config_ngram_page_is_one_that_sglang_starts_with(
    text: str, args: tuple[str, ...], page: int
) -> None:
    found = resolved(text, "--enable-cornplug", "--speculative-algorithm", "NGRAM", *args)
    assert (found["page_size"], shares_kv(found)) == (page, page > 1)


def test_flags_of_ngram_server_that_shares_nothing_exclude_nothing(text: str) -> None:
    trees = ("--speculative-algorithm", "NGRAM", "--attention-backend", "torch_native")
    stock = resolved(text, *trees, "--disable-radix-cache")
    assert differences(resolved(text, "--enable-cornplug", *trees, "--disable-radix-cache"), stock) == {}


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("speculative_adaptive", True, "--speculative-adaptive True"),
        ("speculative_draft_window_size", 128, "--speculative-draft-window-size 128"),
        ("speculative_draft_sink_size", 4, "--speculative-draft-sink-size 4"),
        ("speculative_eagle_topk", 2, "--speculative-eagle-topk 2"),
        ("speculative_draft_load_format", "dummy", "--speculative-draft-load-format dummy"),
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm EAGLE3"),
    ],
)
def test_exclusions_of_a_draft_name_its_setting(text: str, field: str, value: object, why: str) -> None:
    settings = given(text, *STANDALONE)
    assert exclusions.deployment_exclusion(settings) == ""
    setattr(settings, field, value)
    assert exclusions.deployment_exclusion(settings).startswith(why)


@pytest.mark.parametrize(
    ("make", "args", "why"),
    [
        (checkpoints.qwen2_vl, ["--enable-multimodal"], "with a multimodal model"),
        (checkpoints.deepseek_v2, [], "with an MLA model"),
        (checkpoints.qwen2_text, ["--kv-cache-dtype", "fp8_e4m3"], "with an fp8 KV cache"),
    ],
)
def test_hicache_config_draft_beside_other_models_is_stock(
    tmp_path: Path, make: Callable[[Path], Path], args: list[str], why: str
) -> None:
    record = given(str(make(tmp_path / "model")), "--enable-cornplug", *STANDALONE, *args)
    with mock.patch.object(compat.logger, "warning") as warning:
        hicache_config.declare_settings(record)
    assert not resolving_view(record).enable_hierarchical_cache
    assert why in str(warning.call_args)


def test_hicache_config_full_attention_layers_share_kv(text: str, tmp_path: Path) -> None:
    layers = json.loads((Path(text) / "config.json").read_text())["num_hidden_layers"]
    model = _model(text, tmp_path / "model", {"layer_types": ["full_attention"] * layers})
    assert shares_kv(resolved(model, "--enable-cornplug"))


def test_hicache_config_windows_beside_full_attention_share_kv(tmp_path: Path) -> None:
    model = str(checkpoints.mellum(tmp_path / "model"))
    assert shares_kv(resolved(model, "--enable-cornplug"))


@pytest.mark.parametrize(
    "args",
    [
        ["--kv-cache-dtype", "fp8_e4m3"],
        ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"],
        STANDALONE,
    ],
)
def test_hicache_config_untested_beside_windows_of_their_own_is_stock(
    tmp_path: Path, args: Sequence[str]
) -> None:
    record = given(str(checkpoints.mellum(tmp_path / "model")), "--enable-cornplug", *args)
    with mock.patch.object(compat.logger, "warning") as warning:
        hicache_config.declare_settings(record)
    assert not resolving_view(record).enable_hierarchical_cache
    assert "with sliding windows in a separate pool" in str(warning.call_args)


@pytest.mark.parametrize(
    "unlike",
    [
        {"is_hybrid_swa": False},
        {"is_multimodal": True},  # attention in both directions
        {"sliding_window_size": None},
        {"swa_attention_layer_ids": [0]},  # a layer of no pool
        {"full_attention_layer_ids": [], "swa_attention_layer_ids": [0, 1, 2]},
        {"get_swa_num_kv_heads": lambda ranks: 1},
    ],
    ids=lambda unlike: next(iter(unlike)),
)
def test_exclusions_of_other_windows_keep_kv_stock(
    unlike: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed = {
        "is_hybrid_swa": True,
        "is_multimodal": False,
        "sliding_window_size": 128,
        "full_attention_layer_ids": [2],
        "swa_attention_layer_ids": [0, 1],
        "num_hidden_layers": 3,
        "get_num_kv_heads": lambda ranks: 2,
        "get_swa_num_kv_heads": lambda ranks: 2,
    }
    models = iter([SimpleNamespace(**windowed), SimpleNamespace(**windowed | unlike)])
    monkeypatch.setattr(overrides, "model_config_of", lambda args: next(models))
    assert exclusions.has_separate_window_pool(None)
    assert not exclusions.has_separate_window_pool(None)


def test_hicache_config_without_host_memory_stays_off(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang leaves 10 GiB of host memory alone, and with HiCache does not start where no more is free."""
    reserve = pool_base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    for free, shared in ((reserve, False), (reserve + (2 << 30), True)):
        monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda free=free, **_: free)
        assert shares_kv(resolved(text, "--enable-cornplug")) == shared
    # Who asks for HiCache by name hears of it from SGLang.
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: reserve)
    assert shares_kv(resolved(text, "--enable-cornplug", "--enable-hierarchical-cache"))


def test_hicache_config_without_compiler_equals_stock(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConfigError("--enable-cornplug", "SGLang cannot compile its page hash", "Install one.")

    stock = resolved(text)
    monkeypatch.setattr(hicache_config, "compile_hash", fail)
    assert differences(resolved(text, "--enable-cornplug"), stock) == {}


def test_hicache_config_settle_follows_sglang_decisions(text: str) -> None:
    """Some models and attention backends set a page size or disable the radix cache by themselves."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    for decision, shares in (
        ({"page_size": 1}, False),
        ({"page_size": 48}, False),
        ({"disable_radix_cache": True}, False),
        ({"page_size": 128}, True),
    ):
        record = given(text, "--enable-cornplug")
        declare_resolution(record, "a model", **decision)
        hicache_config.declare_settings(record)
        settled = resolving_view(record)
        assert settled.enable_hierarchical_cache is shares
        assert (settled.hicache_storage_backend == "dynamic") is shares


def test_exclusions_of_forced_misses_name_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang then takes no prefix from its tree, and so none that HiCache has loaded into it."""
    record = given(text, "--enable-cornplug")
    assert exclusions.exclusion_reason(record, page_tokens=64) == ""
    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", "1")
    assert "SGLANG_RADIX_FORCE_MISS" in exclusions.exclusion_reason(record, page_tokens=64)
    assert not shares_kv(resolved(text, "--enable-cornplug"))


@pytest.mark.parametrize(
    ("model", "blind"),
    [("internvl", True), ("llava_next", True), ("llava_onevision", True), ("qwen2_vl", False)],
)
def test_hicache_config_settle_blind_model_shares_no_kv(tmp_path: Path, model: str, blind: bool) -> None:
    """SGLang runs models that it has no class for with transformers' own. Once it has one, compare what it
    makes of their images (`test_families.py`), and see `compat.validated_families`."""
    folder = getattr(checkpoints, model)(tmp_path / model)
    record = given(str(folder), "--enable-cornplug", "--enable-multimodal")
    with mock.patch.object(compat.logger, "warning") as warning:
        hicache_config.declare_settings(record)
    assert resolving_view(record).enable_hierarchical_cache is not blind
    assert ("no prefix cache for images" in str(warning.call_args)) is blind


@pytest.mark.parametrize(
    ("args", "model", "wanted"),
    [
        ([], "qwen2_text", {"weights", "loaded", "kv", "idle_backups"}),
        (["--cornplug-save", "always"], "qwen2_text", {"weights", "loaded", "kv"}),
        (["--is-embedding"], "qwen2_text", {"weights"}),
        (["--kv-cache-dtype", "fp8_e4m3"], "qwen2_text", {"weights", "loaded", "kv", "idle_backups"}),
        (
            ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
            "qwen2_text",
            {"weights", "loaded", "kv", "idle_backups", "lora"},
        ),
        (["--enable-multimodal"], "qwen2_vl", {"weights", "loaded", "kv", "idle_backups", "images"}),
        (["--enable-multimodal"], "llava_next", {"weights", "loaded", "images", "llava"}),
        (
            ["--enable-multimodal", "--language-only", "--encoder-urls", "http://127.0.0.1:1"],
            "qwen2_vl",
            {"weights", "loaded", "kv", "idle_backups", "images", "encoder"},
        ),
    ],
)
def test_activation_needed_hooks_follow_flags_and_model(
    tmp_path: Path, args: list[str], model: str, wanted: set[str]
) -> None:
    folder = getattr(checkpoints, model)(tmp_path / model)
    resolved(str(folder), "--enable-cornplug", *args)
    assert activation.selected_parts() == wanted


def test_share_from_python_sets_config(text: str) -> None:
    flags.share({"engine.app": "batch"})
    assert activation.config().engine.app == "batch"
    with pytest.raises(ConfigError, match=r"engine\.nonsense"):
        flags.share({"engine.nonsense": "1"})


def test_share_in_untested_sglang_leaves_it_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VersionRange, "installed_version", lambda _: "0.5.24")
    flags.share({"engine.app": "chat"})
    assert not activation.is_on()
    assert "outside the tested range" in caplog.text


_UNTESTED = """
import json
from cornplug.checkpoints.tested_releases import VersionRange
VersionRange.installed_version = lambda self: "0.5.99"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from cornplug.sglang_hooks import activation
made = prepare_server_args({arguments})
made.resolve_once()
print(json.dumps([made.enable_hierarchical_cache, made.hicache_storage_backend, activation.is_on()]))
"""


def test_sglang_untested_release_starts_as_stock(zygote: Zygote, text: str) -> None:
    """The command line of an upgraded image starts the server, and the log says why nothing is shared."""
    line = ["--model-path", text, "--device", "cpu", "--enable-cornplug", "--cornplug-app", "chat"]
    code = _UNTESTED.replace("{arguments}", repr(line))
    done = zygote.run(code=code, env={"SGLANG_PLUGINS": "cornplug"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False, None, False]
    assert "SGLang 0.5.99 is outside the tested range" in done.stderr


def test_sglang_launch_with_conflict_exits_with_error(zygote: Zygote, text: str) -> None:
    """The whole command: SGLang swallows what plugins raise, but not this."""
    args = ["--model-path", text, "--device", "cpu", "--enable-cornplug", "--disable-radix-cache"]
    done = zygote.run(*args, module="sglang.launch_server")
    assert done.returncode == 1
    assert "--disable-radix-cache: cannot be combined with --enable-cornplug" in done.stderr


def test_sglang_help_lists_all_flags(zygote: Zygote) -> None:
    said = zygote.run("--help", module="sglang.launch_server").stdout
    assert all(flag in said for flag in ALL if flag.startswith("--"))
