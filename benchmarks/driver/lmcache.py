"""LMCache 0.5.6 and its multi-process server beside both engines, as its own examples run it: a baseline.

Its libraries fit neither engine's environment, so `script/site lmcache` puts them into a folder
that only the processes of this baseline see. Between engines of two kinds it shares text, from SGLang
to vLLM; no images, whose placeholders the two engines fill with different numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cornplug.host import free_port
from cornplug.processes import ManagedProcess, responds_ok
from devkit.engines import VllmServer
from devkit.processes import environment
from devkit.sglang_engine import SglangServer, sglang_python

SITE: Final = Path(__file__).parents[2] / ".lmcache-site"
PAGE: Final = "64"
_SAME_HASHES: Final = {"PYTHONHASHSEED": "0"}
"""Parts of a chunk's key must not change from process to process."""
_MAIN: Final = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; sys.exit(main())"


class Lmcache(ManagedProcess):
    """`lmcache server`, and engines that use it. Raises FileNotFoundError without its libraries."""

    def __init__(self, folder: Path, size_gb: float) -> None:
        if not SITE.is_dir():
            raise FileNotFoundError(f"{SITE.name} is not there. Run: script/site lmcache")
        self._folder = folder
        self._port, self._http = free_port(), free_port()
        self._env: Mapping[str, str] = {"PYTHONPATH": str(SITE), **_SAME_HASHES}
        python = sglang_python()
        assert python is not None
        command = [
            str(python), "-c", _MAIN, "server", "--host", "127.0.0.1", "--port", str(self._port),
            "--http-port", str(self._http), "--l1-size-gb", str(size_gb), "--chunk-size", PAGE,
            "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
        ]  # fmt: skip
        super().__init__(command, log=folder / "lmcache.log", env=environment(self._env))

    def is_ready(self) -> bool:
        return responds_ok(f"http://127.0.0.1:{self._http}/healthcheck")

    def sglang(self, model: Path, *args: str, **options: Any) -> SglangServer:
        """A server that saves to it and reads from it."""
        file = self._folder / "lmcache.yaml"
        file.write_text(f"mp_host: 127.0.0.1\nmp_port: {self._port}\n")
        flags = ("--page-size", "16", "--enable-lmcache", "--lmcache-config-file", str(file))
        env = {**options.pop("env", {}), **self._env}
        return SglangServer(model, *args, *flags, env=env, **options)

    def vllm(self, model: Path, *args: str, **options: Any) -> VllmServer:
        """A server that saves to it and reads from it, beside cornplug where `args` ask for that."""
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }
        flags = ("--block-size", "32", "--kv-transfer-config", json.dumps(config))
        env = {**options.pop("env", {}), **_SAME_HASHES}
        return VllmServer(model, *args, *flags, env=env, packages=(SITE,), **options)
