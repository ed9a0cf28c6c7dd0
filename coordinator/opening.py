"""Opening the registry that the settings name: a file in a folder of this coordinator's own, or etcd."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator
from uuid import uuid4

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.errors import InvalidSettings
from kvferry.coordinator.etcd.address import RegistryAddress
from kvferry.coordinator.etcd.registry import EtcdRegistry
from kvferry.coordinator.registry import Registry
from kvferry.coordinator.sqlite_registry import SqliteRegistry
from kvferry.coordinator.state_directory import StateDirectory
from kvferry.proto.address import parse_address
from kvferry.trust.doors import is_loopback, open_folder
from kvferry.trust.errors import PlaintextRefused
from kvferry.trust.tls_folder import TlsFolder


@contextlib.asynccontextmanager
async def open_registry(settings: CoordinatorSettings) -> AsyncIterator[Registry]:
    """The registry, closed at the end. Raises CannotStart.

    A new one begins with a generation that no earlier one can have reached, the time in seconds: nodes that served the
    coordinator before it follow at once. An old copy of a folder goes on from its own number and is refused.
    """
    new_id, now_s = uuid4().hex, int(time.time())
    async with contextlib.AsyncExitStack() as held:
        registry: SqliteRegistry | EtcdRegistry
        if settings.registry is not None:
            address = RegistryAddress.parse(settings.registry)
            tls = _tls_of(address, settings)
            registry = EtcdRegistry(address.endpoints, address.prefix, max(1, math.ceil(settings.lease)), tls)
        elif settings.state is not None:
            held.callback(StateDirectory(settings.state).acquire().release)
            registry = SqliteRegistry(settings.state / "registry.sqlite3")
        else:
            raise InvalidSettings("a coordinator needs a registry: name a folder with --state")
        await registry.open(new_id, first_generation=now_s, generation_at_least=settings.generation)
        held.push_async_callback(registry.close)
        yield registry


def _tls_of(address: RegistryAddress, settings: CoordinatorSettings) -> TlsFolder | None:
    """What is shown to etcd's members. Raises InvalidSettings, PlaintextRefused, TlsFolderInvalid."""
    if address.has_tls:
        if settings.tls_dir is None:
            raise InvalidSettings("a registry at etcds:// asks for a certificate: give --tls-dir")
        return open_folder(settings.tls_dir)
    hosts = [parse_address(endpoint)[0] for endpoint in address.endpoints]
    if not settings.insecure_plaintext and (far := [host for host in hosts if not is_loopback(host)]):
        raise PlaintextRefused(
            f"conversations would go to etcd at {far[0]} in clear: let it ask for certificates (etcds://…), or "
            "allow it with --insecure-plaintext"
        )
    return None
