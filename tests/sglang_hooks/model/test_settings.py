"""Every setting and every environment variable of SGLang stands in one of the three tables."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import sglang.srt
import torch
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
from sglang.srt.environ import EnvField, Envs
from sglang.srt.server_args import ServerArgs

from cornplug.checkpoints.model_family import PRECISION_VARIABLES
from cornplug.engine_common import model_identity
from cornplug.engine_common.engine_config import AS_OVERRIDE, FieldTables, find_misplaced
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks import compat
from cornplug.sglang_hooks.model import environment, model_config
from cornplug.sglang_hooks.model.environment import ENVIRONMENT
from cornplug.sglang_hooks.model.model_config import describe
from cornplug.sglang_hooks.model.server_args_fields import SERVER_ARGS, reason_by_name

CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1024,
    "max_position_embeddings": 4096, "dtype": "bfloat16", "rope_parameters": {"rope_type": "default"},
}  # fmt: skip
FIELDS = [field.name for field in msgspec.structs.fields(ServerArgs)]
VARIABLES = [name for name, field in vars(Envs).items() if isinstance(field, EnvField)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what a test of SGLang on a CPU needs."""
    for name in list(environment.os.environ):
        if name.startswith("SGLANG_") and name != "SGLANG_USE_CPU_ENGINE":
            monkeypatch.delenv(name)


def overrides(folder: Path, quantized: bool = False, **settings: Any) -> dict[str, Any]:
    declared = {"quant_method": "fp8"} if quantized else None
    config = SimpleNamespace(
        model_path=str(folder),
        revision=None,
        dtype=torch.bfloat16,
        context_len=64,
        pointer_head=None,
        hf_config=SimpleNamespace(quantization_config=declared),
    )
    return dict(describe(ServerArgs(model_path=str(folder), **settings), config).overrides)


# -- the tables are whole -----------------------------------------------------------------------


def test_server_args_tables_hold_each_field_once() -> None:
    assert find_misplaced(SERVER_ARGS, FIELDS) == {}


def _read_in_sources() -> Iterator[str]:
    """SGLANG_* names that occur in SGLang's runtime, declared in environ.py or read directly."""
    (root,) = sglang.srt.__path__
    for file in Path(root).rglob("*.py"):
        yield from re.findall(r"[\"'](SGLANG_[A-Z0-9_]+)[\"']", file.read_text(errors="replace"))


# Of a docstring's example, and of a message.
_NO_VARIABLES = {"SGLANG_NEW_NAME", "SGLANG_OLD_NAME"}


def test_environment_tables_hold_each_variable_once() -> None:
    ours = {*ENVIRONMENT.in_key, *ENVIRONMENT.harmless, *ENVIRONMENT.refused}
    others = {name for name in ours if not name.startswith("SGLANG_")} - set(VARIABLES)
    names = {*VARIABLES, *_read_in_sources(), *others} - _NO_VARIABLES
    names |= {"SGLANG_FORCE_SHUTDOWN", "SGLANG_PYTHON"}
    assert find_misplaced(ENVIRONMENT, names) == {}


@pytest.mark.parametrize("tables", [SERVER_ARGS, ENVIRONMENT])
@pytest.mark.parametrize("place", ["in_key", "harmless", "refused"])
def test_misplaced_missing_and_doubled_fields_are_named(tables: FieldTables, place: str) -> None:
    every = {**tables.in_key, **tables.harmless, **tables.refused}
    name, reason = next(iter(getattr(tables, place).items()))
    rest = {key: value for key, value in getattr(tables, place).items() if key != name}
    holed = _with(tables, place, rest)
    assert find_misplaced(holed, every) == {name: "not in any table"}
    other = "harmless" if place != "harmless" else "refused"
    doubled = _with(tables, other, {**getattr(tables, other), name: reason})
    assert find_misplaced(doubled, every) == {name: "in more than one table"}


def _with(tables: FieldTables, place: str, table: dict[str, str]) -> FieldTables:
    kept = {name: getattr(tables, name) for name in ("in_key", "harmless", "refused")}
    return FieldTables(class_name=tables.class_name, **{**kept, place: table})


def test_grouped_name_in_two_groups_is_value_error() -> None:
    with pytest.raises(ValueError, match="twice is listed in two"):
        reason_by_name({"one reason": "once twice", "another": "twice"})


# -- what SGLang resolves by itself is no override -------------------------------------------------


def test_describe_server_without_flags_has_no_overrides(folder: Path) -> None:
    """As SGLang resolves them: so keys are those of vLLM."""
    args = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native")
    args.resolve_once()
    assert describe(resolved_view(args), model_config_of(args)).overrides == {}


