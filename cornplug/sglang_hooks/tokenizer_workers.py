"""Installs hooks in SGLang's front ends, where images get their keys.

A single front end is hooked like the main process, because it loads plugins itself. The worker processes of
`--tokenizer-worker-num` are hooked through the application that they import (`http_workers.py`). Other front
ends load no plugins. Their images have no key, so neither their embeddings nor the KV after them are shared.
Everything else is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

from cornplug.sglang_hooks.compat import logger

APPLICATION: Final = "cornplug.sglang_hooks.http_workers:app"
_VARIABLE: Final = "SGLANG_HTTP_SERVER_APP_PATH"
_IMAGES: Final = "images"
"""Part of this package (`hook_registry.py`) that the front ends need."""


def hook(server_args: Any, needed: Iterable[str]) -> None:
    """Let the tokenizer workers of this server import cornplug's application, if its images are shared.

    Called in the main process, before it starts others. If a front end loads no plugins, a warning names its
    flag.
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
