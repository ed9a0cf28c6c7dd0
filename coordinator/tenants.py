"""Whose rows a session's turns may reuse. Pure.

Every tenant has a namespace of its own: in the nodes' memory, in the store, in what routing knows. Tenants of one group
share theirs. Whoever shares can find out, from how long the first token takes, whether another one sent the same text
before; so nobody shares unless the operator says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Self

from kvferry.coordinator.registry import TokenArray
from kvferry.coordinator.requests import name

EVERYBODY: Final = "*"


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """Which tenants share prefixes. ``namespaces``: by tenant, of those in a group."""

    namespaces: Mapping[str, str] = dataclasses.field(default_factory=dict)
    everybody: bool = False

    @classmethod
    def of(cls, groups: Iterable[str]) -> Self:
        """``groups``: tenants separated by commas, or "*". The first one's namespace is the group's.

        Raises InvalidName for what cannot be a tenant's name, ValueError for a tenant in two groups.
        """
        found: dict[str, str] = {}
        everybody = False
        for group in groups:
            if group == EVERYBODY:
                everybody = True
                continue
            tenants = [name("tenant", tenant.strip()) for tenant in group.split(",")]
            for tenant in tenants:
                if found.setdefault(tenant, tenants[0]) != tenants[0]:
                    raise ValueError(f"tenant {tenant} is in two groups that share prefixes: put all of them into one")
        return cls(found, everybody)

    def namespace(self, tenant: str) -> str:
        """Whose rows the tenant's turns reuse, and they theirs; empty for those of nobody in particular."""
        return "" if self.everybody else self.namespaces.get(tenant, tenant)


ALONE: Final = Sharing()
"""Nobody shares with anybody."""


def marked(token_ids: TokenArray, namespace: str) -> TokenArray:
    """Ids, int32 [n], that have no prefix in common with those of another namespace: what predictions compare.

    The first one becomes a negative number made of it and the namespace. Two namespaces may have the same one by
    chance, one time in two thousand million: then a prediction is wrong, no more.
    """
    if not namespace or not len(token_ids):
        return token_ids
    digest = hashlib.sha256(f"{namespace} {token_ids[0]}".encode()).digest()
    out = token_ids.copy()
    out[0] = -1 - int.from_bytes(digest[:4], "little") // 2
    return out
