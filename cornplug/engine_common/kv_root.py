"""The root of page keys, for both engines: a digest of all that determines KV, but the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cornplug.identity import kv_root
from cornplug.kv_page import PageGeometry


def page_root(
    secret: bytes,
    identity: tuple[bytes, Mapping[str, Any]],
    page: PageGeometry,
    *,
    adapter: bytes | None,
    salt: str | None,
) -> bytes:
    """The root of the page keys of one namespace (32 bytes).

    Args:
        identity: (language model fingerprint, KV spec), as `EngineModel.kv_identity` gives it.
        page: geometry of the whole model's pages, not of a rank's part.
        adapter: `Adapters.digest` of the LoRA that the request runs under; None for none.
        salt: the tenant's; None is the deployment's shared domain, "" is a salt.
    """
    fingerprint, spec = identity
    extra: dict[str, Any] = {"page": page.spec()}
    if adapter is not None:
        extra["lora"] = adapter.hex()
    return kv_root(secret, fingerprint, {**spec, **extra}, salt)
