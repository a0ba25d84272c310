"""What vLLM resolved, as identities: every setting is in the key, known harmless, or refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from expected_errors import expect_error
from vllm import config as vllm_config
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.transformers_utils.config import get_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.model_family import PRECISION_VARIABLES
from cornplug.engine_common.engine_config import AS_OVERRIDE, FieldTables, find_misplaced
from cornplug.errors import CheckpointError
from cornplug.identity import canonical_json
from cornplug.vllm_connector.media import early_prefill
from cornplug.vllm_connector.model import model_config as model
from cornplug.vllm_connector.model import model_fields, runtime_fields, setting_verdicts
from cornplug.vllm_connector.model.model_config import kv_identity, tower_identity
from cornplug.vllm_connector.model.setting_verdicts import transformers_backend
from devkit import checkpoints
from devkit.quantised import quantised

TABLES: dict[str, FieldTables] = {
    tables.class_name: tables
    for module in (model_fields, model_fields, runtime_fields)
    for tables in vars(module).values()
    if isinstance(tables, FieldTables)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def resolved(folder: Path) -> Any:
    """A real VllmConfig of plain flags. One for all: vLLM takes seconds to resolve it."""
    return EngineArgs(model=str(folder), dtype="float32", max_model_len=1024).create_engine_config()


@pytest.fixture
def changed(resolved: Any) -> Callable[..., Any]:
    """The same config with some fields of one part set otherwise."""

    def change(part: str, **fields: Any) -> Any:
        config = copy.copy(resolved)
        config.model_config = copy.copy(resolved.model_config)
        config.model_config.multimodal_config = copy.copy(resolved.model_config.multimodal_config)
        owner = config.model_config.multimodal_config if part == "multimodal_config" else None
        if owner is None:
            setattr(config, part, owner := copy.copy(getattr(config, part)))
        for name, value in fields.items():
            object.__setattr__(owner, name, value)
        return config

    return change


def kv_key(config: Any) -> tuple[bytes, bytes]:
    fingerprint, spec = kv_identity(config)
    return fingerprint, canonical_json(spec)


def test_tower_identity_with_quantised_llm_is_unchanged(resolved: Any, folder: Path, tmp_path: Path) -> None:
    """vLLM writes counts of heads into the checkpoint's own quantisation config."""
    model = quantised(folder, tmp_path / "w8a8")
    config = EngineArgs(model=str(model), dtype="float32", max_model_len=1024).create_engine_config()
    assert tower_identity(config).identity == tower_identity(resolved).identity
    assert kv_key(config) != kv_key(resolved)


def test_kv_identity_names_the_draft_whose_kv_pages_hold(
    changed: Callable[..., Any], resolved: Any, tmp_path: Path
) -> None:
    """Another draft of the same model would find pages that it did not compute, and propose badly."""

    def speculating(draft: Path, dtype: torch.dtype = torch.float32, quantization: str | None = None) -> Any:
        config = changed("model_config")
        config.speculative_config = SimpleNamespace(
            method="draft_model",
            uses_draft_kv_cache=lambda: True,
            draft_model_config=SimpleNamespace(
                model=str(draft), revision=None, dtype=dtype, quantization=quantization
            ),
        )
        return config

    one, other = (checkpoints.qwen2_text(tmp_path / str(seed), llm_seed=seed) for seed in (1, 2))
    keys = {
        kv_key(config)
        for config in (
            resolved,
            speculating(one),
            speculating(other),
            speculating(one, dtype=torch.bfloat16),
            speculating(one, quantization="fp8"),
        )
    }
    assert len(keys) == 5
    assert kv_key(speculating(one)) in keys
    ngram = changed("model_config")
    ngram.speculative_config = SimpleNamespace(method="ngram", uses_draft_kv_cache=lambda: False)
    assert kv_key(ngram) == kv_key(resolved)


