"""Classes of service: the class of each caller, and its guarantees. Pure policy, no I/O and no clock.

    [qos]
    default = "standard"                 # for callers that match no other class

    [qos.classes.premium]
    share = 0.5                          # of the tower's time, whenever it wants it
    priority = 10                        # for unreserved time, the highest first
    deadline_s = 2                       # of requests that name no deadline
    api_keys = ["sha256:9f86d081884c..."]  # Authorization: Bearer KEY
    tenants = { acme = ["sha256:60303ae22b99..."] }  # holders' entries are shared inside the tenant
    apps = ["checkout"]                  # engines, by their app

    [qos.classes.standard]
    share = 0.3

    [qos.classes.nightly]                # no key: `x-cornplug-class: nightly` is enough
    priority = -1
    deadline_s = 60

Without `[qos]` there is one class, which has everything.
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
LEAST_SHARE: Final = 0.02
"""The least share of every class, so that no priority starves it: its work comes late, but it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Equal by name: a configuration has each name once."""

    name: str
    share: float = field(default=1.0, compare=False)
    """Guaranteed part of the tower's time, over 0; those of all classes add up to at most 1."""
    priority: int = field(default=0, compare=False)
    deadline_s: float | None = field(default=None, compare=False)
    """Of requests that name none; None: the service's own."""
    max_deadline_s: float | None = field(default=None, compare=False)
    """Longest deadline of its requests, even if they ask for more; None: the service's own."""

    @property
    def rank(self) -> tuple[int, float, str]:
        """Orders classes, the best last."""
        return self.priority, self.share, self.name


ONE_CLASS: Final = ServiceClass(name="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class QosCaller:
    """The caller: the class it is served in, the app it says it is, where that app is known, and the
    tenant whose key it has."""

    qos: ServiceClass
    app: str | None = None
    tenant: str | None = None

    @property
    def account(self) -> str:
        """The account that fills the store: the tenant's, or that of all without one in the class."""
        return f"class {self.qos.name}" if self.tenant is None else f"tenant {self.tenant}"


class QosClasses:
    """The classes of one service. Immutable."""

    def __init__(self, config: QosConfig | None = None) -> None:
        config = config or QosConfig()
        asked = {name: one.share for name, one in config.classes.items()}
        asked.setdefault(config.default, 0.0)
        share = _guaranteed(asked)
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
                    max_deadline_s=one.max_deadline_s,
                )
                self._by_app |= dict.fromkeys(one.apps, made)
                self._by_key += [(key.encode(), made, tenant) for key, tenant in one.bound_keys()]
                if not one.bound_keys():
                    self._keyless.add(name)
            self._by_name[name] = made
        self.default = self._by_name[config.default]

    @classmethod
    def single(cls) -> Self:
        """One class for all: a service without `[qos]`."""
        return cls()

    def all(self) -> Sequence[ServiceClass]:
        """Every class, the best first."""
        return sorted(self._by_name.values(), key=lambda c: c.rank, reverse=True)

    def of_app(self, app: str) -> ServiceClass:
        """The class of an engine of this host and user, which is trusted to say who it works for."""
        return self._by_app.get(app, self.default)

    def of_headers(self, headers: Mapping[str, str]) -> QosCaller:
        """The caller that sent these headers (names in lower case).

        A class that has keys is given to their holders only. A caller that asks for it without one, or names
        a class that does not exist, is served as if it had asked for none.
        """
        mine, tenant = self._of_key(headers.get("authorization", ""))
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
    def have_keys(self) -> bool:
        """Whether any class has a key."""
        return bool(self._by_key)

    def knows(self, authorization: str) -> bool:
        """Whether this header holds a key of any class."""
        return self._of_key(authorization)[0] is not None

    def _of_key(self, authorization: str) -> tuple[ServiceClass | None, str | None]:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None, None
        given = b"sha256:" + hashlib.sha256(key.strip().encode()).hexdigest().encode()
        found: tuple[ServiceClass | None, str | None] = (None, None)
        # Every key is compared, in full: the time taken tells nothing of which one matched.
        for known, qos, tenant in self._by_key:
            if hmac.compare_digest(known, given):
                found = qos, tenant
        return found


def _guaranteed(asked: Mapping[str, float]) -> dict[str, float]:
    """Shares with `LEAST_SHARE` for classes that asked less, all scaled where that adds up to over 1."""
    if len(asked) == 1:
        return dict.fromkeys(asked, 1.0)
    share = {name: max(one, LEAST_SHARE) for name, one in asked.items()}
    total = max(1.0, sum(share.values()))
    return {name: one / total for name, one in share.items()}
