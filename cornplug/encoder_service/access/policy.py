"""Access policy: checks whether the configuration exposes the service, and determines the salt of a
request's entries."""

from __future__ import annotations

from cornplug.config import EncoderConfig, QosConfig
from cornplug.encoder_service.client.endpoints import is_loopback
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.qos import QosCaller


def check_exposure(config: EncoderConfig, qos: QosConfig) -> None:
    """Raise ConfigError if callers on other hosts would be admitted without a key by accident."""
    have_keys = any(one.bound_keys() for one in qos.classes.values())
    if config.require_key and not (have_keys or config.admin_key.get_secret_value()):
        raise ConfigError(
            "encoder.require_key",
            "set, but there are no keys",
            "Set api_keys or tenants of a class in [qos.classes.NAME].",
        )
    if not (is_loopback(config.host) or config.require_key or config.allow_anonymous):
        raise ConfigError(
            "encoder.host",
            f"{config.host} can be reached from other hosts, and no key is required",
            "Set encoder.require_key (--require-key) and keys of classes. On a private network you can "
            "set encoder.allow_anonymous (--allow-anonymous) instead.",
        )


def salt_of(caller: QosCaller, said: str | None, config: EncoderConfig) -> str | None:
    """Return the salt of a request's entries: the tenant of its key, then the body's `cache_salt`.

    Raises EncoderRefused("forbidden_salt") for a `cache_salt` from a caller without a tenant's key.
    """
    if caller.tenant is not None:
        # Names of tenants contain no slash, so a salt cannot imitate another tenant.
        return caller.tenant if said is None else f"{caller.tenant}/{said}"
    if said is not None and not config.trust_salts:
        raise EncoderRefused(
            "cache_salt: requires a tenant's key ([qos.classes.NAME] tenants); remove it, or set "
            "encoder.trust_salts behind a gateway that sets salts",
            reason="forbidden_salt",
        )
    return said
