"""Every family against transformers' whole model, and against every way a checkpoint may differ.

To add a family: a recipe in `devkit.checkpoints`, and one line in `CASES`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cornplug import identity
from cornplug.checkpoints.checkpoint import Checkpoint, ModelIdentity
from cornplug.checkpoints.families import FAMILIES
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.towers.base import TowerItem
from devkit import checkpoints

from ..tower_rig import (
    MEDIA,
    Case,
    Halves,
    deepstacked,
    edit_config,
    fine_tuned_and_quantised,
    nudged,
    rewritten,
    sample_images,
    whole_model,
    wire,
)

CASES: dict[str, Case] = {
    "llava": Case(recipe=checkpoints.llava),
    "llava last layer": Case(recipe=checkpoints.llava, kwargs={"config": {"vision_feature_layer": -1}}),
    "llava first layer": Case(recipe=checkpoints.llava, kwargs={"config": {"vision_feature_layer": 1}}),
    "llava with CLS": Case(
        recipe=checkpoints.llava, kwargs={"config": {"vision_feature_select_strategy": "full"}}
    ),
    "llava with SigLIP": Case(
        recipe=checkpoints.llava,
        kwargs={
            "vision": {"model_type": "siglip_vision_model", **checkpoints.TINY_SIGLIP},
            "config": {"vision_feature_select_strategy": "full"},
        },
    ),
    "llava_next": Case(recipe=checkpoints.llava_next),
    "llava_onevision": Case(recipe=checkpoints.llava_onevision, media=lambda: sample_images(330, 340)),
    "gemma3": Case(recipe=checkpoints.gemma3),
    "internvl": Case(recipe=checkpoints.internvl),
    "qwen2_vl": Case(recipe=checkpoints.qwen2_vl),
    "qwen2_audio": Case(recipe=checkpoints.qwen2_audio, kwargs={"seconds": 4}, modality="audio"),
    "ultravox": Case(
        recipe=checkpoints.ultravox,
        kwargs={"seconds": 4},
        modality="audio",
        reference=lambda model, made: model.hear(made),
    ),
    "ultravox v0.4": Case(
        recipe=checkpoints.ultravox,
        kwargs={"seconds": 4, "config": {"projector_ln_mid": False, "projector_act": "gelu"}},
        modality="audio",
        reference=lambda model, made: model.hear(made),
    ),
    "qwen2_vl video": Case(recipe=checkpoints.qwen2_vl, modality="video"),
    "qwen2_5_vl": Case(recipe=checkpoints.qwen2_5_vl),
    "qwen2_5_vl video": Case(recipe=checkpoints.qwen2_5_vl, modality="video"),
    "qwen3_vl": Case(recipe=checkpoints.qwen3_vl, reference=deepstacked),
    "qwen3_vl video": Case(recipe=checkpoints.qwen3_vl, modality="video", reference=deepstacked),
    "qwen3_vl_moe": Case(recipe=checkpoints.qwen3_vl_moe, reference=deepstacked),
}
SECRET = b"s" * 32

Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny checkpoint of a case, made once. Do not write to it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = CASES[name].make(tmp_path_factory.mktemp("tower") / name.replace(" ", "-"))
        return made[name]

    return of


def ids(path: Path) -> ModelIdentity:
    return Checkpoint.open(str(path)).identity("float32")


def parts(path: Path) -> tuple[bytes, bytes]:
    found = ids(path)
    return found.tower_fp, found.projector_fp


VARIANTS = (
    "llava last layer",
    "llava first layer",
    "llava with CLS",
    "llava with SigLIP",
    "ultravox v0.4",
    "qwen2_vl video",
    "qwen2_5_vl video",
)
"""Cases of a family that has another: `script/test` compares their embeddings only."""
each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.more if name in VARIANTS else []) for name in CASES]
)


def test_towers_every_family_has_a_case(tiny: Tiny) -> None:
    assert {Checkpoint.open(str(tiny(name))).family.name for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_towers_embeddings_equal_transformers(name: str, tiny: Tiny) -> None:
    case, path = CASES[name], tiny(name)
    made = case.inputs(path)
    model = whole_model(path)
    reference = case.reference or MEDIA[case.modality].reference
    with torch.inference_mode():
        wanted = [reference(model, one) for one in made]
    for ours, theirs in zip(Halves.load(path).embed(made), wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


@each_case
def test_towers_batch_equals_one_by_one(name: str, tiny: Tiny) -> None:
    made, halves = CASES[name].inputs(tiny(name)), Halves.load(tiny(name))
    batched = halves.embed(made)
    for whole, one in zip(batched, made, strict=True):
        alone = halves.embed([one])[0]
        rounding = 8 * torch.finfo(torch.float32).eps * float(alone.abs().max())
        if not name.startswith("qwen3_vl"):
            rounding = min(rounding, 2e-6)
        torch.testing.assert_close(whole, alone, atol=rounding, rtol=0)
        assert whole.is_contiguous()
    assert len({row.numpy().tobytes() for row in batched}) == len(made)


@each_case
def test_towers_loaded_again_give_equal_embeddings(name: str, tiny: Tiny) -> None:
    """A replica loads the tower from the checkpoint once more."""
    made, halves = CASES[name].inputs(tiny(name))[:2], Halves.load(tiny(name))
    items = halves.items(made)
    replica = Halves.load(tiny(name)).tower
    for ours, theirs in zip(replica.encode(items), halves.tower.encode(items), strict=True):
        assert torch.equal(ours, theirs)


@each_case
def test_towers_half_precision_is_near_float32(name: str, tiny: Tiny) -> None:
    made = CASES[name].inputs(tiny(name))[:1]
    exact = Halves.load(tiny(name)).embed(made)[0]
    half = Halves.load(tiny(name), torch.bfloat16).embed(made)[0]
    assert half.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(half.float(), exact, dim=-1).min() > 0.98


@each_case
def test_towers_path_name_and_file_split_change_no_key(name: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(name)
    moved = rewritten(path, tmp_path / "elsewhere", lambda tensors: tensors, shards=3)
    edit_config(moved, _name_or_path="somebody/else")
    assert ids(moved) == ids(path)
    made = CASES[name].inputs(path)[:2]
    for a, b in zip(Halves.load(moved).embed(made), Halves.load(path).embed(made), strict=True):
        assert torch.equal(a, b)


@each_case
def test_towers_resaved_by_transformers_changes_no_key(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Both the names of `save_pretrained` writes and the names in memory, which trainers save."""
    path = tiny(name)
    model = whole_model(path)
    saved, raw = tmp_path / "saved", tmp_path / "raw"
    shutil.copytree(path, saved)
    model.save_pretrained(saved)
    memory = {key: tensor.contiguous().clone() for key, tensor in model.state_dict().items()}
    rewritten(path, raw, lambda _: memory)
    assert ids(saved) == ids(path)
    assert ids(raw) == ids(path)
    made = CASES[name].inputs(path)[:2]
    for a, b in zip(Halves.load(raw).embed(made), Halves.load(path).embed(made), strict=True):
        assert torch.equal(a, b)


