"""SGLang's HTTP application as each worker process of `--tokenizer-worker-num` imports it: hooked.

SGLang 0.5.23 loads plugins in each kind of process but these. It imports their application by the name in
`SGLANG_HTTP_SERVER_APP_PATH`, which the main process sets to this module (`tokenizer_workers.py`).
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from sglang.srt.plugins import load_plugins

# First: modules that are imported later bind the hooked functions.
load_plugins()

app: Final[Any] = importlib.import_module("sglang.srt.entrypoints.http_server").app
"""SGLang's own, a FastAPI."""
