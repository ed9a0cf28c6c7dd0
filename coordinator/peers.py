"""The other coordinators that share the registry: a turn that one of them answers is read through it.

So a client may ask any coordinator about any session. Who has a turn is the registry's word (``TurnElsewhere``), and
the one that has it never asks another: there are no circles.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import grpc
import grpc.aio

from kvferry.coordinator.errors import TurnElsewhere
from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc
from kvferry.trust.doors import Channels
from kvferry.trust.tls_folder import TlsFolder

CANCEL_SECONDS: Final = 5.0
"""The turn ends between two tokens, and its end has to become durable."""


class Peers:
    """One channel per address, kept open. All calls from the event loop."""

    def __init__(self, tls: TlsFolder | None = None) -> None:
        """``tls``: this coordinator's certificate; None: plaintext."""
        self._channels = Channels(tls)

    async def resume(
        self, elsewhere: TurnElsewhere, session_id: str, turn_id: str, from_index: int
    ) -> AsyncGenerator[chat_pb2.TurnEvent, None]:
        """The turn's events from who answers it.

        Raises ``elsewhere`` when that one cannot be reached (any more), and what it refuses as it said it.
        """
        request = chat_pb2.ResumeRequest(session_id=session_id, turn_id=turn_id, from_index=from_index)
        call = self._stub(elsewhere).Resume(request)
        try:
            async for response in call:
                yield response.event
        except grpc.aio.AioRpcError as e:
            raise self._meaning(e, elsewhere) from e
        finally:
            call.cancel()

    async def cancel(self, elsewhere: TurnElsewhere, session_id: str, turn_id: str) -> None:
        """As ``resume``."""
        request = chat_pb2.CancelTurnRequest(session_id=session_id, turn_id=turn_id)
        try:
            await self._stub(elsewhere).CancelTurn(request, timeout=CANCEL_SECONDS)
        except grpc.aio.AioRpcError as e:
            raise self._meaning(e, elsewhere) from e

    async def close(self) -> None:
        await self._channels.aclose()

    def _stub(self, elsewhere: TurnElsewhere) -> chat_pb2_grpc.ChatServiceAsyncStub:
        """Raises ``elsewhere`` itself when it does not say where."""
        if not elsewhere.address:
            raise elsewhere
        return chat_pb2_grpc.ChatServiceStub(self._channels.to(elsewhere.address))

    def _meaning(self, error: grpc.aio.AioRpcError, elsewhere: TurnElsewhere) -> Exception:
        return error if CODE_KEY in dict(error.trailing_metadata() or ()) else elsewhere
