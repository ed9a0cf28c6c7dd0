"""Channels to one coordinator or several, of which one is asked; to a stub they look like one channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import grpc

from kvferry.client.sdk.address import check_address
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import chat_pb2_grpc

SEPARATOR: Final = ","


class Coordinators:
    """Coordinators that share a registry: any of them serves any session. Belongs to the event loop that uses it."""

    def __init__(self, addresses: str) -> None:
        """HOST:PORT, or several with commas between them. Raises InvalidAddress."""
        self._addresses = [check_address(address) for address in addresses.split(SEPARATOR)]
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def address(self) -> str:
        """Of the one that is asked."""
        return self._addresses[0]

    def ask_another(self) -> None:
        """The one that was asked failed: the next call goes to the next one."""
        self._addresses.append(self._addresses.pop(0))

    def stub(self) -> chat_pb2_grpc.ChatServiceAsyncStub:
        """Each of its calls goes to the coordinator that is asked at that time."""
        return chat_pb2_grpc.ChatServiceStub(cast("grpc.aio.Channel", _Switch(self._channel)))

    async def aclose(self) -> None:
        """Closes all channels and every call on them."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _channel(self) -> grpc.aio.Channel:
        if self.address not in self._channels:
            self._channels[self.address] = grpc.aio.insecure_channel(self.address, options=channel_options())
        return self._channels[self.address]


class _Switch:
    """What a stub asks of a channel, with the channel found anew for each call."""

    def __init__(self, channel: Callable[[], grpc.aio.Channel]) -> None:
        self._channel = channel
        self.unary_unary = self._method("unary_unary")
        self.unary_stream = self._method("unary_stream")
        self.stream_unary = self._method("stream_unary")
        self.stream_stream = self._method("stream_stream")

    def _method(self, kind: str) -> Callable[..., Callable[..., Any]]:
        def make(*path: Any, **how: Any) -> Callable[..., Any]:
            def call(*request: Any, **terms: Any) -> Any:
                return getattr(self._channel(), kind)(*path, **how)(*request, **terms)

            return call

        return make