def test_environment_harmless_variables_change_no_key(monkeypatch: Any) -> None:
    for name in ENVIRONMENT.harmless:
        monkeypatch.setenv(name, "1")
    assert environment.classify_environment() == environment.judge_fields(ENVIRONMENT, {}, {})


def test_describe_mamba_ssm_dtype_is_no_override(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang writes the flag into a variable, which other servers do not have."""
    monkeypatch.delenv("SGLANG_MAMBA_SSM_DTYPE", raising=False)  # restored when the test ends
    args = ServerArgs(
        model_path=str(folder), device="cpu", attention_backend="torch_native", mamba_ssm_dtype="float32"
    )
    args.resolve_once()
    assert environment.os.environ["SGLANG_MAMBA_SSM_DTYPE"] == "float32"
    assert describe(resolved_view(args), model_config_of(args)).overrides == {}


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "trtllm_mha"])
def test_describe_full_attention_backends_are_no_override(folder: Path, backend: str) -> None:
    assert overrides(folder, attention_backend=backend, mm_attention_backend="fa3") == {}


# -- values ---------------------------------------------------------------------------------------


def _another(name: str) -> Any:
    default = next(f.default for f in msgspec.structs.fields(ServerArgs) if f.name == name)
    return not default if isinstance(default, bool) else 7 if isinstance(default, int) else "other"


def test_describe_in_key_settings_are_overrides(folder: Path) -> None:
    for name in [name for name, how in SERVER_ARGS.in_key.items() if how == AS_OVERRIDE]:
        value = _another(name)
        assert overrides(folder, **{name: value}) == {f"ServerArgs.{name}": value}


def test_describe_refused_settings_are_errors(folder: Path) -> None:
    for name in SERVER_ARGS.refused:
        with pytest.raises(CheckpointError, match=rf"ServerArgs\.{name}:") as caught:
            overrides(folder, **{name: _another(name)})
        assert caught.value.reason == "settings"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("SGLANG_FP8_IGNORED_LAYERS", "model.layers.0", "model.layers.0"),
        ("SGLANG_FP4_IGNORED_LAYERS", "lm_head", "lm_head"),
        ("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", '{"bits": 4}', {"bits": 4}),
        ("SGLANG_INT4_WEIGHT", "1", True),
        ("SGLANG_CPU_QUANTIZATION", "true", True),
        ("SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN", "1", True),
        ("SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE", "1", True),
        ("SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR", "0.5", 0.5),
        ("SGLANG_ROPE_CACHE_FP32", "1", True),
        ("SGLANG_IMAGE_MAX_PIXELS", "1000", 1000),
        ("NVIDIA_TF32_OVERRIDE", "1", "1"),
    ],
)
def test_environment_in_key_variables_are_overrides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(name, text)
    assert overrides(folder) == {f"environment.{name}": value}


def test_environment_precision_is_in_the_identity_of_towers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an encoder service with the same values has these embeddings."""
    for name in PRECISION_VARIABLES:
        monkeypatch.setenv(name, "1")
    found = overrides(folder)
    assert len(found) == len(PRECISION_VARIABLES)
    assert set(found) <= model_identity._PRECISION_OVERRIDES


def test_environment_default_values_are_no_override(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INT4_WEIGHT", "0")
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", "")
    assert overrides(folder) == {}


def test_environment_file_counts_by_its_content(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "quant.json"
    monkeypatch.setenv("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    file.write_text('{"bits": 4}')
    four = overrides(folder)
    file.write_text('{"bits": 8}')
    assert overrides(folder) != four


def test_environment_of_another_hub_is_that_of_local_files_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    assert overrides(folder, speculative_draft_model_path=str(folder)) == {}
    for settings in (
        {"speculative_draft_model_path": "org/draft"},
        {"speculative_token_map": "org/draft/map.pt"},
    ):
        with pytest.raises(CheckpointError, match=r"environment\.SGLANG_USE_MODELSCOPE"):
            overrides(folder, **settings)
    hub = SimpleNamespace(model_path="org/name", hf_config=SimpleNamespace(quantization_config=None))
    with pytest.raises(CheckpointError, match=r"environment\.SGLANG_USE_MODELSCOPE"):
        model_config._overrides(ServerArgs(model_path="org/name"), hub, SimpleNamespace(path=folder))


@pytest.mark.parametrize("name", ["SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_OF_2027"])
def test_environment_refused_variable_error_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(CheckpointError, match=rf"environment\.{name}"):
        overrides(folder)


def test_describe_unknown_setting_error_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = model_config._fields

    def with_another(settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        values, defaults = fields(settings)
        return {**values, "enable_lossy_2027": True}, {**defaults, "enable_lossy_2027": False}

    monkeypatch.setattr(model_config, "_fields", with_another)
    with pytest.raises(CheckpointError, match=r"ServerArgs\.enable_lossy_2027"):
        overrides(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_w4a4_mxfp4_megamoe": True},
        {"attention_backend": "wave"},
        {"prefill_attention_backend": "llada2_cfg_flashinfer"},
        {"dsa_prefill_backend": "flashmla_sparse_q8"},
        {"moe_a2a_backend": "deepep"},
        {"enable_quant_communications": True},
        {"model_impl": "transformers"},
    ],
)
def test_describe_lossy_settings_are_overrides(folder: Path, settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    assert overrides(folder, **settings) == {f"ServerArgs.{name}": value}


def test_describe_quantising_kernels_count_if_quantised(folder: Path) -> None:
    settings = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "flashinfer_mxfp4"}
    assert overrides(folder, **settings) == {}
    assert overrides(folder, quantized=True, **settings) == {
        f"ServerArgs.{name}": value for name, value in settings.items()
    }


# -- other sources ---------------------------------------------------------------------------------


def test_describe_multithread_load_is_no_override(folder: Path) -> None:
    config = '{"enable_multithread_load": true, "num_threads": 8}'
    assert overrides(folder, model_loader_extra_config=config) == {}


def test_describe_download_dir_of_hub_model_is_refused(folder: Path) -> None:
    assert overrides(folder, download_dir="/cache") == {}
    with pytest.raises(CheckpointError, match="download-dir"):
        overrides(Path("qwen/qwen2"), download_dir="/cache")


def test_describe_other_plugins_are_overrides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(name="patch", value="p:q", dist=SimpleNamespace(name="patches", version="1.0"))
    ours = SimpleNamespace(name="cornplug", value="c:d", dist=SimpleNamespace(name="cornplug", version="1"))
    found = {"sglang.srt.plugins": [ours, other], "sglang.srt.platforms": []}
    monkeypatch.setattr(model_config.importlib.metadata, "entry_points", lambda group: found[group])
    assert overrides(folder) == {"sglang_plugins": ["patches==1.0"]}
    monkeypatch.setenv("SGLANG_PLUGINS", "cornplug")
    assert overrides(folder) == {}


@pytest.mark.parametrize("asked", [{"use_fast": False}, {"backend": "pil"}, {"device": "cuda"}])
def test_describe_ignored_processor_backend_is_override(folder: Path, asked: dict[str, Any]) -> None:
    made = overrides(folder, mm_process_config={"image": {**asked, "max_pixels": 1000}})
    assert made == {"ServerArgs.mm_process_config": asked}


def test_describe_trusted_remote_code_is_override(tmp_path: Path) -> None:
    plain, with_code = tmp_path / "plain", tmp_path / "code"
    for made in (plain, with_code):
        made.mkdir()
        (made / "config.json").write_text(json.dumps(CONFIG))
        (made / "modeling.py").write_text("x = 1")
    mapped = {**CONFIG, "auto_map": {"AutoConfig": "modeling.Config"}}
    (with_code / "config.json").write_text(json.dumps(mapped))
    assert overrides(with_code) == overrides(plain, trust_remote_code=True) == {}
    one = overrides(with_code, trust_remote_code=True)
    assert set(one) == {"remote_code"}
    (with_code / "modeling.py").write_text("x = 2")
    assert overrides(with_code, trust_remote_code=True) != one
    mapped["auto_map"] = {"AutoConfig": "org/other--modeling.Config"}
    (with_code / "config.json").write_text(json.dumps(mapped))
    with pytest.raises(CheckpointError, match="another repository"):
        overrides(with_code, trust_remote_code=True)


def test_describe_epochs_follow_compat_table(folder: Path, monkeypatch: Any) -> None:
    args = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native")
    args.resolve_once()
    monkeypatch.setattr(model_config, "EPOCHS", {"qwen2": 2})
    assert describe(resolved_view(args), model_config_of(args)).epochs == {"qwen2": 2}


def test_compat_epochs_are_positive_per_family() -> None:
    assert all(isinstance(name, str) and epoch > 0 for name, epoch in compat.EPOCHS.items())


def test_namespace_roots_refused_setting_is_logged(folder: Path, caplog: Any, monkeypatch: Any) -> None:
    """What a server says when its language model cannot be identified."""
    from cornplug.kv_page import PageGeometry
    from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots

    monkeypatch.setenv("SGLANG_OF_2027", "1")

    def identify() -> Any:
        return overrides(folder)

    page = PageGeometry(page_tokens=16, heads=1, layers=1, dim=8, dtype="float32")
    with caplog.at_level(logging.WARNING, logger="sglang.cornplug"):
        assert NamespaceRoots(b"s" * 32, page, identify).wait(60)
    assert "environment.SGLANG_OF_2027" in caplog.text
