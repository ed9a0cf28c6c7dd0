"""The gateway's settings: command line, then KVFERRY_GATEWAY_… in the environment, then the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvferry.gateway.errors import ConfigInvalid
from kvferry.proto.address import parse_address


class GatewayConfig(BaseSettings):
    """A frozen, validated value, made once."""

    model_config = SettingsConfigDict(env_prefix="KVFERRY_GATEWAY_", frozen=True, extra="forbid", env_ignore_empty=True)

    coordinator: str = Field(default="127.0.0.1:7070", description="HOST:PORT of the coordinator, or of several")
    listen: str = Field(default="127.0.0.1:8080", description="HOST:PORT to serve HTTP at; port 0 takes a free one")
    patience_seconds: float = Field(default=60.0, ge=0, le=3600, description="for a coordinator that is away")
    allow_kill: bool = Field(default=False, description="let the dashboard kill nodes of a local cluster")
    ready_file: Path | None = Field(default=None, description="file that says where the gateway serves, once it does")

    @field_validator("coordinator", "listen")
    @classmethod
    def _is_address(cls, value: str, info: ValidationInfo) -> str:
        addresses = [value] if info.field_name == "listen" else value.split(",")
        for address in addresses:
            parse_address(address, to_listen=info.field_name == "listen")
        return value

    @classmethod
    def load(cls, flags: dict[str, Any]) -> Self:
        """Raises ConfigInvalid that names every problem at once."""
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, p['loc']))}: {p['msg'].removeprefix('Value error, ')}" for p in error.errors()
            )
            raise ConfigInvalid(f"the gateway's settings are not right: {problems}") from error
