"""Classes of service: the class of each caller, and the guarantees of each class. Without I/O or a clock.

    [qos]
    default = "standard"                 # for callers that match no other class

    [qos.classes.premium]
    share = 0.5                          # guaranteed fraction of the tower's time
    priority = 10                        # order for the remaining time, highest first
    deadline_s = 2                       # deadline of requests that do not set one
    api_keys = ["sha256:9f86d081884c..."]  # Authorization: Bearer KEY
    tenants = { acme = ["sha256:60303ae22b99..."] }  # entries are shared only within the tenant
    apps = ["checkout"]                  # apps whose engines belong to this class

    [qos.classes.standard]
    share = 0.3

    [qos.classes.nightly]                # selected by `x-cornplug-class: nightly`, without a key
    priority = -1
    deadline_s = 60

Without `[qos]` there is a single class with all of the tower's time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from cornplug.config import QosConfig

CLASS_HEADER: Final = "x-cornplug-class"
APP_HEADER: Final = "x-cornplug-app"
MIN_SHARE: Final = 0.02
"""Minimum share of every class, so that classes of higher priority cannot starve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class of service. Instances compare by name, which is unique in a configuration."""

    name: str
    share: float = field(default=1.0, compare=False)
    """Guaranteed fraction of the tower's time, above 0. All shares add up to at most 1."""
    priority: int = field(default=0, compare=False)
    deadline_s: float | None = field(default=None, compare=False)
    """Deadline of requests that do not set a deadline, or None for the service's default."""

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key of classes. Classes with a higher rank are served first."""
        return self.priority, self.share, self.name


DEFAULT_CLASS: Final = ServiceClass(name="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class QosCaller:
    """Class, app and tenant of a caller."""

    qos: ServiceClass
    app: str | None = None
    """Name of the app if it determined the class, else None."""
    tenant: str | None = None
    """Name of the tenant to which the caller's key belongs, or None."""

    @property
    def account(self) -> str:
        """Account to which the caller's store entries are charged: the tenant, or the class if the caller has
        no tenant."""
        return f"class {self.qos.name}" if self.tenant is None else f"tenant {self.tenant}"


class QosClasses:
    """All classes of service of one encoder service. Immutable."""

    def __init__(self, config: QosConfig | None = None) -> None:
        config = config or QosConfig()
        asked = {name: one.share for name, one in config.classes.items()}
        asked.setdefault(config.default, 0.0)
        share = _normalize_shares(asked)
        self._by_name: dict[str, ServiceClass] = {}
        self._by_app: dict[str, ServiceClass] = {}
        self._by_key: list[tuple[bytes, ServiceClass, str | None]] = []
        self._keyless = {config.default}
        for name in asked:
            made = ServiceClass(name=name, share=share[name])
            if name in config.classes:
                one = config.classes[name]
                made = ServiceClass(
                    name=name,
                    share=share[name],
                    priority=one.priority,
                    deadline_s=one.deadline_s,
                )
                self._by_app |= dict.fromkeys(one.apps, made)
                self._by_key += [(key.encode(), made, tenant) for key, tenant in one.keys_with_tenants()]
                if not one.keys_with_tenants():
                    self._keyless.add(name)
            self._by_name[name] = made
        self.default = self._by_name[config.default]

    @classmethod
    def single(cls) -> Self:
        """Create a single class for all callers, for a service without `[qos]`."""
        return cls()

    def ranked_classes(self) -> Sequence[ServiceClass]:
        """Return all classes, beginning with the highest rank."""
        return sorted(self._by_name.values(), key=lambda c: c.rank, reverse=True)

    def class_of_app(self, app: str) -> ServiceClass:
        """Return the class of an app.

        The name of the app is trusted, because an engine of the same host and user has sent it.
        """
        return self._by_app.get(app, self.default)

    def identify_caller(self, headers: Mapping[str, str]) -> QosCaller:
        """Return the caller that sent these HTTP headers (names in lower case).

        A class with keys requires one of its keys. If a caller requests a class with keys but has none of its
        keys, or requests a class that does not exist, the class header is ignored.
        """
        mine, tenant = self._match_key(headers.get("authorization", ""))
        app = headers.get(APP_HEADER)
        named = self._by_name.get(headers.get(CLASS_HEADER, ""))
        of_app = self._by_app.get(app) if app is not None else None
        for qos in (named, mine, of_app):
            if qos is not None and (qos is mine or qos.name in self._keyless):
                break
        else:
            qos = self.default
        return QosCaller(qos=qos, app=app if of_app is qos else None, tenant=tenant)

    @property
    def has_keys(self) -> bool:
        """Whether any class has a key."""
        return bool(self._by_key)

    def is_known_key(self, authorization: str) -> bool:
        """Return whether this Authorization header contains a key of any class."""
        return self._match_key(authorization)[0] is not None

    def _match_key(self, authorization: str) -> tuple[ServiceClass | None, str | None]:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None, None
        given = b"sha256:" + hashlib.sha256(key.strip().encode()).hexdigest().encode()
        found: tuple[ServiceClass | None, str | None] = (None, None)
        # Compare with every key, so that the duration does not reveal which key matched.
        for known, qos, tenant in self._by_key:
            if hmac.compare_digest(known, given):
                found = qos, tenant
        return found


def _normalize_shares(requested: Mapping[str, float]) -> dict[str, float]:
    """Raise shares to at least `MIN_SHARE`, and scale them down if their sum is above 1."""
    if len(requested) == 1:
        return dict.fromkeys(requested, 1.0)
    share = {name: max(one, MIN_SHARE) for name, one in requested.items()}
    total = max(1.0, sum(share.values()))
    return {name: one / total for name, one in share.items()}
