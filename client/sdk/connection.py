"""The one way to the coordinators: a stub, and short calls that are asked again."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from kvferry.client.errors import ClientError, map_rpc_error
from kvferry.client.sdk.access import PLAIN, Access
from kvferry.client.sdk.coordinators import Coordinators
from kvferry.client.sdk.retry import OnOutage, Outage, Patience
from kvferry.client.sdk.wire import check_size
from kvferry.proto.v1 import chat_pb2_grpc

DEADLINE_S: Final = 10.0
"""Of one try of a short call: a coordinator that needs longer is stuck."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response")


class Connection:
    """Opened on first use, in the event loop that uses it; belongs to that loop."""

    def __init__(
        self, addresses: str, patience: Patience, on_outage: OnOutage | None = None, access: Access = PLAIN
    ) -> None:
        """HOST:PORT, or several with commas between them, of which the next is asked when one fails.

        Raises InvalidAddress, InvalidCredentials.
        """
        self.patience = patience
        self._coordinators = Coordinators(addresses, access)
        self._on_outage = on_outage
        self._stub: chat_pb2_grpc.ChatServiceAsyncStub | None = None

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator that is asked."""
        return self._coordinators.address

    @property
    def stub(self) -> chat_pb2_grpc.ChatServiceAsyncStub:
        """ChatService at the other end."""
        if self._stub is None:
            self._stub = self._coordinators.stub()
        return self._stub

    def failed(self, address: str) -> None:
        """The coordinator that was asked there failed: another one is asked from now on."""
        self._coordinators.ask_another(address)

    async def aclose(self) -> None:
        """Closes the channels and every call on them."""
        await self._coordinators.aclose()
        self._stub = None

    async def ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        within_s: float | None = None,
    ) -> Response:
        """Asks until it is answered or patience ends; for calls that may be repeated. Raises ClientError.

        `within_s`: what all tries may take together; a coordinator that says nothing gets its share of that.
        """
        response = await self.ask_once_done(method, request, done_already=None, within_s=within_s)
        assert response is not None  # noqa: S101 - for mypy: None comes with done_already only
        return response

    async def ask_once_done(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        done_already: type[ClientError] | None,
        within_s: float | None = None,
    ) -> Response | None:
        """As `ask`, for calls that change something.

        None: `done_already` came on a later try, so an earlier one had worked and only its reply was lost.
        """
        check_size(request)
        outage = Outage(self.patience if within_s is None else Patience(within_s))
        deadline_s = DEADLINE_S if within_s is None else within_s / len(self._coordinators)
        while True:
            asked = self.address
            try:
                return await method(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as rpc_error:
                error = map_rpc_error(rpc_error, asked)
            if outage.n_failures > 0 and done_already is not None and isinstance(error, done_already):
                return None
            delay_s = outage.delay_after(error)
            self.failed(asked)
            if outage.n_failures == 1 and self._on_outage is not None:
                self._on_outage(error, self.patience.total_s)
            await asyncio.sleep(delay_s)