def test_kv_identity_of_latents_is_equal_in_processes_with_and_without_the_model(tmp_path: Path) -> None:
    """vLLM's DeepSeek renames the rotary embedding in the config of the process that loads it."""
    folder = checkpoints.deepseek_v2(tmp_path / "model", kv_lora_rank=512, rope_dim=64)
    config = EngineArgs(model=str(folder), dtype="float32", max_model_len=1024).create_engine_config()
    rope = config.model_config.hf_config.rope_parameters
    before = kv_key(config)
    rope["rope_type"] = "deepseek_yarn"
    assert kv_key(config) == before
    assert rope["rope_type"] == "deepseek_yarn"
    rope["rope_type"] = "linear"
    assert kv_key(config) != before


@pytest.mark.parametrize("name", TABLES)
def test_field_tables_hold_each_field_once(name: str) -> None:
    """Fails with the names of what a release of vLLM has added."""
    fields = dataclasses.fields(CLASSES[name])
    assert find_misplaced(TABLES[name], (one.name for one in fields)) == {}


def _parts(config_class: Any) -> Iterator[tuple[str, Any]]:
    """(field, config class in its type)"""
    for name, hint in get_type_hints(config_class).items():
        for inner in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(inner) and str(getattr(inner, "__module__", "")).startswith("vllm"):
                yield name, inner


def _classes() -> dict[str, Any]:
    """The config classes below VllmConfig, but for those of fields that are judged as a whole."""
    found: dict[str, Any] = {}
    left: list[Any] = [vllm_config.VllmConfig]
    while left:
        config_class = left.pop()
        tables = TABLES.get(config_class.__name__)
        found[config_class.__name__] = config_class
        for name, inner in _parts(config_class) if tables is not None else ():
            whole = name in tables.harmless or name in tables.refused
            if not whole and tables.in_key.get(name) != AS_OVERRIDE and inner.__name__ not in found:
                left.append(inner)
    return found


CLASSES = _classes()


def test_field_tables_cover_all_config_classes() -> None:
    """Fails with the names of config classes that a release of vLLM has added."""
    assert set(CLASSES) == set(TABLES)


# Flags that are no field of a config class: where their value goes, or "" for logs, ports and processes.
_FLAGS = {
    **dict.fromkeys(
        ("aggregate_engine_logging", "disable_log_stats", "enable_log_requests", "log_config_file"), ""
    ),
    **dict.fromkeys(
        ("data_parallel_multi_port_external_lb", "fail_on_environ_validation", "tokens_only"), ""
    ),
    **dict.fromkeys(
        ("gdn_prefill_backend", "kda_decode_backend", "kda_prefill_backend"), "VllmConfig.additional_config"
    ),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "VllmConfig.speculative_config"),
    "data_parallel_address": "ParallelConfig.data_parallel_master_ip",
    "data_parallel_start_rank": "ParallelConfig.data_parallel_rank",
    "device_ids": "ParallelConfig.assigned_physical_gpu_ids",
    "enable_lora": "VllmConfig.lora_config",
    "enable_mamba_cache_stochastic_rounding": "MambaConfig.enable_stochastic_rounding",
    "limit_mm_per_prompt": "MultiModalConfig.limit_per_prompt",
    "lora_target_modules": "LoRAConfig.target_modules",
    "mamba_backend": "MambaConfig.backend",
    "mamba_cache_philox_rounds": "MambaConfig.stochastic_rounding_philox_rounds",
    "mamba_ssu_algorithm": "MambaConfig.ssu_algorithm",
    "mm_processor_device": "MultiModalConfig.mm_processor_kwargs",
    "scheduling_policy": "SchedulerConfig.policy",
}


def test_every_flag_is_field_that_is_judged() -> None:
    """Fails with the names of flags that a release of vLLM has added."""
    every = {name for tables in TABLES.values() for name in _names(tables)}
    whole = [inner for tables in TABLES.values() for inner in _judged_whole(tables)]
    every |= {one.name for inner in whole for one in dataclasses.fields(inner)}
    flags = {one.name for one in dataclasses.fields(AsyncEngineArgs)}
    assert flags - every == set(_FLAGS)
    for place in filter(None, _FLAGS.values()):
        owner, _, name = place.partition(".")
        assert name in _names(TABLES[owner])


