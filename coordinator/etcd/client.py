"""etcd's key-value and lease calls over any number of members, with a bound on how long each may take.

Reads are linearizable, and asked again of the next member when one does not answer. A transaction is given to one
member and never repeated here: once it was sent, an error leaves open whether it was applied, and only its author can
find that out by reading. What could not even be sent goes to the next member.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import grpc
import grpc.aio

from kvferry.coordinator.errors import RegistryUnavailable
from kvferry.proto.channel import etcd_channel_options
from kvferry.proto.etcd import rpc_pb2, rpc_pb2_grpc
from kvferry.trust.doors import Channels
from kvferry.trust.tls_folder import TlsFolder

T = TypeVar("T")

CONNECT_SECONDS: Final = 0.5
"""A member on the same LAN connects in milliseconds."""

CALL_SECONDS: Final = 1.5
"""An election takes about a second, a transaction on a slow disk some tens of milliseconds."""

READ_SECONDS: Final = 3.0
"""A read asks one member after the other for so long: an election, and then an answer."""

PAUSE_SECONDS: Final = 0.05

LARGEST_PAGE: Final = 32
"""Values of one read: at most 512 KiB each (``records.py``), so a page is 16 MiB at the very most."""


class EtcdClient:
    """All methods from one event loop; all raise RegistryUnavailable."""

    def __init__(self, endpoints: Sequence[str], tls: TlsFolder | None = None) -> None:
        """``endpoints``: HOST:PORT of the members, in any order. ``tls``: shown to them; None: plaintext."""
        self._endpoints = list(endpoints)
        self._channels = Channels(tls, etcd_channel_options())
        self._is_closed = False

    async def range(
        self,
        key: bytes,
        range_end: bytes = b"",
        *,
        limit: int = 0,
        revision: int = 0,
        descending: bool = False,
        keys_only: bool = False,
        count_only: bool = False,
    ) -> rpc_pb2.RangeResponse:
        """One page of keys in order."""
        request = rpc_pb2.RangeRequest(
            key=key, range_end=range_end, limit=limit, revision=revision, keys_only=keys_only, count_only=count_only,
            sort_order=rpc_pb2.RangeRequest.DESCEND if descending else rpc_pb2.RangeRequest.NONE,
        )  # fmt: skip
        return await self._read(lambda channel: rpc_pb2_grpc.KVStub(channel).Range(request, timeout=CALL_SECONDS))

    async def all_in(self, prefix: bytes, revision: int = 0) -> list[rpc_pb2.KeyValue]:
        """Every key that begins with ``prefix``, in order, as of one revision (0: the newest)."""
        found: list[rpc_pb2.KeyValue] = []
        start, end = prefix, end_of(prefix)
        while True:
            page = await self.range(start, end, limit=LARGEST_PAGE, revision=revision)
            found += page.kvs
            if not page.more:
                return found
            revision = revision or page.header.revision
            start = page.kvs[-1].key + b"\0"

    async def snapshot(self, *ranges: tuple[bytes, bytes]) -> tuple[list[list[rpc_pb2.KeyValue]], int]:
        """Several keys or ranges as of one moment, and its revision. Small ones only: there are no pages."""
        reads = [rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=k, range_end=end)) for k, end in ranges]
        request = rpc_pb2.TxnRequest(success=reads)
        response = await self._read(lambda channel: rpc_pb2_grpc.KVStub(channel).Txn(request, timeout=CALL_SECONDS))
        return [list(r.response_range.kvs) for r in response.responses], response.header.revision

    async def commit(self, compares: Iterable[rpc_pb2.Compare], changes: Iterable[rpc_pb2.RequestOp]) -> int:
        """All changes or none: their revision, or 0 when a comparison failed. After RegistryUnavailable it is one of
        the two."""
        request = rpc_pb2.TxnRequest(compare=compares, success=changes)
        response = await self._once(lambda channel: rpc_pb2_grpc.KVStub(channel).Txn(request, timeout=CALL_SECONDS))
        return response.header.revision if response.succeeded else 0

    async def grant(self, seconds: int) -> int:
        """A lease of at least so long; returns its id."""
        request = rpc_pb2.LeaseGrantRequest(TTL=seconds)
        stub = rpc_pb2_grpc.LeaseStub
        return (await self._read(lambda channel: stub(channel).LeaseGrant(request, timeout=CALL_SECONDS))).ID

    async def keep_alive(self, lease_id: int) -> bool:
        """Renew a lease; False when it has ended."""
        return await self._read(lambda channel: _keep_alive(channel, lease_id)) > 0

    async def revoke(self, lease_id: int) -> None:
        """End a lease, and with it all its keys."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease_id)
        stub = rpc_pb2_grpc.LeaseStub
        await self._once(lambda channel: stub(channel).LeaseRevoke(request, timeout=CALL_SECONDS))

    async def close(self) -> None:
        self._is_closed = True
        await self._channels.aclose()

    async def _read(self, call: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        """Of whichever member answers; for calls that may be repeated."""
        give_up_s = time.monotonic() + READ_SECONDS
        while True:
            try:
                return await self._once(call)
            except RegistryUnavailable:
                if self._is_closed or time.monotonic() >= give_up_s:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)

    async def _once(self, call: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        endpoint, channel = await self._connected()
        try:
            return await call(channel)
        except grpc.aio.AioRpcError as e:
            self._ask_another(endpoint)
            raise RegistryUnavailable(
                f"etcd does not answer as it should: {endpoint} says {e.code().name} ({e.details()}); "
                "see whether most of its members run and reach each other"
            ) from e

    async def _connected(self) -> tuple[str, grpc.aio.Channel]:
        """The first member that lets itself be reached, and a channel to it."""
        for endpoint in tuple(self._endpoints):
            if self._is_closed:
                raise RegistryUnavailable("the registry is closed")
            if (channel := await self._channel_to(endpoint)) is not None:
                return endpoint, channel
            self._ask_another(endpoint)
        raise RegistryUnavailable(
            f"no member of etcd can be reached ({', '.join(sorted(self._endpoints))}); see whether they run"
        )

    async def _channel_to(self, endpoint: str) -> grpc.aio.Channel | None:
        """None when it does not let itself be reached."""
        with contextlib.suppress(TimeoutError):
            return await self._channels.reach(endpoint, CONNECT_SECONDS)
        return None

    def _ask_another(self, failed: str) -> None:
        """First from now on, unless that is so already: of calls that meet one failure together the first decides."""
        if self._endpoints[0] == failed:
            self._endpoints.append(self._endpoints.pop(0))


async def _keep_alive(channel: grpc.aio.Channel, lease_id: int) -> int:
    """The seconds that the lease has from now on; 0 when it has ended."""
    request = rpc_pb2.LeaseKeepAliveRequest(ID=lease_id)
    call = rpc_pb2_grpc.LeaseStub(channel).LeaseKeepAlive(iter([request]), timeout=CALL_SECONDS)
    async for response in call:
        return response.TTL
    return 0


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with ``prefix``, whose last byte is not 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


# Parts of a transaction.


def unchanged_since(key: bytes, revision: int) -> rpc_pb2.Compare:
    """The key was last written at this revision."""
    return rpc_pb2.Compare(target=rpc_pb2.Compare.MOD, key=key, mod_revision=revision)


def absent(key: bytes) -> rpc_pb2.Compare:
    return rpc_pb2.Compare(target=rpc_pb2.Compare.VERSION, key=key, version=0)


def put(key: bytes, value: bytes, lease: int = 0) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))


def delete_all_in(prefix: bytes) -> rpc_pb2.RequestOp:
    request = rpc_pb2.DeleteRangeRequest(key=prefix, range_end=end_of(prefix))
    return rpc_pb2.RequestOp(request_delete_range=request)
