"""The plugin as SGLang loads it: in which processes it does what, and that nothing fails silently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from cornplug.errors import ConfigError
from cornplug.sglang_hooks import activation, plugin
from cornplug.sglang_hooks.compat import Hook

from .zygote import Zygote

_LOADED = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
ours = [module for module in sys.modules if module.startswith("cornplug.")]
print(json.dumps([sorted(HookRegistry._patched), ours]))
"""


def loaded_process(zygote: Zygote, **env: str) -> tuple[set[str], set[str]]:
    """(hooked targets, our modules) of a fresh process that loads the plugins."""
    done = zygote.run(code=_LOADED, env={**env, "SGLANG_PLUGINS": "cornplug"})
    assert done.returncode == 0, done.stderr
    targets, modules = json.loads(done.stdout.splitlines()[-1])
    return set(targets), set(modules)


def test_plugin_inactive_hooks_only_server_args(zygote: Zygote) -> None:
    targets, modules = loaded_process(zygote)
    assert targets == {
        f"sglang.srt.server_args.ServerArgs.{name}"
        for name in ("add_cli_args", "from_cli_args", "resolve_once")
    }
    assert "cornplug.sglang_hooks.kv.hicache_storage" not in modules
    assert "cornplug.sglang_hooks.media.mm_identifiers" not in modules


@pytest.mark.parametrize(
    ("said", "hooked", "free"),
    [
        ("kv,weights", "UnifiedRadixCache.prefetch_from_storage", ("encoder.receiver", "lora", "multimodal")),
        ("images,weights", "BaseMultimodalProcessor._finalize_mm_items", ("unified_radix_cache", "lora")),
        (
            "weights",
            "SchedulerWeightUpdaterManager.update_weights_from_disk",
            ("unified_radix_cache", "mm_sched"),
        ),
    ],
)
def test_plugin_in_child_installs_needed_hooks(
    zygote: Zygote, said: str, hooked: str, free: tuple[str, ...]
) -> None:
    targets, _ = loaded_process(zygote, CORNPLUG_SGLANG="{}", CORNPLUG_SGLANG_PARTS=said)
    assert targets >= {hook.target for hook in plugin.hooks_of(said.split(","))}
    assert any(target.endswith(hooked) for target in targets)
    assert not any(other in target for target in targets for other in free)


def test_install_repeated_hooks_every_target_once() -> None:
    load_plugins()
    plugin.install(plugin.ALL)
    plugin.install(plugin.ALL)
    for hook in plugin.hooks_of(plugin.ALL):
        assert plugin.is_applied(hook), hook
        assert plugin.signature_problem(hook) == "", hook
        ours = [f for _, f, _ in HookRegistry._hooks[hook.target] if f is hook.function]
        assert len(ours) == 1, hook


def _grown(key: object, prior: object, another: object) -> None:
    """A function of SGLang's that has got a parameter."""


@pytest.mark.parametrize(
    ("kind", "function", "reads", "fits"),
    [
        ("after", lambda result, key, prior: None, (), False),
        ("after", lambda result, key, prior, another: None, (), True),
        ("after", lambda result, key, before, another: None, (), False),
        ("around", lambda original, *args, **kwargs: None, ("key", "another"), True),
        ("around", lambda original, *args, **kwargs: None, ("key", "gone"), False),
        ("before", lambda *args, **kwargs: None, (), True),
        ("before", lambda key, **kwargs: None, (), False),
    ],
)
def test_verify_uncallable_hook_is_config_error(
    kind: Any, function: Any, reads: tuple[str, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = Hook(f"{__name__}._grown", kind, function, reads)
    assert (plugin.signature_problem(hook) == "") is fits
    monkeypatch.setattr(plugin, "is_applied", lambda hook: True)
    monkeypatch.setattr(plugin, "_registered", {"grown": hook})
    if fits:
        plugin.verify_hooks()
    else:
        with pytest.raises(ConfigError, match="grown"):
            plugin.verify_hooks()


def test_hooks_in_inactive_server_change_nothing() -> None:
    """They are in place here; a server that does not share must not notice."""
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    plugin.install(plugin.ALL)
    activation.turn_off()
    record = prepare_server_args(["--model-path", "dummy", "--device", "cpu"])
    record.resolve_once()
    assert (record.page_size, record.hicache_storage_backend) == (None, None)


def test_verify_missing_target_is_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Hook("sglang.srt.managers.scheduler.Scheduler.no_such_method", "before", lambda *_: None)
    monkeypatch.setitem(plugin._registered, "gone", gone)
    with pytest.raises(ConfigError, match="gone"):
        plugin.verify_hooks()


def test_is_applied_tells_installed_hook_from_other() -> None:
    def theirs(*_args: Any) -> None:
        """Another plugin's."""

    def ours(*_args: Any) -> None:
        """Not in the chain."""

    HookRegistry.register(f"{__name__}._seam", theirs)
    HookRegistry.apply_hooks()
    assert plugin.is_applied(Hook(f"{__name__}._seam", "after", theirs))
    assert not plugin.is_applied(Hook(f"{__name__}._seam", "after", ours))


def _seam() -> None:
    """A function to be hooked."""
