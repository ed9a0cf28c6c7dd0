"""A gRPC server in a process of its own that echoes bytes: after the wait that the request asks for.

Usage: python echo_server.py PORT     prints the port it listens on
"""

import sys
import time
from collections.abc import Iterator
from concurrent import futures

import grpc

from kvferry.proto.channel import server_options

METHOD = "/test.Echo/Stream"


def stream(request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
    """Answers at once, waits the number of seconds in the request, and answers again."""
    yield request
    time.sleep(float(request[:8]))
    yield request


def serve(port: int) -> tuple[grpc.Server, int]:
    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options())
    handler = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Stream": handler})])
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, bound


if __name__ == "__main__":
    running, listening_on = serve(int(sys.argv[1]))
    sys.stdout.write(f"{listening_on}\n")
    sys.stdout.flush()
    running.wait_for_termination()
