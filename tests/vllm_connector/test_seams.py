"""The functions of vLLM that cornplug wraps or overrides have the same arguments in each supported release.

`tests/golden/vllm_seams.txt` lists them; this runs beside each release and names a seam that moved.
`RECORD_VLLM_SEAMS=1 pytest tests/vllm_connector/test_seams.py` writes the list anew.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from cornplug.vllm_connector import connector_config, cpu_use, flags, plugin
from cornplug.vllm_connector.ec_connector import CornplugECConnector
from cornplug.vllm_connector.kv import page_keys, pauses
from cornplug.vllm_connector.kv_connector import CornplugConnector
from cornplug.vllm_connector.media import late_misses, mm_identifiers, partial_models, served_images
from cornplug.vllm_connector.media.early_prefill import InFlightEncoderCacheManager
from cornplug.vllm_connector.model import reloads, weight_updates

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm_seams.txt"
KV = (page_keys, pauses)
MEDIA = (late_misses, mm_identifiers, partial_models, served_images)
WEIGHTS = (reloads, weight_updates)
WRAPPING = (flags, connector_config, cpu_use, *KV, *MEDIA, *WEIGHTS)
CONNECTOR = "vllm.multimodal.media.connector"
REGISTER = "vllm.v1.kv_offload.cpu.host_register"
CALLED = (
    ("vllm._custom_ops", "swap_blocks_batch"),
    ("vllm.multimodal.cache.factories", "_get_cache_type"),
    (REGISTER, "host_register"),
    (REGISTER, "host_unregister"),
    (CONNECTOR, "MediaConnector.load_from_url"),
    (CONNECTOR, "MediaConnector.load_from_url_async"),
    (CONNECTOR, "MediaConnector._assert_url_in_allowed_media_domains"),
    ("vllm.renderers.chat_utils", "BaseMultiModalItemTracker.add"),
)
"""Functions of vLLM's own offloading worker that `kv/arena_moves.py` calls, and those of its media loading
and parsing that `media/served_images.py` calls."""
OVERRIDING: tuple[tuple[type, type], ...] = (
    (KVConnectorBase_V1, CornplugConnector),
    (ECConnectorBase, CornplugECConnector),
    (EncoderCacheManager, InFlightEncoderCacheManager),
)
NOT_IN_ALL = {"KVConnectorBase_V1.unregister_kv_caches": "from 0.33 on"}
"""Methods that some releases never call -> since when others do."""


def arguments(function: Any) -> str:
    """Names, kinds and presence of defaults; annotations and the defaults' values do not count."""
    shown = []
    for one in inspect.signature(inspect.unwrap(function)).parameters.values():
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else "=..."
        shown.append(f"{stars}{one.name}{default}")
    return ", ".join(shown)


def seams() -> Iterator[str]:
    wraps = chain(served_images.RETRY_AFTER_WRAPS, *(module.WRAPS for module in WRAPPING))
    for home, target, _ in wraps:
        function = reduce(getattr, target.split("."), importlib.import_module(home))
        yield f"{home}:{target}({arguments(getattr(function, '_cornplug_original', function))})"
    for home, name in CALLED:
        function = reduce(getattr, name.split("."), importlib.import_module(home))
        yield f"{home}:{name}({arguments(function)})"
    for base, ours in OVERRIDING:
        for name, method in vars(ours).items():
            if not name.startswith("_") and inspect.isfunction(
                inspect.unwrap(getattr(method, "__func__", method))
            ):
                label = f"{base.__name__}.{name}"
                found = getattr(super(ours, ours), name, None)
                if found is not None:
                    yield f"{label}({arguments(found)})"
                elif label not in NOT_IN_ALL:
                    yield f"{label} is gone"


def test_seams_of_this_release_are_as_recorded() -> None:
    plugin.register()
    found = {seam for seam in seams() if seam.partition("(")[0] not in NOT_IN_ALL}
    if os.environ.get("RECORD_VLLM_SEAMS"):
        GOLDEN.write_text("".join(f"{seam}\n" for seam in sorted(found)))
    recorded = set(GOLDEN.read_text().splitlines())
    assert {"new": found - recorded, "gone": recorded - found} == {"new": set(), "gone": set()}
