"""SGLang's HTTP application with cornplug's hooks, for the worker processes of `--tokenizer-worker-num`.

SGLang 0.5.23 does not load plugins in these worker processes. They import the application that
`SGLANG_HTTP_SERVER_APP_PATH` names. The main process sets this variable to this module (`activation.py`).
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from sglang.srt.plugins import load_plugins

# Load plugins first, because the modules imported below bind the hooked functions.
load_plugins()

app: Final[Any] = importlib.import_module("sglang.srt.entrypoints.http_server").app
"""SGLang's FastAPI application."""