def _names(tables: FieldTables) -> set[str]:
    return {*tables.in_key, *tables.harmless, *tables.refused}


def _judged_whole(tables: FieldTables) -> Iterator[Any]:
    for name, inner in _parts(CLASSES[tables.class_name]):
        if name in tables.harmless or name in tables.refused or tables.in_key.get(name) == AS_OVERRIDE:
            yield inner


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("kernel_config", {"moe_backend": "marlin"}),
        ("kernel_config", {"linear_backend": "deep_gemm"}),
        ("kernel_config", {"linear_backend_per_quant": {"fp8": "marlin"}}),
        ("attention_config", {"use_prefill_query_quantization": True}),
        ("attention_config", {"indexer_kv_dtype": "fp8"}),
        ("attention_config", {"backend": AttentionBackendEnum.TURBOQUANT}),
        ("compilation_config", {"inductor_compile_config": {"emulate_precision_casts": True}}),
    ],
)
def test_identities_contain_kernels_that_compute_otherwise(
    changed: Callable[..., Any], resolved: Any, part: str, fields: dict[str, Any]
) -> None:
    config = changed(part, **fields)
    assert kv_key(config) != kv_key(resolved)
    assert tower_identity(config).identity != tower_identity(resolved).identity
    assert tower_identity(config).served_identity is None, "no encoder service computes so"


def test_identities_contain_additional_config(changed: Callable[..., Any], resolved: Any) -> None:
    """Flags of some kernels end there (--gdn-prefill-backend), and settings of platforms."""
    config = changed("model_config")
    config.additional_config = {"gdn_prefill_backend": "triton"}
    assert kv_key(config) != kv_key(resolved)
    config.additional_config = SimpleNamespace(compute_hash=lambda: "x")
    with expect_error(CheckpointError, reason="settings", match="additional_config"):
        kv_identity(config)


@pytest.mark.parametrize("variable", PRECISION_VARIABLES)
def test_identities_contain_precision_of_environment(
    resolved: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    plain, tower = kv_key(resolved), tower_identity(resolved)
    monkeypatch.setenv(variable, "1")
    assert kv_key(resolved) != plain
    # An encoder service with the same value has these embeddings.
    ours, checkpoint = tower_identity(resolved), Checkpoint.open(resolved.model_config.model)
    assert ours.identity != tower.identity
    assert ours.served_identity == ours.identity == checkpoint.identity("float32").identity
    monkeypatch.setenv(variable, "0")
    assert tower_identity(resolved).identity not in (ours.identity, tower.identity)
    monkeypatch.setenv(variable, "")
    assert tower_identity(resolved) == tower
    assert kv_key(resolved) == plain


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("attention_config", {"backend": AttentionBackendEnum.FLASH_ATTN, "flash_attn_version": 3}),
        ("compilation_config", {"backend": "eager", "custom_ops": ["all"]}),
        ("compilation_config", {"inductor_compile_config": {"combo_kernels": True, "size_asserts": False}}),
        ("scheduler_config", {"max_num_batched_tokens": 512, "policy": "priority"}),
        ("kernel_config", {"enable_flashinfer_autotune": False}),
    ],
)
def test_identities_ignore_what_orders_and_dispatches(
    changed: Callable[..., Any], resolved: Any, part: str, fields: dict[str, Any]
) -> None:
    config = changed(part, **fields)
    assert kv_key(config) == kv_key(resolved)
    assert tower_identity(config) == tower_identity(resolved)


def test_ec_manager_of_cornplug_is_known() -> None:
    assert {early_prefill._MANAGER} == runtime_fields.EC_MANAGER.same_as_default["encoder_cache_manager_cls"]


