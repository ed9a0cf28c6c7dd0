"""What an interceptor puts around a method's handler, of whichever of gRPC's four kinds it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


def put_around(
    handler: Any, wrap: Callable[[Any], Any], request_deserializer: Callable[[bytes], Any] | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler with ``wrap`` of its behaviour, and another deserializer if one is given."""
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(  # type: ignore[no-any-return]
        wrap(getattr(handler, kind)),
        request_deserializer=request_deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
