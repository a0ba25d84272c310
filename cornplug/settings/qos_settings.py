"""Settings for classes of service: `[qos]`."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from cornplug.settings.settings_section import Section


class ClassConfig(Section):
    """One class of service. See `cornplug.qos` for an example."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the tower's time that the class is guaranteed."""
    priority: int = 0
    """Order in which classes get the tower's time beyond their shares, highest first."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Deadline of requests that do not set one. None: `encoder.deadline_s`."""
    max_deadline_s: float | None = Field(default=None, gt=0)
    """Upper limit for the deadline of a request. None: `encoder.max_deadline_s`."""
    api_keys: tuple[str, ...] = ()
    """API keys of this class, in plain text or as "sha256:" followed by 64 hex digits. Only the digest is
    kept."""
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")], tuple[str, ...]] = Field(
        default_factory=dict
    )
    """API keys of each tenant in this class, written like `api_keys`. The tenant's name is the salt of its
    entries, so they are shared only within the tenant."""
    apps: tuple[str, ...] = ()
    """Apps whose requests belong to this class if they have no key."""

    @field_validator("api_keys")
    @classmethod
    def _digested(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_digest_of_key(key) for key in keys)

    @field_validator("tenants")
    @classmethod
    def _digested_too(cls, tenants: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {tenant: tuple(_digest_of_key(key) for key in keys) for tenant, keys in tenants.items()}

    def bound_keys(self) -> tuple[tuple[str, str | None], ...]:
        """Return (digest, tenant) for every key of this class."""
        bound = ((key, tenant) for tenant, keys in self.tenants.items() for key in keys)
        return (*((key, None) for key in self.api_keys), *bound)


class QosConfig(Section):
    """Classes of service, by name, and the name of the default class."""

    default: str = "default"
    """Class of requests that match no other class."""
    classes: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ClassConfig] = Field(
        default_factory=dict
    )
    """The classes, by name."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        total = sum(one.share for one in self.classes.values())
        if total > 1 + 1e-9:
            raise ValueError(f"the shares of all classes add up to {total:g}: reduce them to at most 1")
        if self.default != "default" and self.default not in self.classes:
            raise ValueError(
                f"default: class {self.default!r} does not exist: add [qos.classes.{self.default}]"
            )
        if self.default in self.classes and self.classes[self.default].bound_keys():
            raise ValueError("api_keys: the default class is for requests without a key: remove its keys")
        apps = [app for c in self.classes.values() for app in set(c.apps)]
        keys = [key for c in self.classes.values() for key in {*c.api_keys}]
        keys += [key for c in self.classes.values() for each in c.tenants.values() for key in set(each)]
        for what, named in (("apps", apps), ("api_keys", keys)):
            if len(named) != len(set(named)):
                raise ValueError(f"{what}: a value is listed twice: list it once")
        return self


def _digest_of_key(key: str) -> str:
    if key.startswith("sha256:"):
        if re.fullmatch(r"sha256:[0-9a-f]{64}", key) is None:
            raise ValueError('"sha256:" must be followed by 64 lower-case hex digits, as from sha256sum')
        return key
    if not key:
        raise ValueError("an empty key would admit every client")
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
