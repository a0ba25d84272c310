"""A trainer's version names an engine's weights: the same start and version share, and nothing else does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import EngineModel, InitialModel
from cornplug.errors import CheckpointError
from cornplug.identity import digest, trainer_identity
from devkit import checkpoints


def model(folder: Path, dtype: str = "float32", engine: str = "vllm") -> EngineModel:
    return EngineModel(
        checkpoint=Checkpoint.open(str(folder)),
        dtype=dtype,
        max_model_len=64,
        engine=engine,
        validated_families=frozenset({"qwen2_vl"}),
    )


def names(found: EngineModel) -> tuple[object, bytes]:
    return found.kv_identity(), found.tower_identity().identity


def named(folder: Path, version: str, **settings: str) -> tuple[object, bytes]:
    """The names of an engine that began with a folder and was given a version."""
    engine_state.record_engine_start(fresh=True)
    started = InitialModel()
    started.current(lambda: model(folder, **settings))
    state = engine_state.current()
    state.end_named_update(state.begin_update(), version)
    return names(started.current(lambda: model(folder, **settings)))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return checkpoints.qwen2_vl(tmp_path / "start")


def test_started_model_with_same_version_is_the_same_in_two_engines(start: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(start, tmp_path / "copy")
    assert named(start, "run-1/7") == named(copy, "run-1/7")
    assert named(start, "run-1/7") == named(start, "run-1/7", engine="sglang"), "as with the checkpoint"


OTHERS: dict[str, Callable[[Path, Path], tuple[object, bytes]]] = {
    "version": lambda start, _: named(start, "run-1/8"),
    "checkpoint": lambda start, _: names(model(start)),
    "dtype": lambda start, _: named(start, "run-1/7", dtype="bfloat16"),
    "weights": lambda _, folder: named(
        checkpoints.qwen2_vl(folder / "b", llm_seed=5, tower_seed=6), "run-1/7"
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_started_model_with_another_origin_has_other_names(what: str, start: Path, tmp_path: Path) -> None:
    ours, other = named(start, "run-1/7"), OTHERS[what](start, tmp_path)
    assert ours[0] != other[0]
    assert ours[1] != other[1]


@pytest.mark.parametrize("part", ["tower_seed", "llm_seed"])
def test_started_model_of_checkpoint_with_one_part_in_common_has_other_names(
    part: str, start: Path, tmp_path: Path
) -> None:
    """Two trainers that each count from 1: what one of them froze is not what the other one trained."""
    other = checkpoints.qwen2_vl(tmp_path / "other", **{part: 9})
    assert not set(map(str, named(start, "1"))) & set(map(str, named(other, "1")))


def test_started_model_of_trainer_s_weights_asks_no_encoder_service(start: Path) -> None:
    assert model(start).tower_identity().served_identity is not None
    engine_state.record_engine_start(fresh=True)
    started = InitialModel()
    started.current(lambda: model(start))
    tower = started.with_version("7").tower_identity()
    assert tower.served_identity is None
    assert tower.videos is None or tower.videos.served_identity is None


def test_started_model_that_no_one_described_has_no_version() -> None:
    with pytest.raises(CheckpointError) as caught:
        InitialModel().with_version("7")
    assert caught.value.reason == "weights_updated"


VERSIONS = st.text(min_size=1, max_size=40)


@given(VERSIONS, VERSIONS, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_of_trainer_is_equal_for_equal_parts_alone(one: str, two: str, identity: bytes, start: bytes) -> None:
    assert (trainer_identity(identity, start, one) == trainer_identity(identity, start, two)) is (one == two)
    assert trainer_identity(identity, start, one) != identity
    if identity != start:
        assert trainer_identity(identity, start, one) != trainer_identity(start, identity, one)


def test_of_trainer_has_a_domain_of_its_own() -> None:
    expected = digest("cornplug-trainer-weights-v1", b"i" * 32, b"s" * 32, b"7")
    assert trainer_identity(b"i" * 32, b"s" * 32, "7") == expected


@given(st.lists(st.tuples(st.booleans(), VERSIONS), max_size=8))
def test_engine_state_source_is_the_last_update_s(updates: list[tuple[bool, str]]) -> None:
    """A folder and a version of one spelling are two things."""
    engine_state.record_engine_start(fresh=True)
    state = engine_state.current()
    for is_version, name in updates:
        odd = state.begin_update()
        assert state.source() is None
        if is_version:
            state.end_named_update(odd, name)
            assert state.source() == (odd + 1, None, state.start_ns(), name)
        else:
            path = name.replace("\x00", "")
            state.end_update(odd, path, 5)
            assert state.source() == (odd + 1, path, 5, None)
    assert state.epoch() == 2 * len(updates)


@pytest.mark.parametrize("version", [None, "", " ", "default", 7, "6", "v" * 1025])
def test_unusable_version_says_why(version: object) -> None:
    assert weights_guard.version_problem(version, "6")


def test_unusable_version_is_empty_for_a_version_that_names_weights() -> None:
    assert not weights_guard.version_problem("7", "6")
    assert not weights_guard.version_problem("7", "default")


def test_engine_state_version_too_long_is_refused() -> None:
    state = engine_state.current()
    with pytest.raises(ValueError, match="1025"):
        state.end_named_update(state.begin_update(), "v" * 1025)
    assert state.has_replaced_weights()