def test_identity_of_plain_flags_has_no_overrides(resolved: Any) -> None:
    """Else no two engines would share, nor would the encoder service."""
    tower = tower_identity(resolved)
    assert tower.identity == tower.served_identity
    spec = kv_identity(resolved)[1]
    assert (spec["overrides"], "length" in spec) == ({}, False)


@pytest.mark.parametrize(
    ("part", "fields", "named"),
    [
        ("model_config", {"hf_config_path": "/elsewhere"}, "hf_config_path"),
        ("model_config", {"model_class_overrides": {"A": "m:B"}}, "model_class_overrides"),
        ("model_config", {"code_revision": "abc"}, "code_revision"),
        ("model_config", {"config_format": "mistral"}, "config_format"),
        ("model_config", {"runner_type": "pooling"}, "runner"),
        ("model_config", {"hf_overrides": lambda config: config}, "hf_overrides"),
        ("model_config", {"model_weights": "s3://x"}, "model_weights"),
        ("load_config", {"model_loader_extra_config": {"tensorizer_uri": "x"}}, "tensorizer_uri"),
        ("load_config", {"safetensors_load_strategy": "torchao"}, "safetensors_load_strategy"),
        ("load_config", {"ignore_patterns": ["*00002*"]}, "ignore_patterns"),
        ("parallel_config", {"worker_cls": "mine.Worker"}, "worker_cls"),
        (
            "compilation_config",
            {"inductor_passes": {"post_grad_custom_pre_pass": "mine.f"}},
            "inductor_passes",
        ),
        ("compilation_config", {"inductor_compile_config": {"pass": object()}}, "inductor_compile_config"),
        ("compilation_config", {"backend": "mine.compile"}, "CompilationConfig.backend"),
        ("ec_manager_config", {"encoder_cache_manager_cls": "mine.Cache"}, "encoder_cache_manager_cls"),
    ],
)
def test_identity_with_unidentifiable_setting_is_refused(
    changed: Callable[..., Any], part: str, fields: dict[str, Any], named: str
) -> None:
    config = changed(part, **fields)
    for identify in (tower_identity, kv_identity):
        with expect_error(CheckpointError, reason="settings", match=named):
            identify(config)


@pytest.mark.parametrize(
    "load_format",
    ["dummy", "gguf", "ipc_cache", "mistral", "modelexpress", "npcache", "pt", "sharded_state", "a plugin's"],
)
def test_kv_identity_with_other_load_format_is_refused(changed: Callable[..., Any], load_format: str) -> None:
    with expect_error(CheckpointError, reason="settings", match="load_format"):
        kv_identity(changed("load_config", load_format=load_format))


@pytest.mark.parametrize(
    "load_format", ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"]
)
def test_kv_identity_of_safetensors_load_formats_is_one(
    changed: Callable[..., Any], resolved: Any, load_format: str
) -> None:
    assert kv_key(changed("load_config", load_format=load_format)) == kv_key(resolved)


def test_kv_identity_with_consolidated_file_is_refused(
    changed: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "both"
    shutil.copytree(folder, copied)
    shutil.copy(copied / "model.safetensors", copied / "consolidated.safetensors")
    with pytest.raises(CheckpointError) as caught:
        kv_identity(changed("model_config", model=str(copied)))
    assert caught.value.reason == "load_format"


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_fp8_scale_path": "/scales.json"},
    ],
)
def test_tower_identity_with_fp8_tower_is_refused(
    changed: Callable[..., Any], fields: dict[str, Any]
) -> None:
    with expect_error(CheckpointError, reason="settings", match=next(iter(fields))):
        tower_identity(changed("multimodal_config", **fields))


def test_kv_identity_contains_online_quantisation(changed: Callable[..., Any], resolved: Any) -> None:
    keys = [
        kv_key(resolved),
        kv_key(changed("model_config", quantization="fp8")),
        kv_key(changed("model_config", quantization="fp8", quantization_config={"ignore": ["x"]})),
        kv_key(changed("model_config", quantization="fp8", quantization_config={"ignore": ["y"]})),
    ]
    assert len(set(keys)) == 4


