"""What a stranger gets from a running server: who asks here shows no certificate and no token."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import Iterator
from typing import Final, cast

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.doctor.finding import Finding, fail, ok, warn
from kvferry.proto.address import parse_address
from kvferry.proto.channel import channel_options
from kvferry.trust.doctor_checks import expiry
from kvferry.trust.doors import is_loopback

SECONDS: Final = 3.0

_HTTP: Final = b"GET /v1/models HTTP/1.1\r\nHost: kvferry\r\nConnection: close\r\n\r\n"


def findings_at(address: str) -> Iterator[Finding]:
    """Of the server at HOST:PORT."""
    host, port = parse_address(address)
    where = (host.strip("[]"), port)
    try:
        socket.create_connection(where, SECONDS).close()
    except OSError as error:
        yield fail(
            f"{address}: reached", str(error.strerror or error).lower(), means="nothing could be looked at",
            advice="see whether it runs, and whether this machine may reach it",
        )  # fmt: skip
        return
    if (certificate := _certificate_at(where)) is not None:
        yield ok(f"{address}: listens", "with certificates")
        yield _renamed(f"{address}: certificate", expiry("", certificate, dt.datetime.now(dt.UTC)))
        if _answers_over_tls(where):
            yield warn(
                f"{address}: HTTPS", "answers without an API key", means="anybody may ask, as much as he likes",
                advice="give the coordinator --tokens (kvferry tokens)",
            )  # fmt: skip
        return
    yield from _plaintext(address, where, is_local=is_loopback(host))


def _plaintext(address: str, where: tuple[str, int], *, is_local: bool) -> Iterator[Finding]:
    status = _http_status(socket.create_connection(where, SECONDS))
    speaks = "HTTP" if status is not None else "gRPC" if _speaks_grpc(address) else ""
    if not speaks:
        yield warn(f"{address}: listens", "speaks neither TLS, gRPC nor HTTP", means="it is not ours", advice="look")
        return
    if is_local:
        yield ok(f"{address}: listens", f"{speaks} in plaintext, on this machine only")
    else:
        yield fail(
            f"{address}: listens", f"{speaks} in plaintext",
            means="whoever is on the network can read and change everything",
            advice="give it --tls-dir (a gateway: --https), and take --insecure-plaintext out",
        )  # fmt: skip
    if status == 200 and not is_local:
        yield warn(
            f"{address}: HTTP", "answers without an API key", means="anybody may ask, as much as he likes",
            advice="give the coordinator --tokens (kvferry tokens)",
        )  # fmt: skip
    if speaks == "gRPC" and not is_local and _reflects(address):
        yield warn(
            f"{address}: reflection", "is on", means="the server tells what can be called",
            advice="take --reflection out",
        )  # fmt: skip


def _renamed(check: str, finding: Finding) -> Finding:
    return Finding(check, finding.verdict, finding.found, finding.means, finding.advice)


def _stranger() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # looked at, not trusted
    return context


def _certificate_at(where: tuple[str, int]) -> x509.Certificate | None:
    with contextlib.suppress(OSError, ValueError):  # of which ssl.SSLError is one
        connection = socket.create_connection(where, SECONDS)
        with connection, _stranger().wrap_socket(connection, server_hostname=where[0]) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    return None


def _answers_over_tls(where: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):
        connection = socket.create_connection(where, SECONDS)
        return _http_status(_stranger().wrap_socket(connection, server_hostname=where[0])) == 200
    return False


def _http_status(connection: socket.socket) -> int | None:
    """Of the models' list, asked without a key; None when it is not HTTP that comes back."""
    with connection, contextlib.suppress(OSError, ValueError, IndexError):
        connection.settimeout(SECONDS)
        connection.sendall(_HTTP)
        first = connection.recv(64)
        return int(first.split(b" ")[1]) if first.startswith(b"HTTP/1.") else None
    return None


def _speaks_grpc(address: str) -> bool:
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            return cast("grpc.Call", error).code() is not grpc.StatusCode.UNAVAILABLE  # it is both
    return True


def _reflects(address: str) -> bool:
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with contextlib.suppress(grpc.RpcError):
            return any(True for _ in stub.ServerReflectionInfo(asked, timeout=SECONDS))
    return False
