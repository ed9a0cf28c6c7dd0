"""How a process listens, and how it opens channels: with certificates, or in plaintext where that is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from kvferry.proto.address import parse_address
from kvferry.proto.channel import Options, channel_options
from kvferry.trust.certificates import Role
from kvferry.trust.clock import now_utc, validity
from kvferry.trust.errors import PlaintextRefused, TlsFolderInvalid
from kvferry.trust.tls_folder import Material, TlsFolder

log = logging.getLogger(__name__)

RETIRE_SECONDS: Final = 600.0
"""For calls that run on a channel whose certificates were replaced: the longest answers of a slow board."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host; one that nobody knows is not."""
    found = _addresses_of(host)
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def _addresses_of(host: str) -> set[str]:
    """None when it is not known."""
    with contextlib.suppress(ValueError):
        return {str(ipaddress.ip_address(host.strip("[]")))}
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def check_plaintext(listen: str, *, has_tls: bool, is_allowed: bool, remedy: str = "give --tls-dir") -> None:
    """Raises PlaintextRefused for an address that others reach, unless there are certificates or it is allowed."""
    host, _ = parse_address(listen, to_listen=True)
    if has_tls or is_allowed or is_loopback(host) or not _addresses_of(host):  # nobody can listen at the last one
        return
    raise PlaintextRefused(
        f"others reach {host}, and without certificates they would be let in and could read everything: {remedy}, "
        "listen at 127.0.0.1, or allow it with --insecure-plaintext"
    )


def open_folder(
    path: Path | None, role: Role | None = None, name: str | None = None, address: str | None = None
) -> TlsFolder | None:
    """None for None. Whoever serves says who it is, so that a mix-up is told at the start and not by everybody else.

    ``address``: HOST:PORT at which others reach it. Raises TlsFolderInvalid.
    """
    if path is None:
        return None
    folder = TlsFolder(path)
    identity = folder.material().identity
    if role is not None and identity.role is not role:
        raise TlsFolderInvalid(f"the certificate in {path} is that of a {identity.role}, a {role} needs its own")
    if name is not None and identity.name != name:
        raise TlsFolderInvalid(f"the certificate in {path} is that of {identity.name}, not of {name}")
    host = None if address is None else parse_address(address, to_listen=True)[0].strip("[]")
    if host is not None and host not in identity.addresses:
        raise TlsFolderInvalid(
            f"the certificate in {path} is for {', '.join(identity.addresses) or 'no address'}, and others would not "
            f"believe it at {host}: issue one with --address {host}"
        )
    state = validity(identity.not_before, identity.not_after, now_utc())
    if state == "expired":
        log.error("the certificate in %s has expired on %s", path, f"{identity.not_after:%Y-%m-%d}")
    elif state == "not yet valid":
        begins = f"{identity.not_before:%Y-%m-%d}"
        log.error("the certificate in %s is not valid before %s: look at this machine's clock", path, begins)
    return folder


def has_reflection(wanted: bool | None, listen: str, folder: TlsFolder | None) -> bool:
    """What a server can do is told on a developer's machine, and nowhere else unless it is wanted."""
    return wanted if wanted is not None else folder is None and is_loopback(parse_address(listen, to_listen=True)[0])


def server_credentials(folder: TlsFolder) -> grpc.ServerCredentials:
    """Both sides show certificates; each new connection gets those that are in force at its time."""

    def configuration() -> Any:
        material = folder.material()
        return grpc.ssl_server_certificate_configuration(
            [(material.key_pem, material.certificate_pem)], root_certificates=material.ca_pem
        )

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """gRPC itself checks that the address that is called is one of those in the server's certificate."""
    return grpc.ssl_channel_credentials(material.ca_pem, material.key_pem, material.certificate_pem)


def bind(server: grpc.aio.Server, address: str, folder: TlsFolder | None) -> int:
    """The port. Raises RuntimeError, as gRPC does."""
    if folder is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(folder))


def open_sync_channel(address: str, folder: TlsFolder | None) -> grpc.Channel:
    """For a command that asks once."""
    if folder is None:
        return grpc.insecure_channel(address, options=channel_options())
    return grpc.secure_channel(address, channel_credentials(folder.material()), options=channel_options())


class Channels:
    """One channel per address, kept open, and opened anew when the certificates change: calls that run end on the old
    one. All methods from the event loop."""

    def __init__(self, folder: TlsFolder | None = None, options: Options | None = None) -> None:
        self._folder = folder
        self._options = channel_options() if options is None else options
        self._version = 0 if folder is None else folder.version
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def is_stale(self) -> bool:
        """The certificates have changed since the channels were opened."""
        return self._folder is not None and self._folder.version != self._version

    def to(self, address: str) -> grpc.aio.Channel:
        """HOST:PORT. To be asked again after each wait: one that was opened before the certificates changed takes no
        new calls, and is not to be waited for."""
        if self.is_stale:
            self._retire()
        if address not in self._channels:
            self._channels[address] = self._open(address)
        return self._channels[address]

    async def reach(self, address: str, within_s: float) -> grpc.aio.Channel | None:
        """One that is connected; None where that is refused. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                channel = self.to(address)
                state = channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.READY:
                    return channel
                if state in {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN}:
                    return None
                await channel.wait_for_state_change(state)

    async def aclose(self) -> None:
        """All of them, and every call on them."""
        for task in self._retiring:
            task.cancel()
        for channel in self._channels.values():
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.close()
        self._channels.clear()

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._folder is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        credentials = channel_credentials(self._folder.material())
        return grpc.aio.secure_channel(address, credentials, options=self._options)

    def _retire(self) -> None:
        assert self._folder is not None  # noqa: S101 - is_stale has looked
        self._version = self._folder.version
        for channel in self._channels.values():
            task = asyncio.create_task(_close_in_time(channel))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._channels.clear()


async def _close_in_time(channel: grpc.aio.Channel) -> None:
    try:
        await channel.close(RETIRE_SECONDS)
    except asyncio.CancelledError:
        await channel.close()
        raise