def test_kv_identity_with_unknown_setting_is_refused(
    changed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harmless = {k: v for k, v in model_fields.MODEL.harmless.items() if k != "seed"}
    monkeypatch.setattr(
        "cornplug.vllm_connector.model.setting_verdicts.MODEL",
        dataclasses.replace(model_fields.MODEL, harmless=harmless),
    )
    with expect_error(CheckpointError, reason="settings", match=r"ModelConfig\.seed"):
        kv_identity(changed("model_config", seed=7))


def test_kv_identity_contains_lora_settings(changed: Callable[..., Any], resolved: Any) -> None:
    def lora(**fields: Any) -> Any:
        config = changed("model_config")
        config.lora_config = vllm_config.LoRAConfig(**fields)
        return kv_key(config)

    plain = lora()
    assert plain == kv_key(resolved)
    assert lora(max_lora_rank=64, max_loras=4) == plain
    assert lora(lora_dtype=torch.float32) == plain
    assert len({plain, lora(lora_dtype="bfloat16"), lora(target_modules=["q_proj"])}) == 3


# -- code that is not vLLM's own ----------------------------------------------------------------


def registered(changed: Callable[..., Any], name: str, module: str) -> Any:
    config = changed("model_config")
    entry = SimpleNamespace(module_name=module, class_name="Mine")
    registry = SimpleNamespace(models={**config.model_config.registry.models, name: entry})
    config.model_config = SimpleNamespace(
        **{k: getattr(config.model_config, k) for k in config.model_config.__dict__},
        registry=registry,
        architecture=config.model_config.architecture,
        get_multimodal_config=config.model_config.get_multimodal_config,
    )
    return config


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "LlamaForCausalLM"])
def test_kv_identity_with_plugin_class_is_refused(changed: Callable[..., Any], name: str) -> None:
    with expect_error(
        CheckpointError, reason="settings", match=f"model class {name}: it is defined by plugin"
    ):
        kv_identity(registered(changed, name, "plugin.models"))


def test_kv_identity_with_unused_plugin_class_is_unchanged(
    changed: Callable[..., Any], resolved: Any
) -> None:
    assert kv_key(registered(changed, "NovelForCausalLM", "plugin.models")) == kv_key(resolved)


def test_transformers_backend_changes_kv_identity(changed: Callable[..., Any], resolved: Any) -> None:
    config = registered(changed, "LlavaForConditionalGeneration", "vllm.model_executor.models.transformers")
    assert transformers_backend(config.model_config) == "transformers"
    assert kv_key(config) != kv_key(resolved)
    assert transformers_backend(resolved.model_config) is None


def test_tower_identity_with_plugin_processor_is_refused(
    changed: Callable[..., Any], resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = resolved.model_config.registry.models[resolved.model_config.architecture].load_model_cls()
    theirs = type("Theirs", (), {"__module__": "plugin.processing"})
    monkeypatch.setattr(cls, "_processor_factory", dataclasses.replace(cls._processor_factory, info=theirs))
    with expect_error(CheckpointError, reason="settings", match=r"plugin\.processing"):
        tower_identity(resolved)


def with_code(folder: Path, code: str, reference: str = "mine.Mine") -> Path:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "auto_map": {"AutoModel": reference}}))
    (folder / "mine.py").write_text(code)
    return folder


def test_kv_identity_contains_trusted_remote_code(
    changed: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    def key(code: str, trusted: bool, reference: str = "mine.Mine") -> tuple[bytes, bytes]:
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "m")
        path = with_code(tmp_path / "m", code, reference)
        return kv_key(changed("model_config", model=str(path), trust_remote_code=trusted))

    assert key("x = 1", False) == key("x = 2", False)
    assert len({key("x = 1", False), key("x = 1", True), key("x = 2", True)}) == 3
    with pytest.raises(CheckpointError) as caught:
        key("", True, "someone/else--mine.Mine")
    assert caught.value.reason == "remote_code"


