"""A host with a store of its own, and engines of one text model beside it."""

from __future__ import annotations

from pathlib import Path

from devkit.engines import EngineServer, StoreProcess, VllmServer
from devkit.sglang_engine import SglangServer

_FLAGS = {"vllm": ("--kv-connector", "cornplug"), "sglang": ()}


class TextHost:
    """What it makes is not started. `store_flags` are those of `cornplug serve-store`."""

    def __init__(self, name: str, model: Path, folder: Path, sockets: Path, *store_flags: str) -> None:
        self.model, self._store_flags = model, store_flags
        self._log = folder / name
        self._socket = sockets / f"{name}.sock"

    def store(self, env: dict[str, str] | None = None) -> StoreProcess:
        return StoreProcess(self._socket, *self._store_flags, log=Path(f"{self._log}-store.log"), env=env)

    def engine(self, kind: str, name: str, env: dict[str, str] | None = None) -> EngineServer:
        flags = ("--cornplug-app", name, "--cornplug-store", str(self._socket))
        server = SglangServer if kind == "sglang" else VllmServer
        env = {"CORNPLUG_STORE_AUTOSTART": "false", **(env or {})}
        return server(self.model, *_FLAGS[kind], *flags, log=Path(f"{self._log}-{name}.log"), env=env)
