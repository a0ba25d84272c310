"""Whatever may change an engine's weights ends its sharing, before the first byte changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import io_struct

from cornplug.engine_common import weights_guard
from cornplug.sglang_hooks.model import weight_updates


def run(name: str, request: Any) -> None:
    """Each hook on a method of that name, as the registry calls it."""
    found = [hook for hook in weight_updates.HOOKS if hook.target.endswith(f".{name}")]
    assert found
    for hook in found:
        hook.function(None, request)


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        (
            "update_weights_from_tensor",
            io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[]),
        ),
        ("update_weights_from_ipc", io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={})),
        ("begin_weight_update", io_struct.BeginWeightUpdateReqInput()),
        ("check_weights", io_struct.CheckWeightsReqInput(action="reset_tensors")),
        ("handle_rpc_request", io_struct.RpcReqInput(method="load_my_weights", parameters=None)),
    ],
)
def test_weight_updates_replacing_request_ends_sharing(name: str, request_: Any) -> None:
    assert not weights_guard.has_replaced_weights()
    run(name, request_)
    assert weights_guard.has_replaced_weights()


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("begin_weight_update", io_struct.BeginWeightUpdateReqInput(selector="draft")),
        ("check_weights", io_struct.CheckWeightsReqInput(action="checksum")),
        ("handle_rpc_request", io_struct.RpcReqInput(method="save_sharded_model", parameters=None)),
    ],
)
def test_weight_updates_harmless_request_keeps_sharing(name: str, request_: Any) -> None:
    run(name, request_)
    assert not weights_guard.has_replaced_weights()


@pytest.mark.parametrize(
    ("saver", "backup", "tags", "lost"),
    [
        (True, False, None, True),
        (True, False, ["weights"], True),
        (True, False, ["kv_cache"], False),
        (True, True, None, False),
        (False, False, None, False),
    ],
)
def test_weight_updates_released_memory_without_backup_ends_it(
    saver: bool, backup: bool, tags: list[str] | None, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups import overrides

    settings = SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=backup)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: None)
    monkeypatch.setattr(overrides, "resolved_view", lambda _: settings)
    run("release_memory_occupation", io_struct.ReleaseMemoryOccupationReqInput(tags=tags))
    assert weights_guard.has_replaced_weights() is lost
