"""Access policy: whether the configuration exposes the service, and the salt of a request's entries."""

from __future__ import annotations

from cornplug.config import EncoderConfig, QosConfig
from cornplug.encoder_service.client.endpoints import is_loopback
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.qos import QosCaller


def check_exposure(config: EncoderConfig, qos: QosConfig) -> None:
    """Raises ConfigError where callers would be admitted by accident: from other hosts, without any key."""
    have_keys = any(one.bound_keys() for one in qos.classes.values())
    if config.require_key and not (have_keys or config.admin_key.get_secret_value()):
        raise ConfigError(
            "encoder.require_key",
            "there is no key",
            "Give a class api_keys or tenants, in [qos.classes.NAME].",
        )
    if not (is_loopback(config.host) or config.require_key or config.allow_anonymous):
        raise ConfigError(
            "encoder.host",
            f"{config.host} is reached from beyond this host, and no key is required",
            "Set encoder.require_key (--require-key) and keys of classes; or, on a private "
            "network, encoder.allow_anonymous (--allow-anonymous).",
        )


def salt_of(caller: QosCaller, said: str | None, config: EncoderConfig) -> str | None:
    """The salt of a request's entries: the tenant of its key, then the body's `cache_salt`.

    Raises EncoderRefused("forbidden_salt") for a `cache_salt` from a caller without a tenant's key.
    """
    if caller.tenant is not None:
        # No tenant's name has a slash: no salt can spell another tenant's.
        return caller.tenant if said is None else f"{caller.tenant}/{said}"
    if said is not None and not config.trust_salts:
        raise EncoderRefused(
            "cache_salt: comes with a tenant's key ([qos.classes.NAME] tenants); leave it out, or set "
            "encoder.trust_salts behind a gateway that names tenants",
            reason="forbidden_salt",
        )
    return said
