"""The coordinator's settings: one frozen value, made once from the command line, the environment and a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Self

import pydantic
import pydantic_settings
from pydantic import Field

from kvferry.coordinator.errors import InvalidName, InvalidSettings
from kvferry.coordinator.etcd.address import RegistryAddress
from kvferry.coordinator.tenants import Sharing
from kvferry.proto.address import parse_address
from kvferry.proto.ready_file import why_not_ready_file
from kvferry.store.place import StorePlace

Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


IMAGE_TOKENS: Final = 1_024


class CoordinatorSettings(pydantic_settings.BaseSettings):
    """In order of precedence: command line, KVFERRY_COORDINATOR_… in the environment, the TOML file of --config."""

    model_config = pydantic_settings.SettingsConfigDict(
        env_prefix="KVFERRY_COORDINATOR_", extra="forbid", frozen=True, protected_namespaces=()
    )

    # Fetched names, GGUF files or folders; only their tokenizers and templates are used. The first one is that of
    # sessions that name none.
    model: Annotated[tuple[str, ...], pydantic_settings.NoDecode, Field(min_length=1)]
    listen: str = "127.0.0.1:7070"
    # Where the conversations are kept: etcd://HOST:PORT,HOST:PORT/PREFIX, which several coordinators share, or a folder
    # of this coordinator's own.
    registry: str | None = None
    state: Annotated[Path | None, Field(validate_default=True)] = None
    # HOST[:PORT] at which the others that share the registry reach this one, if not at ``listen``.
    advertise: Annotated[str | None, Field(validate_default=True)] = None
    # The shared snapshots, a folder or s3://BUCKET/PREFIX; without them routing does not know what can be restored. A
    # coordinator that may only read there leaves the snapshots of deleted sessions to the nodes' eviction. The key is
    # needed where the nodes have one.
    store: Annotated[str, Field(min_length=1)] | None = None
    store_key_file: Path | None = None
    store_encrypted: bool = False
    # A node silent for this long has lost its turns; for half of it, it gets no new ones (reliability.md section 5).
    lease: Annotated[float, Field(ge=0.3, le=600)] = 3.0
    # A node whose engine has not finished a step for this long while it had work hangs, however well it still speaks.
    # Longer than the slowest honest step: 512 rows of a 2B model take some 25 s on a board.
    stall: Annotated[float, Field(ge=0.3, le=3600)] = 60.0
    # After a restart nothing is placed for this long, so that nodes that hold rows can register first. Default: two
    # heartbeats.
    grace: Annotated[float, Field(ge=0, le=600)] | None = None
    # How long a client waits for a node before it is told that there is none. Longer than a failover, shorter than
    # patience.
    no_node_wait: Seconds = 2.0
    max_losses: Annotated[int, Field(ge=1, le=100)] = 3
    max_placements: Annotated[int, Field(ge=1, le=100)] = 3
    # Open turns of all sessions. Each costs its token list; a fleet of ten boards runs some hundred at once.
    max_open_turns: Annotated[int, Field(ge=1, le=100_000)] = 1_024
    # An answer goes on while nobody is connected, for a client that comes back; after so many seconds of a node's work
    # that nobody read, it is ended with the tokens it has. 0: never.
    unread_limit: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 600.0
    # One image takes at most so many tokens; larger ones are scaled down. 1,024 are a megapixel, which a board looks at
    # for some half a minute.
    image_tokens: Annotated[int, Field(ge=4, le=1 << 20)] = IMAGE_TOKENS
    # Tenants that share prefixes, each group's names with commas between them; "*": all do. Whoever shares can find
    # out, from how long a first token takes, whether another one sent the same text before.
    share_prefixes: tuple[str, ...] = ()
    # Sessions that nobody used for so many days are deleted; 0: never.
    expire_days: Annotated[float, Field(ge=0, le=36_500, allow_inf_nan=False)] = 0.0
    # At least this generation: the operator's word against nodes that remember a newer coordinator, which is gone for
    # good.
    generation: Annotated[int, Field(ge=0, lt=2**63)] = 0
    # HOST:PORT at which Prometheus may ask.
    metrics: str | None = None
    ready_file: Path | None = None

    @pydantic.field_validator("model", mode="before")
    @classmethod
    def _is_one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @pydantic.field_validator("listen", "metrics")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value, to_listen=True)
        return value

    @pydantic.field_validator("registry")
    @classmethod
    def _is_registry(cls, value: str | None) -> str | None:
        if value is not None:
            RegistryAddress.parse(value)
        return value

    @pydantic.field_validator("state")
    @classmethod
    def _is_one_of_two(cls, value: Path | None, info: pydantic.ValidationInfo) -> Path | None:
        in_etcd = info.data.get("registry") is not None
        if value is None and not in_etcd:
            raise ValueError("is missing: give the coordinator a folder of its own, or a registry in etcd")
        if value is not None and in_etcd:
            raise ValueError("is of no use beside a registry in etcd: give one of them")
        return value

    @pydantic.field_validator("advertise")
    @classmethod
    def _is_reachable(cls, value: str | None, info: pydantic.ValidationInfo) -> str | None:
        if value is not None:
            parse_address(value if ":" in value else f"{value}:1")
        elif info.data.get("registry") is not None and "listen" in info.data:
            everywhere = {"0.0.0.0", "[::]"}  # noqa: S104 - looked at, not bound
            if parse_address(info.data["listen"], to_listen=True)[0] in everywhere:
                raise ValueError("is missing: listening everywhere, the coordinator cannot know its address")
        return value

    @pydantic.field_validator("share_prefixes")
    @classmethod
    def _are_groups(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            Sharing.of(value)
        except InvalidName as e:
            raise ValueError(str(e)) from e
        return value

    @property
    def sharing(self) -> Sharing:
        """Which tenants share prefixes."""
        return Sharing.of(self.share_prefixes)

    @classmethod
    def load(cls, toml_path: Path | None, command_line: dict[str, Any]) -> Self:
        """Raises InvalidSettings that names every problem at once."""
        given = {key: value for key, value in command_line.items() if value is not None}
        if toml_path is not None and not toml_path.is_file():
            raise InvalidSettings(f"there is no settings file {toml_path}")
        namespace = {
            "__module__": cls.__module__,
            "model_config": pydantic_settings.SettingsConfigDict(toml_file=toml_path),
        }
        configured: type[Self] = type(cls.__name__, (cls,), namespace)
        try:
            return configured(**given)
        except pydantic.ValidationError as e:
            problems = "; ".join(
                f"{'.'.join(map(str, p['loc']))}: {p['msg'].removeprefix('Value error, ')}" for p in e.errors()
            )
            raise InvalidSettings(f"the coordinator's settings are not right: {problems}") from e
        except (ValueError, OSError) as e:  # not TOML, or not readable
            raise InvalidSettings(f"the settings file {toml_path} cannot be read: {e}") from e

    @property
    def store_place(self) -> StorePlace | None:
        """Where snapshots lie, and how they are sealed."""
        return None if self.store is None else StorePlace(self.store, self.store_key_file, self.store_encrypted)

    def advertised(self, bound: str) -> str:
        """Where the others reach this coordinator, which listens at ``bound``."""
        if self.advertise is None:
            return bound
        return self.advertise if ":" in self.advertise else f"{self.advertise}:{bound.rpartition(':')[2]}"

    def check_here(self) -> None:
        """What only the machine that it is for can tell; raises InvalidSettings."""
        if self.ready_file is not None and (problem := why_not_ready_file(self.ready_file)) is not None:
            raise InvalidSettings(f"the coordinator's settings are not right: ready_file: {problem}")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: pydantic_settings.PydanticBaseSettingsSource,
        env_settings: pydantic_settings.PydanticBaseSettingsSource,
        dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,  # noqa: ARG003 - the hook's signature
        file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,  # noqa: ARG003 - the hook's signature
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, pydantic_settings.TomlConfigSettingsSource(settings_cls)
