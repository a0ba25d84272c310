"""Settings of classes of service: `[qos]`."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from cornplug.settings.settings_section import Section


class ClassConfig(Section):
    """One class of service; `cornplug.qos` has an example."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the tower's time that the class is guaranteed."""
    priority: int = 0
    """Order in which classes get the time that no class reserved: the highest goes first."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Deadline of its requests that name none. None: `encoder.deadline_s`."""
    max_deadline_s: float | None = Field(default=None, gt=0)
    """Longest deadline that its requests get. None: `encoder.max_deadline_s`."""
    api_keys: tuple[str, ...] = ()
    """Keys whose holders are of this class: as they are, or as "sha256:" and 64 hex digits; kept as the
    latter."""
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")], tuple[str, ...]] = Field(
        default_factory=dict
    )
    """Tenant -> keys, each as in `api_keys`. A holder is of this class, and its entries have the tenant's
    name as salt: no other request shares them."""
    apps: tuple[str, ...] = ()
    """Apps whose requests are of this class where they carry no key."""

    @field_validator("api_keys")
    @classmethod
    def _digested(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_digest_of_key(key) for key in keys)

    @field_validator("tenants")
    @classmethod
    def _digested_too(cls, tenants: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {tenant: tuple(_digest_of_key(key) for key in keys) for tenant, keys in tenants.items()}

    def bound_keys(self) -> tuple[tuple[str, str | None], ...]:
        """(digest, tenant) of every key of this class."""
        bound = ((key, tenant) for tenant, keys in self.tenants.items() for key in keys)
        return (*((key, None) for key in self.api_keys), *bound)


class QosConfig(Section):
    """Classes of service, by name, and the name of the default class."""

    default: str = "default"
    """The class of every request that matches no other class."""
    classes: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ClassConfig] = Field(
        default_factory=dict
    )
    """The classes, by name."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        total = sum(one.share for one in self.classes.values())
        if total > 1 + 1e-9:
            raise ValueError(f"the shares of all classes add up to {total:g}: make that 1 or less")
        if self.default != "default" and self.default not in self.classes:
            raise ValueError(f"default: no class {self.default!r}: add [qos.classes.{self.default}]")
        if self.default in self.classes and self.classes[self.default].bound_keys():
            raise ValueError("api_keys: the default class is for those who have none: take them out")
        apps = [app for c in self.classes.values() for app in set(c.apps)]
        keys = [key for c in self.classes.values() for key in {*c.api_keys}]
        keys += [key for c in self.classes.values() for each in c.tenants.values() for key in set(each)]
        for what, named in (("apps", apps), ("api_keys", keys)):
            if len(named) != len(set(named)):
                raise ValueError(f"{what}: one of them is in two places: leave it in one")
        return self


def _digest_of_key(key: str) -> str:
    if key.startswith("sha256:"):
        if re.fullmatch(r"sha256:[0-9a-f]{64}", key) is None:
            raise ValueError("after sha256: come 64 lower-case hex digits; make them with sha256sum")
        return key
    if not key:
        raise ValueError("an empty key would let everybody in")
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
