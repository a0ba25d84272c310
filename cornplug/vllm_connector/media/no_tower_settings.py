"""vLLM settings for `--cornplug-tower service`, and the model families that support it.

vLLM does not load the weights of a tower if media of its modalities are not allowed
(`--limit-mm-per-prompt`), and accepts embeddings of these modalities instead (`--enable-mm-embeds`). vLLM's
own limit for images is then 0. The user's limit is kept in cornplug's settings, which every API process
receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cornplug.config import IMAGES_PER_PROMPT, Config
from cornplug.engine_common.shared_flags import settings
from cornplug.errors import ConfigError
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.several_connectors import our_settings

TAKES_EMBEDDINGS: Final[Mapping[str, bool]] = {
    "internvl": False,
    "llava": False,
    "llava_next": False,
    "llava_onevision": False,
    "qwen2_vl": True,
    "qwen2_5_vl": True,
    "qwen3_vl": True,
    "qwen3_vl_moe": True,
}
"""Model families that accept `image_embeds` in vLLM 0.32 and 0.33. The value is whether a request must also
contain the image's grid."""

_FLAG: Final = "--cornplug-tower service"
_NONE: Final = {"image": 0, "video": 0, "audio": 0}


def is_asked_for(config: Any) -> bool:
    """Return whether this VllmConfig configures an engine whose tower runs in the encoder service."""
    said = settings_in(config)
    return bool(said) and ours(said).engine.tower == "service"


def settings_in(config: Any) -> list[dict[str, Any]]:
    """Return cornplug's settings from each of its connectors in engine arguments or a VllmConfig."""
    kv, ec = getattr(config, "kv_transfer_config", None), getattr(config, "ec_transfer_config", None)
    found = [our_settings(kv)]
    if ec is not None and ec.ec_connector == EC_CONNECTOR:
        found.append(ec.ec_connector_extra_config)
    return [said for said in found if said is not None]


def ours(said: list[dict[str, Any]]) -> Config:
    """Return the Config for a nonempty result of `settings_in`. The encoder-cache connector's settings take
    precedence."""
    return settings(dict(said[-1]))


def leave_out(args: Any) -> bool:
    """If the encoder service runs the tower, set vLLM's flags so that the engine does not load its tower.
    Returns whether the service runs the tower.

    Raises ConfigError if no service is configured, or if another flag needs something that the service does
    not support.
    """
    said = settings_in(args)
    if not said:
        return False
    config = ours(said)
    if config.engine.tower != "service":
        return False
    if not config.encoder.engine_urls:
        raise ConfigError(
            _FLAG,
            "an engine without a tower needs the URL of an encoder service",
            "Add --cornplug-encoder http://HOST:8750.",
        )
    ec = args.ec_transfer_config
    if args.mm_encoder_only or (ec is not None and ec.ec_role == "ec_producer"):
        raise ConfigError(_FLAG, "this engine runs only its tower", f"Remove {_FLAG}.")
    if (args.media_io_kwargs or {}).get("image"):
        raise ConfigError(
            "--media-io-kwargs",
            "the encoder service decodes the images of an engine without a tower, with vLLM's defaults",
            f"Remove its part 'image', or {_FLAG}.",
        )
    limit = _count((args.limit_mm_per_prompt or {}).get("image"))
    for one in said:
        # If this function is called again, `args` has the limits that the first call set.
        if limit is not None and IMAGES_PER_PROMPT not in one and args.limit_mm_per_prompt != _NONE:
            one[IMAGES_PER_PROMPT] = limit
    args.limit_mm_per_prompt = dict(_NONE)
    args.enable_mm_embeds = True
    return True


def check_model(config: Any) -> None:
    """Raise ConfigError if the engine with this VllmConfig cannot run without its tower."""
    family = str(getattr(config.model_config.hf_config, "model_type", None))
    if family not in TAKES_EMBEDDINGS:
        raise ConfigError(
            _FLAG,
            f"vLLM does not accept image embeddings for models of family {family!r}, only for "
            f"{', '.join(sorted(TAKES_EMBEDDINGS))}",
            f"Remove {_FLAG}. The engine then has its own tower, and tries the encoder service first.",
        )
    if not settings_in(config):
        raise ConfigError(
            _FLAG,
            "vLLM rejects cornplug's connector with these flags, and the engine has no tower",
            f"Remove {_FLAG}, or the flag that the log names.",
        )


def _count(limit: Any) -> int | None:
    """Return the maximum number of items from a modality's limit, which may have any of vLLM's forms. Returns
    None without a limit."""
    if isinstance(limit, Mapping):
        limit = limit.get("count")
    count = getattr(limit, "count", limit)
    return count if isinstance(count, int) else None