@each_case
def test_towers_changed_value_changes_one_fingerprint_only(name: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(name)
    tower, projector = parts(path)
    other_tower = nudged(path, tmp_path / "t", "tower")
    other_projector = nudged(path, tmp_path / "p", "projector")
    other_llm = nudged(path, tmp_path / "l", "language_model")
    assert parts(other_tower)[0] != tower
    assert parts(other_tower)[1] == projector
    assert parts(other_projector)[0] == tower
    assert parts(other_projector)[1] != projector
    assert ids(other_llm) == ids(path)
    assert len({ids(p).identity for p in (path, other_tower, other_projector)}) == 3


@each_case
def test_towers_llms_of_two_widths_share_features(name: str, tiny: Tiny, tmp_path: Path) -> None:
    case, path = CASES[name], tiny(name)
    if not Checkpoint.open(str(path)).family.shares_features:
        pytest.skip("its tower's output is not kept before the projector")
    wide = case.make(tmp_path / "wide", **{"llm_seed": 7, **case.wider})
    registry = ModelRegistry.open([str(path), str(wide)], dtype="float32", device="cpu")
    one, other = registry.loaded_models()
    assert one.tower is other.tower
    assert one.served.identity != other.served.identity
    # What one model's request left is what the other's projector takes.
    item, theirs = one.tower.prepare(first(case, path)), other.tower.prepare(first(case, wide))
    assert feature_key(one, item) == feature_key(other, theirs)
    embedding = other.projector.project(one.tower.encode([item]), [theirs])[0]
    assert torch.equal(embedding, Halves.load(wide).embed(case.inputs(wide)[:1])[0])


@each_case
def test_towers_fine_tune_with_quantised_llm_shares_embeddings(name: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(name)
    tuned = fine_tuned_and_quantised(path, tmp_path / "tuned")
    registry = ModelRegistry.open([str(path), str(tuned)], dtype="float32", device="cpu")
    one, other = registry.loaded_models()
    assert one.served.identity == other.served.identity
    assert (one.tower, one.projector) == (other.tower, other.projector)
    llms = {model.checkpoint.fingerprint("language_model") for model in (one, other)}
    assert len(llms) == 2


@each_case
def test_towers_fine_tune_of_another_tower_never_shares(name: str, tiny: Tiny, tmp_path: Path) -> None:
    case, path = CASES[name], tiny(name)
    tuned = nudged(path, tmp_path / "tuned", "tower")
    registry = ModelRegistry.open([str(path), str(tuned)], dtype="float32", device="cpu")
    one, other = registry.loaded_models()
    assert one.tower is not other.tower
    assert one.served.identity != other.served.identity
    item = one.tower.prepare(first(case, path))
    assert feature_key(one, item) != feature_key(other, item)


def first(case: Case, path: Path) -> dict[str, WireTensor]:
    return wire(case.inputs(path)[0])


def feature_key(loaded: LoadedModel, item: TowerItem) -> bytes:
    return identity.feature_key(SECRET, loaded.served.tower_fp, loaded.tower_spec_fp, item.digests, None)
