"""Whom the service lets in at all, and whose entries a request may touch."""

from __future__ import annotations

from cornplug.config import EncoderConfig, QosConfig
from cornplug.encoder_service.client.endpoints import is_loopback
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.qos import QosCaller


def check_exposure(config: EncoderConfig, qos: QosConfig) -> None:
    """Return where nobody is let in whom the operator did not mean to. Raises ConfigError."""
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
            f"{config.host} is reached from beyond this host, and nobody needs a key",
            "Set encoder.require_key (--require-key) and keys of classes; or, on a network that only yours "
            "reach, encoder.allow_anonymous (--allow-anonymous).",
        )


def salt_of(caller: QosCaller, said: str | None, config: EncoderConfig) -> str | None:
    """Whose a request's entries are: the tenant of its key, and within that what its body says.

    Raises EncoderRefused("forbidden_salt") for a salt of who has no tenant's key.
    """
    if caller.tenant is not None:
        # No tenant's name has a slash: nobody can spell another's.
        return caller.tenant if said is None else f"{caller.tenant}/{said}"
    if said is not None and not config.trust_salts:
        raise EncoderRefused(
            "cache_salt: comes with a tenant's key ([qos.classes.NAME] tenants); leave it out, or set "
            "encoder.trust_salts where only a gateway of yours asks",
            reason="forbidden_salt",
        )
    return said
