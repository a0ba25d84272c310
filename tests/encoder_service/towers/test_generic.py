"""Every family without a description in `cornplug.checkpoints.families`, against transformers' whole model.

To add one that transformers knows: a line in `devkit.checkpoints.ANY_FAMILIES`.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from expected_errors import expect_error

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.config import Config
from cornplug.encoder_service.formats.tensors import to_wire
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer, MediaSource
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.encoder_service.preprocess.whole_processor import WholeProcessor
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError, EncoderRefused
from cornplug.sglang_hooks import compat as sglang_compat
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector import compat as vllm_compat
from devkit import checkpoints

from ..conftest import SECRET, MakeEncoder, png, sample_image
from ..http_service import Service
from ..tower_rig import Tensors, edit_config, rewritten

WHOLE = ("llama4", "ovis2")
"""Families whose decoder takes other outputs than `pooler_output`: in `test_generic_modalities`."""
SOON = ("paligemma", "glm4v")
"""Families whose images `script/test` compares."""
SERVED = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                name == "smolvlm" and importlib.util.find_spec("num2words") is None,
                reason="SmolVLM's processor needs num2words: run script/setup",
            ),
            *([] if name in SOON else [pytest.mark.more]),
        ],
    )
    for name, family in checkpoints.ANY_FAMILIES.items()
    if name not in WHOLE and "image" in family.media and not family.nested
]
"""Their images; `test_generic_modalities` has the rest."""
SIZES = ((70, 60), (200, 90), (56, 56))
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny checkpoint of a family, made once. Do not write to it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("any") / name
            made[name] = checkpoints.any_family(folder, name, checkpoints.ANY_FAMILIES[name])
        return made[name]

    return of


def opened(path: Path, dtype: str = "float32", device: str = "cpu") -> tuple[ModelRegistry, LoadedModel]:
    """The registry of a service with this model, whose preprocessors have been made."""
    registry = ModelRegistry.open([str(path)], dtype=dtype, device=device)
    MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    return registry, registry.loaded_models()[0]


def whole_rows(path: Path, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Rows of the sample images by transformers: its processor with a prompt, and its whole model."""
    processor = transformers.AutoProcessor.from_pretrained(path)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    owner = model if hasattr(model, "get_image_features") else model.base_model
    out = []
    for i, size in enumerate(SIZES):
        made = processor(images=[sample_image(i, *size)], text=[processor.image_token], return_tensors="pt")
        with torch.inference_mode():
            found = owner.get_image_features(**{k: made[k] for k in names if k in made}).pooler_output
        parts = [found] if isinstance(found, torch.Tensor) else found
        out.append(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    return out


def rows_of(answer: dict[str, Any]) -> torch.Tensor:
    data = np.frombuffer(base64.b64decode(answer["data"]), np.float32)
    return torch.from_numpy(data.reshape(answer["shape"]).copy())


@pytest.mark.parametrize("name", SERVED)
def test_generic_rows_over_http_equal_transformers(
    name: str, tiny: Tiny, make_encoder: MakeEncoder, memory_store: MemoryStore, config: Config
) -> None:
    """To 1e-6 of the largest value: most are equal bit for bit, `-s` prints which."""
    registry = ModelRegistry.open([str(tiny(name))], dtype="float32", device="cpu")
    service = Service(make_encoder(memory_store.connect(), registry=registry), config)
    wanted = whole_rows(tiny(name), WholeProcessor(registry.loaded_models()[0], "image").input_names)
    for i, (size, theirs) in enumerate(zip(SIZES, wanted, strict=True)):
        sent = {
            "data": {"model": str(tiny(name)), "deadline_s": "100"},
            "files": {"image": png(sample_image(i, *size))},
        }
        first, second = service.post(**sent), service.post(**sent)
        assert (first.status_code, second.status_code) == (200, 200), first.text
        assert (first.json()["origin"], second.json()["origin"]) == ("computed", "cached")
        ours = rows_of(first.json())
        assert ours.shape == theirs.shape
        assert torch.equal(ours, rows_of(second.json()))
        worst = float((ours - theirs).abs().max())
        print(f"{name} {size}: off by {worst:g}")
        assert worst <= 1e-6 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", checkpoints.ANY_FAMILIES)
def test_generic_identity_is_of_all_but_the_decoder(name: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(name)
    tuned = checkpoints.any_family(tmp_path / "tuned", name, checkpoints.ANY_FAMILIES[name], llm_seed=2)
    assert identity(tuned) == identity(path)
    other = checkpoints.any_family(tmp_path / "other", name, checkpoints.ANY_FAMILIES[name], tower_seed=3)
    assert identity(other) != identity(path)


def identity(path: Path, dtype: str = "float32") -> bytes:
    return Checkpoint.open(str(path)).identity(dtype).identity


def test_generic_identity_changes_with_each_tower_tensor(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("paligemma")
    names = [stored for _, stored in Checkpoint.open(str(path)).locate("tower").values()]
    assert any(name.startswith("vision_tower") for name in names)
    assert any("multi_modal_projector" in name for name in names)
    keys = {identity(path)}
    for i, name in enumerate(names):
        keys.add(identity(rewritten(path, tmp_path / str(i), lambda t, name=name: nudged(t, name))))
        shutil.rmtree(tmp_path / str(i))
    assert len(keys) == len(names) + 1


def nudged(tensors: Tensors, name: str) -> Tensors:
    tensors[name].reshape(-1)[0] += 1e-3
    return tensors


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"projection_dim": 32}),
        ("config.json", {"vision_config": {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-3}}),
        ("config.json", {"text_config": {"model_type": "gemma", "hidden_size": 32}}),
        ("config.json", {"return_dict": False}),
        ("config.json", {"architectures": ["PaliGemmaForRetrieval"]}),
        ("preprocessor_config.json", {"resample": 2}),
        ("preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.5]}),
        ("processor_config.json", {"patch_size": 7}),
        ("tokenizer_config.json", {"size": {"height": 28, "width": 28}}),
        ("video_preprocessor_config.json", {"size": {"height": 28, "width": 28}}),
    ],
)
def test_generic_identity_changes_with_each_setting(
    file: str, change: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny("paligemma"), tmp_path / "copy"))
    read = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps({**read, **change}))
    assert identity(copy) != identity(tiny("paligemma"))


