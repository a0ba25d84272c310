"""Installs hooks in SGLang's front ends, which compute the keys of images.

A single front end loads plugins itself, so it is hooked like the main process. The worker processes of
`--tokenizer-worker-num` are hooked through the application that they import (`http_workers.py`). Other front
ends load no plugins. Images that they receive have no key, so neither the embeddings of these images nor the
KV after them are shared. All other KV is shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

from cornplug.sglang_hooks.compat import logger

APPLICATION: Final = "cornplug.sglang_hooks.http_workers:app"
_VARIABLE: Final = "SGLANG_HTTP_SERVER_APP_PATH"
_IMAGES: Final = "images"
"""Name of the part (`hook_registry.py`) that the front ends need."""


def hook(server_args: Any, needed: Iterable[str]) -> None:
    """Let the tokenizer workers of this server import cornplug's application, if the server shares images.

    Call this in the main process before it starts other processes. If the front end does not load plugins,
    this logs a warning that names the responsible flag.
    """
    unhook()
    if _IMAGES not in needed:
        return
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs

    settled = resolved_view(server_args)
    workers = settled.tokenizer_worker_num
    own_application = workers > 1 and _VARIABLE in os.environ
    unhooked = [
        flag
        for flag, is_set in (
            (f"{_VARIABLE} with --tokenizer-worker-num {workers}", own_application),
            ("--smg-grpc-mode", settled.smg_grpc_mode),
            ("--grpc-mode", settled.grpc_mode),
            ("SGLANG_RUST_SERVER", envs.SGLANG_RUST_SERVER.get()),
        )
        if is_set
    ]
    if unhooked:
        logger.warning(
            "cornplug: images are not shared: SGLang does not load plugins in the process that reads "
            "images with %s",
            ", ".join(unhooked),
        )
    elif workers > 1:
        os.environ[_VARIABLE] = APPLICATION


def unhook() -> None:
    """Restore SGLang's application for the workers of the server that this process starts next."""
    if os.environ.get(_VARIABLE) == APPLICATION:
        del os.environ[_VARIABLE]