# -- the config as vLLM runs it -----------------------------------------------------------------


def with_config(
    changed: Callable[..., Any],
    path: Path,
    *,
    max_model_len: int = 1024,
    overrides: Any = None,
    **fields: Any,
) -> Any:
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | fields))
    patched = get_config(str(path), False, hf_overrides_kw=overrides)
    return changed(
        "model_config",
        model=str(path),
        hf_config=patched,
        hf_text_config=patched.get_text_config(),
        hf_overrides=overrides or {},
        max_model_len=max_model_len,
    )


def test_kv_identity_contains_effective_overrides(changed: Callable[..., Any], tmp_path: Path) -> None:
    path = checkpoints.qwen2_text(tmp_path / "q")

    def key(**overrides: Any) -> tuple[bytes, bytes]:
        return kv_key(with_config(changed, path, overrides=overrides))

    assert key() == key(rms_norm_eps=1e-5)  # what the file says already
    assert len({key(), key(rms_norm_eps=1e-3), key(architectures=["Mine"]), key(novel_field=True)}) == 4


LONG = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_kv_identity_of_longrope_contains_length(
    changed: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """vLLM takes the long factors where max_model_len is beyond the original length."""
    path = checkpoints.qwen2_text(tmp_path / "q", hidden_size=64, heads=2)
    rope = {"type": kind, "original_max_position_embeddings": 2048, **LONG}
    short, long = (
        kv_key(with_config(changed, path, max_model_len=length, rope_scaling=rope)) for length in (1024, 4096)
    )
    assert short != long


def test_kv_identity_of_nested_longrope_contains_length(changed: Callable[..., Any], folder: Path) -> None:
    def key(length: int) -> bytes:
        config = changed("model_config", max_model_len=length)
        running = copy.deepcopy(config.model_config.hf_config)
        running.llm_config = {"rope_scaling": {"type": "longrope", **LONG}}
        config.model_config.hf_config = running
        return kv_key(config)[1]

    assert key(1024) != key(4096)


def test_kv_identity_of_llama4_contains_length(
    changed: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    """Llama 4 scales its attention by it, or by what the generation config says."""
    path = tmp_path / "l4"
    shutil.copytree(folder, path)
    described = json.loads((path / "config.json").read_text())
    described["text_config"] |= {"model_type": "llama4_text"}
    (path / "config.json").write_text(json.dumps(described))

    def key(**fields: Any) -> tuple[bytes, bytes]:
        return kv_key(changed("model_config", model=str(path), **fields))

    tuned = {"attn_temperature_tuning": True}
    keys = {key(), key(max_model_len=65536), key(override_generation_config=tuned)}
    (path / "generation_config.json").write_text(json.dumps(tuned))
    assert len(keys | {key()}) == 4


def test_kv_identity_of_other_models_ignores_length(changed: Callable[..., Any], resolved: Any) -> None:
    other = changed("model_config", max_model_len=512, override_generation_config={"temperature": 0.1})
    assert kv_key(other) == kv_key(resolved)


# -- releases, processors, environment ----------------------------------------------------------


def test_identity_of_another_epoch_differs(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tower_identity(resolved), kv_key(resolved)
    monkeypatch.setattr(model, "EPOCHS", {"llava": 1, "llama": 1})
    after = tower_identity(resolved), kv_key(resolved)
    assert before[0].identity != after[0].identity
    assert after[0].served_identity is None
    assert before[1] != after[1]


@pytest.mark.parametrize("asked", [{"use_fast": False}, {"backend": "pil"}, {"device": "cuda"}])
def test_tower_identity_contains_processor_kwargs(
    changed: Callable[..., Any], resolved: Any, asked: dict[str, Any]
) -> None:
    other = changed("multimodal_config", mm_processor_kwargs=asked)
    assert tower_identity(other).identity != tower_identity(resolved).identity


@pytest.mark.parametrize(
    "fields", [{"mm_encoder_only": True}, {"mm_processor_kwargs": {"device": "cpu"}, "mm_encoder_only": True}]
)
def test_tower_identity_of_encoder_alone_is_that_of_whole_engine(
    changed: Callable[..., Any], resolved: Any, fields: dict[str, Any]
) -> None:
    """It loads and runs the same towers; a processor runs on the CPU wherever it is not told otherwise."""
    alone = tower_identity(changed("multimodal_config", **fields))
    whole = tower_identity(resolved)
    assert (alone.identity, alone.served_identity) == (whole.identity, whole.served_identity)


def test_kv_identity_contains_relevant_variables(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kv_key(resolved)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # vLLM writes a random name here with --mm-processor-cache-type shm.
    monkeypatch.setenv("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_OBJECT_STORAGE_SHM_BUFFER_1a2b")
    assert kv_key(resolved) == plain
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    assert kv_key(resolved) != plain
    monkeypatch.setenv("VLLM_TEST_FORCE_LOAD_FORMAT", "dummy")
    with expect_error(CheckpointError, reason="settings", match="VLLM_TEST_FORCE_LOAD_FORMAT"):
        kv_identity(resolved)


def test_kv_identity_of_another_hub_is_that_of_a_local_folder_only(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kv_key(resolved)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert kv_key(resolved) == plain
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(model="org/draft"))
    for config in (
        SimpleNamespace(model_config=SimpleNamespace(model="org/name"), speculative_config=None),
        SimpleNamespace(model_config=resolved.model_config, speculative_config=draft),
    ):
        assert setting_verdicts._judge_environment(config).refusals


def test_keys_of_both_model_runners_are_equal(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tower_identity(resolved), kv_key(resolved)
    for runner in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        assert (tower_identity(resolved), kv_key(resolved)) == before


def test_vllm_variables_are_all_reviewed() -> None:
    """They are in the key until somebody has looked at them. `tests/golden/vllm_variables.txt` lists those
    that were looked at; a new one either stays in the key or joins `HARMLESS_VARIABLES`."""
    seen = set((Path(__file__).parents[2] / "golden" / "vllm_variables.txt").read_text().split())
    known = {name for name in envs.environment_variables if name.startswith("VLLM_")}
    assert known - seen == set()


def test_engine_fields_variables_exist_and_fit_their_table() -> None:
    known = {name for name in envs.environment_variables if name.startswith("VLLM_")}
    assert known.issuperset(model_fields.REFUSED_VARIABLES)
    harmless = {name for name in known if model_fields.HARMLESS_VARIABLES.fullmatch(name)}
    words = (
        "QUANT",
        "FP8",
        "FP4",
        "INT4",
        "INPUT_DTYPE",
        "ACCUM",
        "PRECISION",
        "ATTN",
        "GEMM",
        "MOE",
        "AITER",
    )
    assert [name for name in sorted(harmless) if any(word in name for word in words)] == []


@pytest.mark.parametrize("model_type", ["novel", "qwen2_audio"])
def test_tower_identity_of_unvalidated_family_is_refused(
    changed: Callable[..., Any], folder: Path, tmp_path: Path, model_type: str
) -> None:
    path = tmp_path / "other"
    shutil.copytree(folder, path)
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {"model_type": model_type}))
    with expect_error(CheckpointError, reason="unproven_family"):
        tower_identity(changed("model_config", model=str(path)))


def test_tower_identity_is_of_a_validated_release_and_dtype(
    changed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One family, compared in vLLM 0.32.0 in float32."""
    assert tower_identity(changed("model_config", dtype=torch.float32))
    with expect_error(CheckpointError, reason="unproven_family", match="'llava'.*float64.*float64"):
        tower_identity(changed("model_config", dtype=torch.float64))
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.32.7" if name == "vllm" else version(name)
    )
    with expect_error(CheckpointError, reason="unproven_family"):
        tower_identity(changed("model_config", dtype=torch.float32))