def test_generic_identity_changes_with_dtype_and_transformers(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity(tiny("paligemma"))
    assert identity(tiny("paligemma"), "bfloat16") != before
    from cornplug.checkpoints import generic_family

    monkeypatch.setattr(generic_family, "_package_versions", lambda: {"transformers": "99.0"})
    assert identity(tiny("paligemma")) != before


def test_generic_name_path_and_quantised_decoder_change_no_key(tiny: Tiny, tmp_path: Path) -> None:
    def quantised(tensors: Tensors) -> Tensors:
        return {
            f"{name}.packed" if "layers.0.mlp" in name and "language_model" in name else name: tensor
            for name, tensor in tensors.items()
        }

    copy = edit_config(
        rewritten(tiny("paligemma"), tmp_path / "copy", quantised, shards=2),
        _name_or_path="somebody/else",
        quantization_config={"quant_method": "awq", "bits": 4},
    )
    assert identity(copy) == identity(tiny("paligemma"))
    # It is served all the same: the decoder is not read.
    assert opened(copy)[1].served.identity == identity(copy)


def test_generic_media_are_computed_one_by_one(tiny: Tiny) -> None:
    """Bit for bit, whatever is in the batch."""
    _, loaded = opened(tiny("mistral3"))
    processor = WholeProcessor(loaded, "image")
    items = [
        loaded.tower.prepare({k: to_wire(t) for k, t in processor(sample_image(i, *size)).items()})
        for i, size in enumerate(SIZES)
    ]
    batched = loaded.tower.encode(items)
    for together, item in zip(batched, items, strict=True):
        assert torch.equal(together, loaded.tower.encode([item])[0])
    assert len({item.digests for item in items}) == len(items)


def test_generic_half_precision_is_near_float32(tiny: Tiny) -> None:
    made = []
    for dtype in ("float32", "bfloat16"):
        _, loaded = opened(tiny("paligemma"), dtype)
        inputs = WholeProcessor(loaded, "image")(sample_image(1))
        made.append(
            loaded.tower.encode([loaded.tower.prepare({k: to_wire(t) for k, t in inputs.items()})])[0]
        )
    assert made[1].dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(made[1].float(), made[0], dim=-1).min() > 0.98


def test_generic_service_of_replicas_prepares_without_weights(tiny: Tiny) -> None:
    """The service itself has the model on "meta" then."""
    registry = ModelRegistry.open([str(tiny("glm4v"))], dtype="float32", device="meta")
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    source = MediaSource(
        model=str(tiny("glm4v")),
        modality="image",
        contents=[png(sample_image(1))],
        salt=None,
        deadline_s=9,
    )
    prepared = preparer.prepare(source)
    assert prepared.inputs.keys() == {"pixel_values", "image_grid_thw"}
    registry.loaded_models()[0].tower.prepare(prepared.inputs)


@pytest.mark.parametrize(
    ("field", "change", "problem"),
    [
        ("pixel_values", None, "pixel_values: missing"),
        ("stray", torch.zeros(1), "stray: unknown"),
        ("pixel_values", torch.full((1, 3, 56, 56), float("nan")), "pixel_values: has NaN"),
    ],
)
def test_generic_tower_bad_input_names_the_field(
    field: str, change: torch.Tensor | None, problem: str, tiny: Tiny
) -> None:
    _, loaded = opened(tiny("paligemma"), device="meta")
    inputs = {"pixel_values": to_wire(torch.zeros(1, 3, 56, 56))}
    if change is None:
        del inputs[field]
    else:
        inputs[field] = to_wire(change)
    with expect_error(EncoderRefused, reason="bad_input", match=problem):
        loaded.tower.prepare(inputs)


@pytest.mark.parametrize("room", [vllm_compat, sglang_compat])
def test_generic_family_is_not_shared_in_an_engine_that_was_not_compared(room: Any, tiny: Tiny) -> None:
    """Its own tower may round otherwise than transformers': it asks for nothing, and says why."""
    model = EngineModel(
        checkpoint=Checkpoint.open(str(tiny("paligemma"))),
        dtype="float32",
        max_model_len=64,
        engine="any",
        validated_families=room.validated_families("float32"),
    )
    with expect_error(CheckpointError, reason="unproven_family", match="'paligemma'"):
        model.tower_identity()


@pytest.mark.parametrize("name", sglang_compat.GENERIC_INPUTS)
def test_generic_family_compared_in_an_engine_asks_the_service_for_its_identity(
    name: str, tiny: Tiny
) -> None:
    _, loaded = opened(tiny(name), device="meta")
    inputs = sglang_compat.GENERIC_INPUTS[name]

    def model(validated: set[str]) -> EngineModel:
        return EngineModel(
            checkpoint=Checkpoint.open(str(tiny(name))),
            dtype="float32",
            max_model_len=64,
            engine="sglang",
            validated_families=frozenset(validated),
            generic_inputs=sglang_compat.GENERIC_INPUTS,
        )

    found = model({name}).tower_identity()
    assert found.served_identity == found.identity == loaded.checkpoint.identity("float32").identity
    assert found.image_inputs == inputs
    method = loaded.tower.methods["image"]
    assert method.required_inputs <= set(inputs) <= set(method.input_names)
    with expect_error(CheckpointError, reason="unproven_family"):
        model(set()).tower_identity()
