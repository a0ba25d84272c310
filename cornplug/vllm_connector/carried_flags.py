"""vLLM's own flags that cornplug's connectors need in every process of an engine.

The main process writes them beside cornplug's settings into the connectors' configuration. They are not
settings, so no file and no environment variable sets them.
"""

from __future__ import annotations

from typing import Final

from cornplug.config import CARRIED

IMAGES_PER_PROMPT: Final = f"{CARRIED}images_per_prompt"
"""Maximum number of images in a prompt of a server without a tower (`--limit-mm-per-prompt`). Absent: no
limit."""
EMBEDDINGS_BY_VALUE: Final = f"{CARRIED}embeddings_by_value"
"""True if requests may contain embeddings (`--enable-mm-embeds`)."""
