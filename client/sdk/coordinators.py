"""Channels to one coordinator or several, of which one is asked; to a stub they look like one channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import grpc

from kvferry.client.sdk.access import PLAIN, Access
from kvferry.client.sdk.address import check_address
from kvferry.proto.v1 import chat_pb2_grpc
from kvferry.trust.bearer import Metadata, metadata_of
from kvferry.trust.doors import Channels

SEPARATOR: Final = ","


class Coordinators:
    """Coordinators that share a registry: any of them serves any session. Belongs to the event loop that uses it."""

    def __init__(self, addresses: str, access: Access = PLAIN) -> None:
        """HOST:PORT, or several with commas between them. Raises InvalidAddress, InvalidCredentials."""
        self._addresses = [check_address(address) for address in addresses.split(SEPARATOR)]
        self._token = access.token_for(addresses)
        self._channels = Channels(access.folder())

    @property
    def address(self) -> str:
        """Of the one that is asked."""
        return self._addresses[0]

    def __len__(self) -> int:
        return len(self._addresses)

    def ask_another(self, failed: str) -> None:
        """The next call goes to another one. No effect when that is so already: many calls may have failed at once."""
        if self.address == failed:
            self._addresses.append(self._addresses.pop(0))

    def stub(self) -> chat_pb2_grpc.ChatServiceAsyncStub:
        """Each of its calls goes to the coordinator that is asked at that time."""
        return chat_pb2_grpc.ChatServiceStub(cast("grpc.aio.Channel", _Switch(self._channel, self._metadata)))

    async def aclose(self) -> None:
        """Closes all channels and every call on them."""
        await self._channels.aclose()

    def _channel(self) -> grpc.aio.Channel:
        return self._channels.to(self.address)

    def _metadata(self) -> Metadata:
        return metadata_of(self._token())


class _Switch:
    """What a stub asks of a channel, with the channel and what goes with a call found anew for each call."""

    def __init__(self, channel: Callable[[], grpc.aio.Channel], metadata: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata
        self.unary_unary = self._method("unary_unary")
        self.unary_stream = self._method("unary_stream")
        self.stream_unary = self._method("stream_unary")
        self.stream_stream = self._method("stream_stream")

    def _method(self, kind: str) -> Callable[..., Callable[..., Any]]:
        def make(*path: Any, **how: Any) -> Callable[..., Any]:
            def call(*request: Any, metadata: Metadata = None, **terms: Any) -> Any:
                with_token = (*(metadata or ()), *(self._metadata() or ()))
                return getattr(self._channel(), kind)(*path, **how)(*request, metadata=with_token, **terms)

            return call

        return make
