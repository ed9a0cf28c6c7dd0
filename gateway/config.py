"""The gateway's settings: flags, then KVFERRY_GATEWAY_… in the environment, then a TOML file, then the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from kvferry.gateway.dashboard.audience import Audience
from kvferry.gateway.errors import ConfigInvalid
from kvferry.gateway.https import CertificateFiles
from kvferry.proto.address import parse_address
from kvferry.proto.ready_file import why_not_ready_file
from kvferry.settings import Settings, setting, shared
from kvferry.trust.doors import is_loopback


class GatewayConfig(Settings):
    """A frozen, validated value, made once."""

    model_config = SettingsConfigDict(env_prefix="KVFERRY_GATEWAY_")

    role: ClassVar = "gateway"
    invalid: ClassVar = ConfigInvalid
    here: ClassVar = {"ready_file": lambda value: why_not_ready_file(Path(value))}

    coordinator: str = setting(
        "127.0.0.1:7070",
        what="HOST:PORT of the coordinator, or of several with commas between them",
        why="where a coordinator on the same machine listens unless told otherwise",
    )
    listen: str = setting(
        "127.0.0.1:8080",
        what="HOST:PORT to serve HTTP at; port 0 takes a free one",
        why="only this machine can reach loopback: what others shall reach is opened on purpose",
    )
    patience_seconds: float = setting(
        60.0,
        ge=0,
        le=3600,
        unit="seconds",
        what="how long a request waits for a coordinator that is away",
        why="a coordinator that was restarted is back in seconds; a board that boots takes most of a minute",
    )
    keep_seconds: int = setting(
        3600,
        ge=1,
        le=2**31,
        unit="seconds",
        what="how long the session of a completion is kept that nobody uses",
        why="so long its stream can be picked up again; what later requests share with it is found without it",
    )
    keep_responses_days: float = setting(
        30.0,
        gt=0,
        le=36_500,
        unit="days",
        what="how long a response is kept that nobody uses",
        why="programs ask for responses by name days later; OpenAI keeps them for 30 days",
    )
    tls_dir: Path | None = setting(
        None,
        what="folder with ca.pem, cert.pem, key.pem and, where one is, revoked.pem",
        why="what the gateway shows the coordinator (kvferry certs); on the loopback there is nobody to keep out",
        example="/etc/kvferry/tls",
    )
    https: bool = setting(
        default=False,
        what="serve HTTPS with that certificate as well",
        why="programs have to know the private authority then; many know only the public ones",
    )
    https_cert: Path | None = setting(
        None,
        what="certificate to serve HTTPS with, if another (PEM)",
        why="such as one of a public authority, which every program knows",
        example="/etc/kvferry/https/cert.pem",
    )
    https_key: Path | None = setting(
        None,
        validate_default=True,
        what="its key (PEM)",
        why="belongs to https-cert",
        example="/etc/kvferry/https/key.pem",
    )
    insecure_plaintext: bool = setting(
        default=False,
        what="allow plaintext at addresses that others reach",
        why="whoever is on the network could read every conversation, and every API key",
    )
    allow_kill: bool = setting(
        default=False,
        what="let the dashboard kill nodes that were started beside it",
        why="for showing what a fleet survives; `kvferry up` sets it",
    )
    dashboard: Audience = setting(
        Audience.LOOPBACK,
        what="who may look at the dashboard: loopback, all or off",
        why="it shows the whole cluster by the gateway's own credentials: who else shall see it is decided on purpose",
    )
    drill_reports: Path | None = setting(
        None,
        what="folder of drill reports that the dashboard lists",
        why="drills are run elsewhere: only who runs them knows where their reports lie",
        example="/var/lib/kvferry/drills",
    )
    ready_file: Path | None = shared.ready_file("gateway")

    @field_validator("coordinator", "listen")
    @classmethod
    def _is_address(cls, value: str, info: ValidationInfo) -> str:
        addresses = [value] if info.field_name == "listen" else value.split(",")
        for address in addresses:
            parse_address(address, to_listen=info.field_name == "listen")
        return value

    @field_validator("https")
    @classmethod
    def _has_certificate(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("tls_dir") is None:
            raise ValueError("needs a certificate: give tls-dir, or https-cert and https-key in its place")
        return value

    @field_validator("https_key")
    @classmethod
    def _are_both(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("https_cert") is None):
            raise ValueError("and https-cert belong together: give both")
        return value

    @property
    def https_files(self) -> CertificateFiles | None:
        """What HTTPS is served with; None: HTTP is."""
        if self.https_cert is not None and self.https_key is not None:
            return CertificateFiles(self.https_cert, self.https_key)
        return CertificateFiles.in_folder(self.tls_dir) if self.https and self.tls_dir is not None else None

    @property
    def hands_tokens_on(self) -> bool:
        """Whether callers' API tokens may go to the coordinator: not in clear over a network."""
        hosts = (parse_address(address)[0] for address in self.coordinator.split(","))
        return self.tls_dir is not None or self.insecure_plaintext or all(map(is_loopback, hosts))
