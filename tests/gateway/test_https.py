"""The gateway shows the certificate that lies in its files, whenever they are replaced."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.gateway.errors import ConfigInvalid
from kvferry.gateway.https import CertificateFiles
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role
from kvferry.trust.handing_out import issue
from kvferry.trust.tls_folder import read_material


class Https:
    """A server of files that are followed, and renewed."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority.create(folder / "ca", "test")
        self.folder = folder / "gateway"
        self.serial = self.renew()
        self.files = CertificateFiles.in_folder(self.folder)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.files.certificate, self.files.key)
        self._trusting = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))

    def renew(self, folder: Path | None = None) -> int:
        """The serial of what is in the folder now."""
        issue(self._authority, folder or self.folder, "gateway", Role.GATEWAY, ["127.0.0.1"], 60)
        return read_material(folder or self.folder).identity.serial

    async def serve(self) -> None:
        self._server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=self.context)
        self._following = asyncio.create_task(self.files.follow(self.context))

    async def shown(self) -> int:
        port = self._server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self._trusting)
        found = writer.get_extra_info("peercert")
        writer.close()
        return int(found["serialNumber"], 16)

    async def until_shown(self, serial: int) -> None:
        until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=10)
        while await self.shown() != serial:
            assert dt.datetime.now(dt.UTC) < until

    def close(self) -> None:
        self._following.cancel()
        self._server.close()


@pytest.fixture
def https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Https]:
    monkeypatch.setattr("kvferry.gateway.https.LOOK_SECONDS", 0.01)
    made = Https(tmp_path)
    yield made
    made.close()


async def test_https_takes_up_a_renewed_certificate_and_keeps_a_good_one(https: Https) -> None:
    await https.serve()
    assert await https.shown() == https.serial
    renewed = https.renew()
    await https.until_shown(renewed)
    (https.folder / "cert.pem").write_text("damaged")
    await asyncio.sleep(0.1)
    assert await https.shown() == renewed
    with pytest.raises(ConfigInvalid, match="HTTPS cannot be served"):
        https.files.check()


async def test_https_takes_up_a_certificate_that_was_renewed_after_the_server_loaded_its_own(https: Https) -> None:
    """And before anybody looked whether it is another one."""
    renewed = https.renew()
    await https.serve()
    await https.until_shown(renewed)


async def test_https_shows_a_pair_that_fits_while_the_next_one_comes(
    https: Https, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it between the look at a pair and its use."""
    await https.serve()
    await https.until_shown(https.serial)
    after_next = https.renew(tmp_path / "after_next")
    load, half_come = ssl.SSLContext.load_cert_chain, asyncio.Event()

    def load_and_be_overtaken(context: ssl.SSLContext, *files: str | Path) -> None:
        load(context, *files)
        if not half_come.is_set():
            half_come.set()
            (tmp_path / "after_next" / "key.pem").replace(https.folder / "key.pem")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_be_overtaken)
    renewed = https.renew()
    await half_come.wait()
    assert await https.shown() == renewed
    (tmp_path / "after_next" / "cert.pem").replace(https.folder / "cert.pem")
    await https.until_shown(after_next)
