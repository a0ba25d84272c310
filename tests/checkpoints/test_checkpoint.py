"""Checkpoints: the same weights give one fingerprint however they are published, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cornplug.checkpoints import safetensors_digest
from cornplug.checkpoints.checkpoint import Checkpoint, Part
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError
from cornplug.identity import embedding_key
from devkit.checkpoints import bare
from devkit.checkpoints.bare import CLIP_PREPROCESSOR, LLAVA_CONFIG, QWEN2_VL_CONFIG, Tensors

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "checkpoints.json").read_text())
PARTS: tuple[Part, ...] = ("tower", "projector", "language_model")
TOWER_IN_CUT = [
    name
    for name in bare.llava_tensors()
    if name.startswith("vision_tower") and "layers.2." not in name and "post_layernorm" not in name
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _write(folder: Path, tensors: Tensors | None = None, **kwargs: Any) -> Checkpoint:
    return Checkpoint.open(str(bare.write(folder, tensors or bare.llava_tensors(), **kwargs)))


def _key(checkpoint: Checkpoint, dtype: str = "float32", **kwargs: Any) -> bytes:
    return embedding_key(bytes(32), checkpoint.identity(dtype, **kwargs).identity, bytes(32), None)


def _fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    return {part: checkpoint.fingerprint(part).hex() for part in PARTS}


# --- what is equal ---


@pytest.mark.parametrize("generation", [4, 5])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_checkpoint_identities_equal_golden_vectors(
    tmp_path: Path, family: str, generation: bare.Generation, shards: int
) -> None:
    """Names of either generation and either file split give the one frozen fingerprint."""
    if family == "llava":
        checkpoint = _write(tmp_path / "x", bare.llava_tensors(generation), shards=shards)
    else:
        tensors = bare.qwen2_vl_tensors(generation)
        checkpoint = _write(tmp_path / "x", tensors, config=QWEN2_VL_CONFIG, preprocessor={}, shards=shards)
    identity = checkpoint.identity("bfloat16")
    found = _fingerprints(checkpoint) | {"spec": identity.spec_fp.hex(), "identity": identity.identity.hex()}
    assert found == GOLDEN[family]


def test_checkpoint_folder_and_name_do_not_count(tmp_path: Path) -> None:
    before = _key(_write(tmp_path / "one"))
    (tmp_path / "one").rename(tmp_path / "another-name")
    assert _key(Checkpoint.open(str(tmp_path / "another-name"))) == before
    shutil.copytree(tmp_path / "another-name", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    assert _key(Checkpoint.open(str(tmp_path / "link"))) == before


def test_embedding_key_fine_tuned_or_quantised_llm_keeps_it(tmp_path: Path) -> None:
    base = _write(tmp_path / "base")
    tensors = bare.llava_tensors()
    name = "language_model.model.layers.0.self_attn.q_proj"
    del tensors[f"{name}.weight"]
    tensors |= {f"{name}.qweight": bare.bare("q", "I64"), f"{name}.scales": bare.bare("s", "F16")}
    quantised = _write(tmp_path / "awq", tensors, config={**LLAVA_CONFIG, "quantization_config": {"bits": 4}})
    assert _key(quantised) == _key(base)
    assert quantised.fingerprint("language_model") != base.fingerprint("language_model")
    assert quantised.kv_spec() != base.kv_spec()


def test_tower_quantised_has_quantisation_in_its_spec(tmp_path: Path) -> None:
    tensors = bare.llava_tensors() | {TOWER_IN_CUT[0]: bare.bare("q", "I64")}
    keys = {
        _key(
            _write(
                tmp_path / str(bits), tensors, config={**LLAVA_CONFIG, "quantization_config": {"bits": bits}}
            )
        )
        for bits in (4, 8)
    }
    assert len(keys) == 2


def test_checkpoint_family_not_compared_there_is_not_shared(tmp_path: Path) -> None:
    """By engine and family; a known family with a tower that is not known is none of them."""

    def model(engine: str, validated: set[str], vision: str = "clip_vision_model") -> EngineModel:
        tower = {**LLAVA_CONFIG["vision_config"], "model_type": vision}
        checkpoint = _write(tmp_path / vision, config={**bare.LLAVA_CONFIG, "vision_config": tower})
        return EngineModel(
            checkpoint=checkpoint,
            dtype="float32",
            max_model_len=64,
            engine=engine,
            validated_families=frozenset(validated),
        )

    vllm = model("vllm", {"llava"}).tower_identity()
    assert vllm == model("sglang", {"llava", "gemma3"}).tower_identity()
    assert vllm.served_identity == vllm.identity
    problem = "not been tested with sglang's embeddings of 'llava' in float32"
    with expect_error(CheckpointError, reason="unproven_family", match=problem) as caught:
        model("sglang", {"gemma3"}).tower_identity()
    # The service computes it by transformers' class, which no test compares with an engine.
    with pytest.raises(CheckpointError) as caught:
        model("vllm", {"llava"}, "pixtral").tower_identity()
    assert caught.value.reason == "unproven_family"


def test_tower_tensor_behind_the_cut_does_not_count(tmp_path: Path) -> None:
    before = _key(_write(tmp_path / "base"))
    for i, name in enumerate(n for n in bare.llava_tensors() if "layers.2." in n or "post_layernorm" in n):
        tensors = bare.llava_tensors() | {name: bare.bare(f"other {name}")}
        assert _key(_write(tmp_path / str(i), tensors)) == before
        config = {**LLAVA_CONFIG, "vision_feature_layer": -1}
        last = _write(tmp_path / f"last{i}", tensors, config=config)
        same = last.fingerprint("tower") == _write(tmp_path / "last", config=config).fingerprint("tower")
        # A hidden state is taken before the final norm, whichever it is.
        assert same == ("post_layernorm" in name)


def test_tensors_that_engines_do_not_read_do_not_count(tmp_path: Path) -> None:
    tied = {**LLAVA_CONFIG, "tie_word_embeddings": True}
    tensors = bare.llava_tensors()
    base = _fingerprints(_write(tmp_path / "base", tensors, config=tied))
    tensors["vision_tower.vision_model.embeddings.position_ids"] = bare.bare("ids", "I64")
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = bare.bare("freq")
    del tensors["language_model.lm_head.weight"]
    assert _fingerprints(_write(tmp_path / "other", tensors, config=tied)) == base


# --- what differs ---


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(TOWER_IN_CUT), bit=st.integers(0, 64 * 8 - 1))
def test_embedding_key_flipped_bit_in_any_tower_tensor_changes_it(
    tmp_path_factory: pytest.TempPathFactory, name: str, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    tensors = bare.llava_tensors()
    dtype, shape, data = tensors[name]
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    other = _write(folder / "other", tensors | {name: (dtype, shape, bytes(damaged))})
    base = _write(folder / "base", tensors)
    assert _key(other) != _key(base)
    assert other.fingerprint("projector") == base.fingerprint("projector")
    assert other.fingerprint("language_model") == base.fingerprint("language_model")


@pytest.mark.parametrize("name", [name for name in bare.llava_tensors() if "post_layernorm" not in name])
def test_checkpoint_every_tensor_enters_exactly_one_part(tmp_path: Path, name: str) -> None:
    config = {**LLAVA_CONFIG, "vision_feature_layer": -1}
    base = _fingerprints(_write(tmp_path / "base", config=config))
    dtype, shape, data = bare.llava_tensors()[name]
    changed = [(dtype, shape, bytes(len(data))), ("F16", (4, 8), data), (dtype, (2, 8), data)]
    for i, tensor in enumerate(changed):
        other = _fingerprints(_write(tmp_path / str(i), bare.llava_tensors() | {name: tensor}, config=config))
        assert sum(other[part] != base[part] for part in PARTS) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**LLAVA_CONFIG, "vision_feature_layer": 1}},
        {"config": {**LLAVA_CONFIG, "vision_feature_layer": [1, 2]}},
        {"config": {**LLAVA_CONFIG, "vision_feature_select_strategy": "full"}},
        {"config": {**LLAVA_CONFIG, "projector_hidden_act": "relu"}},
        {"preprocessor": {**CLIP_PREPROCESSOR, "resample": 2}},
        {"preprocessor": {**CLIP_PREPROCESSOR, "image_std": [1.0, 1.0, 1.0]}},
        {"tensors": bare.llava_tensors() | {"multi_modal_projector.linear_1.weight": bare.bare("other")}},
    ],
    ids=["layer", "layers", "select", "projector config", "resample", "std", "projector weight"],
)
def test_embedding_key_setting_that_changes_rows_changes_it(tmp_path: Path, change: dict[str, Any]) -> None:
    assert _key(_write(tmp_path / "other", **change)) != _key(_write(tmp_path / "base"))


def test_embedding_key_dtype_and_processor_arguments_change_it(tmp_path: Path) -> None:
    checkpoint = _write(tmp_path / "x")
    keys = {
        _key(checkpoint),
        _key(checkpoint, "bfloat16"),
        _key(checkpoint, numeric_class="cuda-flash"),
        _key(checkpoint, processor_kwargs={"do_center_crop": False}),
    }
    assert len(keys) == 4
    assert _key(checkpoint, processor_kwargs={"do_center_crop": True}) == _key(checkpoint)


def test_checkpoint_preprocessor_in_processor_config_comes_first(tmp_path: Path) -> None:
    base = _write(tmp_path / "base")
    bare.write(tmp_path / "new", bare.llava_tensors(), preprocessor={"size": 1})
    nested = {"processor_class": "LlavaProcessor", "image_processor": CLIP_PREPROCESSOR}
    (tmp_path / "new" / "processor_config.json").write_text(json.dumps(nested))
    assert _key(Checkpoint.open(str(tmp_path / "new"))) == _key(base)


def _qwen(folder: Path, **files: Any) -> Checkpoint:
    bare.write(folder, bare.qwen2_vl_tensors(), QWEN2_VL_CONFIG, {"image_processor_type": "X"})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Checkpoint.open(str(folder))


def test_checkpoint_each_modality_has_its_preprocessors_identity(tmp_path: Path) -> None:
    base = _qwen(tmp_path / "base")
    image, video = base.identity("float32"), base.identity("float32", modality="video")
    assert base.identity("float32", modality="image") == image
    assert (video.tower_fp, video.projector_fp) == (image.tower_fp, image.projector_fp)
    assert video.identity != image.identity
    other = _qwen(tmp_path / "other", video_preprocessor_config={"max_frames": 16})
    assert other.identity("float32") == image
    assert other.identity("float32", modality="video").identity != video.identity


def test_checkpoint_modality_that_family_lacks_is_refused(tmp_path: Path) -> None:
    with expect_error(CheckpointError, reason="modality"):
        _write(tmp_path / "x").identity("float32", modality="video")


def test_checkpoint_video_processor_is_read_as_transformers_does(tmp_path: Path) -> None:
    alone = {"video_preprocessor_config": {"max_frames": 8}}
    nested = {"processor_config": {"video_processor": {"max_frames": 4}}}
    found = [
        _qwen(tmp_path / str(i), **files).preprocessors["video"]
        for i, files in enumerate(({}, alone, nested, nested | alone, {"processor_config": {}}))
    ]
    old = {"image_processor_type": "X"}
    assert found == [old, {"max_frames": 8}, {"max_frames": 4}, {"max_frames": 4}, old]


# --- kv_spec ---


@pytest.mark.parametrize("change", [{"architectures": ["Mine"]}, {"auto_map": {"AutoModel": "mine.Mine"}}])
def test_other_classes_have_other_specs(tmp_path: Path, change: dict[str, Any]) -> None:
    """The same bytes under another class, or with code of their own, may compute something else."""
    specs = []
    for name, config in (("plain", {}), ("other", change)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**QWEN2_VL_CONFIG, **config}))
        specs.append(Checkpoint.open(str(folder)).kv_spec())
    assert specs[0] != specs[1]


def test_kv_spec_reads_alike_from_transformers_4_and_5(tmp_path: Path) -> None:
    four = {
        **QWEN2_VL_CONFIG,
        **{"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        **{"torch_dtype": "bfloat16", "image_token_id": 7, "_name_or_path": "somewhere"},
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    text = {"model_type": "qwen2_vl_text", "hidden_size": 4, "num_hidden_layers": 1, "rope_parameters": rope}
    five = {"model_type": "qwen2_vl", "vision_config": {}, "text_config": text, "dtype": "bfloat16"}
    specs = [_write(tmp_path / str(i), config=config).kv_spec() for i, config in enumerate((four, five))]
    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"max_position_embeddings": 8192},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention"]},
        {"num_key_value_heads": 1},
        {"quantization_config": {"bits": 4}},
        {"some_new_field": True},
    ],
)
def test_kv_spec_setting_that_changes_kv_changes_it(tmp_path: Path, change: dict[str, Any]) -> None:
    text = {**LLAVA_CONFIG["text_config"], **change}
    changed = _write(tmp_path / "x", config={**LLAVA_CONFIG, "text_config": text})
    assert changed.kv_spec() != _write(tmp_path / "base").kv_spec()


def test_kv_spec_tower_does_not_count(tmp_path: Path) -> None:
    config = {**QWEN2_VL_CONFIG, "vision_config": {"depth": 9}}
    seen = [_write(tmp_path / str(i), config=c).kv_spec() for i, c in enumerate((config, QWEN2_VL_CONFIG))]
    assert seen[0] == seen[1]


# --- other models, and what is no checkpoint ---


def test_checkpoint_text_only_has_language_model_and_no_tower(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": bare.bare("n"), "lm_head.weight": bare.bare("h")}
    text = _write(tmp_path / "text", tensors, config={"model_type": "qwen2"}, preprocessor=None)
    assert text.locate("language_model").keys() == tensors.keys()
    assert len(text.fingerprint("language_model")) == 32
    for attempt in (lambda: text.family, lambda: text.fingerprint("tower"), lambda: text.identity("float32")):
        with expect_error(CheckpointError, reason="unknown_family", match="qwen2.*llava.*qwen2_vl"):
            attempt()


def test_locate_names_files_and_published_names(tmp_path: Path) -> None:
    located = _write(tmp_path / "x", shards=3).locate("tower")
    assert len(located) == len(TOWER_IN_CUT)
    file, published = located["encoder.layers.0.mlp.fc1.weight"]
    assert published == "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"
    assert published in safetensors_digest.read_header(file)


def _no_projector(folder: Path) -> None:
    bare.write_safetensors(
        folder / "model.safetensors",
        {k: v for k, v in bare.llava_tensors().items() if "projector" not in k},
    )


def _only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _only_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def _missing_shard(folder: Path) -> None:
    bare.write(folder, bare.llava_tensors(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def _escaping_shard(folder: Path) -> None:
    index = {"weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _same_tensor_twice(folder: Path) -> None:
    bare.write_safetensors(folder / "model.safetensors", bare.llava_tensors(4) | bare.llava_tensors(5))


@pytest.mark.parametrize(
    ("spoil", "reason", "says"),
    [
        (_no_projector, "no_weights", "no tensors of its projector"),
        (_only_bin, "not_safetensors", "save_pretrained"),
        (_only_adapter, "no_weights", "LoRA adapter"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no_weights", "Complete the download"),
        (_missing_shard, "missing_shard", "model-00002-of-00003.safetensors"),
        (_escaping_shard, "bad_header", "not a file name"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "bad_header", "index.json"),
        (_same_tensor_twice, "duplicate_tensor", "same tensor"),
    ],
)
def test_checkpoint_unusable_weights_say_the_reason(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str, says: str
) -> None:
    checkpoint = _write(tmp_path / "x")
    spoil(tmp_path / "x")
    with expect_error(CheckpointError, reason=reason, match=says):
        checkpoint.identity("float32")


def test_checkpoint_folder_without_one_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/no-such-model", "/no/such/folder", str(tmp_path)):
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(name)
        assert caught.value.reason == "not_found"
    for content in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with expect_error(CheckpointError, reason="bad_config", match=r"config\.json") as caught:
            Checkpoint.open(str(tmp_path))


def test_checkpoint_hub_snapshot_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo, commit = tmp_path / "hub" / "models--org--name", "a" * 40
    bare.write(repo / "snapshots" / commit, bare.llava_tensors())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert _key(Checkpoint.open("org/name")) == _key(_write(tmp_path / "plain"))
    assert Checkpoint.open("org/name", revision=commit).path.name == commit


def test_checkpoint_outsized_or_unreadable_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * ((16 << 20) + 1))
    with expect_error(CheckpointError, reason="bad_config", match="larger than"):
        Checkpoint.open(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with expect_error(CheckpointError, reason="unreadable"):
        Checkpoint.open(str(tmp_path))


def test_checkpoint_files_of_any_name_are_read_as_engines_do(tmp_path: Path) -> None:
    before = _fingerprints(_write(tmp_path / "x"))
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x" / "weights.safetensors")
    assert _fingerprints(Checkpoint.open(str(tmp_path / "x"))) == before
    (tmp_path / "x" / "weights.safetensors").unlink()
    with expect_error(CheckpointError, reason="no_weights"):
        Checkpoint.open(str(tmp_path / "x")).locate("language_model")
