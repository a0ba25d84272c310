"""Each kind of server that starts as stock starts with cornplug, and shares its KV or says why not."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from sglang.srt.mem_cache import host_memory
from sglang.srt.plugins import load_plugins

from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.kv import exclusions, hicache_config
from devkit import checkpoints
from devkit.sglang_kinds import KINDS, ServerKind

from .test_flags import differences, resolved, shares_kv


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hicache_config, "compile_hash", lambda: None)
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: 64 << 30)
    load_plugins()
    yield
    activation.turn_off()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "text"))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_server_kind_that_stock_resolves_shares_or_equals_stock(kind: ServerKind, model: str) -> None:
    stock = resolved(model, *kind.args)
    with mock.patch.object(compat.logger, "warning") as warning:
        ours = resolved(model, *kind.args, "--enable-cornplug")
    if not kind.excluded_by:
        assert shares_kv(ours)
        return
    assert differences(ours, stock) == {}
    assert f"only embeddings: {kind.excluded_by}" in warning.call_args.args[0] % warning.call_args.args[1:]


def test_exclusions_of_deployments_have_sglang_defaults_as_plain_values(model: str) -> None:
    stock = resolved(model)
    assert {each.field: stock[each.field] for each in exclusions.DEPLOYMENT_FLAGS if each.field in stock} == {
        each.field: each.default for each in exclusions.DEPLOYMENT_FLAGS if each.field in stock
    }
