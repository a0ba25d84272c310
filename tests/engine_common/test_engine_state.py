"""One engine's processes learn together that its weights were replaced, and when it began."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from expected_errors import expect_error

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError
from devkit import checkpoints

CHILD = """
import sys
from cornplug.engine_common import engine_state
print(engine_state.current().start_ns(), flush=True)
for line in sys.stdin:
    if line.strip() == "replace":
        engine_state.current().mark_weights_unknown()
    print(int(engine_state.current().has_replaced_weights()), flush=True)
"""


class Child:
    """A process that an engine started."""

    def __init__(self, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self.began_ns = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, what: str) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._line().strip() == "1"

    def close(self) -> None:
        self.process.communicate(timeout=20)


def test_engine_state_replaced_in_one_process_shows_in_all() -> None:
    """As API servers 1 and 2: the one that takes the update tells the other, and the core."""
    engine_state.record_engine_start()
    one, two = Child(), Child()
    try:
        assert one.began_ns == two.began_ns == engine_state.current().start_ns()
        assert [one.tell(""), two.tell(""), engine_state.current().has_replaced_weights()] == [False] * 3
        assert one.tell("replace")
        assert two.tell("")
        assert engine_state.current().has_replaced_weights()
    finally:
        one.close()
        two.close()


def test_engine_state_out_of_reach_reads_as_replaced() -> None:
    lost = Child(_CORNPLUG_ENGINE="1:999:" + "00" * 16)
    try:
        assert lost.tell("")
    finally:
        lost.close()


# -- files that change under the engine ---------------------------------------------------------


def test_file_clock_separates_changes_right_before_and_right_after(tmp_path: Path) -> None:
    """Timestamps lag behind the system clock by up to a tick."""
    for n in range(50):
        before, after = tmp_path / f"{n}-before", tmp_path / f"{n}-after"
        before.write_bytes(b"x")
        moment_ns = engine_state.file_clock_ns()
        after.write_bytes(b"x")
        assert before.stat().st_ctime_ns < moment_ns <= after.stat().st_ctime_ns


def model(folder: Path, began_ns: int) -> EngineModel:
    return EngineModel(
        checkpoint=Checkpoint.open(str(folder)),
        dtype="float32",
        max_model_len=64,
        engine="vllm",
        validated_families=frozenset({"llava"}),
        began_ns=began_ns,
    )


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "preprocessor_config.json"])
def test_engine_model_files_changed_after_start_are_refused(tmp_path: Path, file: str) -> None:
    """A trainer that writes into the folder: what is loaded may be what was there before."""
    folder = checkpoints.llava(tmp_path / "m")
    began_ns = engine_state.file_clock_ns()
    before = model(folder, began_ns)
    before.kv_identity()
    before.tower_identity()
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content)
    times = (folder / file).stat()
    os.utime(folder / file, ns=(times.st_atime_ns, times.st_mtime_ns - 10**12))  # a copy with old times
    for identify in (model(folder, began_ns).kv_identity, model(folder, began_ns).tower_identity):
        with expect_error(CheckpointError, reason="weights_changed", match=file):
            identify()


def test_engine_model_hub_cache_filled_at_start_is_accepted(tmp_path: Path) -> None:
    """Its files are named by their content: what is fetched at start is what is loaded."""
    began_ns = time.time_ns() - 10**9
    made = checkpoints.llava(tmp_path / "made")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.move(made, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    model(snapshot, began_ns).kv_identity()


def test_engine_state_begin_in_child_keeps_start_time() -> None:
    """vLLM resolves the configuration in each API server once more."""
    engine_state.record_engine_start()
    began_ns = engine_state.current().start_ns()
    with mock.patch.object(os, "getpid", return_value=os.getpid() + 1):
        engine_state.record_engine_start()
    assert engine_state.current().start_ns() == began_ns


def test_engine_state_epoch_is_odd_while_weights_are_replaced() -> None:
    engine_state.record_engine_start()
    state, child = engine_state.current(), Child()
    try:
        assert state.source() == (0, None, state.start_ns(), None)
        odd = state.begin_update()
        assert (odd, state.begin_update(), state.source()) == (1, 1, None)
        assert child.tell("") is True
        state.end_update(odd, "/a folder/é", 7)
        assert child.tell("") is False
        assert (state.epoch(), state.source()) == (2, (2, "/a folder/é", 7, None))
        child.tell("replace")
        assert (state.has_replaced_weights(), state.has_unknown_weights(), state.source()) == (
            True,
            True,
            None,
        )
        state.end_update(state.begin_update(), "/b", 8)
        assert state.has_replaced_weights(), "no checkpoint makes them known"
    finally:
        child.close()


def test_engine_state_out_of_reach_has_no_source() -> None:
    state = engine_state.EngineState(None)
    state.end_update(state.begin_update(), "/new", 1)
    assert (state.source(), state.has_unknown_weights()) == (None, True)


def test_engine_state_second_core_after_update_ends_sharing() -> None:
    engine_state.record_engine_start()
    state = engine_state.current()
    assert not state.has_one_core()
    state.record_core_start()
    assert state.has_one_core()
    state.end_update(state.begin_update(), "/new", 7)
    state.record_core_start()
    assert (state.has_one_core(), state.has_unknown_weights()) == (False, True)
    state.mark_weights_unknown(False)
    assert not state.has_one_core()
