"""The coordinator's settings: one frozen value, made once from the command line, the environment and a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final

import pydantic
from pydantic_settings import NoDecode, SettingsConfigDict

from kvferry.coordinator.errors import InvalidName, InvalidSettings
from kvferry.coordinator.etcd.address import RegistryAddress
from kvferry.coordinator.tenants import Sharing
from kvferry.proto.address import parse_address
from kvferry.proto.ready_file import why_not_ready_file
from kvferry.settings import Settings, setting, shared
from kvferry.store.place import StorePlace

IMAGE_TOKENS: Final = 1_024


class CoordinatorSettings(Settings):
    """In order of precedence: command line, KVFERRY_COORDINATOR_… in the environment, the TOML file of --config."""

    model_config = SettingsConfigDict(env_prefix="KVFERRY_COORDINATOR_")

    role: ClassVar = "coordinator"
    invalid: ClassVar = InvalidSettings
    here: ClassVar = {"ready_file": lambda value: why_not_ready_file(Path(value))}

    model: Annotated[tuple[str, ...], NoDecode] = setting(
        min_length=1,
        what="fetched names, GGUF files or folders, as the nodes'; the first is that of sessions that name none",
        why="only tokenizers and templates of them are used: no weights are loaded",
        example=("smollm2-135m",),
    )
    listen: str = setting(
        "127.0.0.1:7070",
        what="HOST:PORT where clients and nodes reach it",
        why="only this machine can reach loopback: what a fleet shall reach is opened on purpose",
    )
    registry: str | None = setting(
        None,
        what="etcd://HOST:PORT,HOST:PORT/PREFIX, which several coordinators share, in place of state",
        why="only for a fleet that must survive the coordinator's board; etcd wants three boards of its own",
        example="etcd://192.0.2.1:2379,192.0.2.2:2379,192.0.2.3:2379",
    )
    state: Path | None = setting(
        None,
        validate_default=True,
        what="folder of this coordinator's own, on a local disk, where the conversations are kept",
        why="one of state and registry is needed: conversations outlive the process",
        example="/var/lib/kvferry/coordinator",
    )
    advertise: str | None = setting(
        None,
        validate_default=True,
        what="HOST[:PORT] at which others that share the registry reach this one, if not at listen",
        why="needed when listening at all addresses",
        example="192.0.2.1",
    )
    # A coordinator that may only read there leaves the snapshots of deleted sessions to the nodes' eviction.
    store: str | None = setting(
        None,
        min_length=1,
        what="the shared snapshots: a folder or s3://BUCKET/PREFIX, as the nodes have it",
        why="without them routing does not know what can be restored",
        example="/mnt/kvferry",
    )
    store_key_file: Path | None = setting(
        None,
        what="file with the fleet's key, where the nodes have one",
        why="a coordinator without it cannot read what they signed",
        example="/etc/kvferry/store.key",
    )
    store_encrypted: bool = setting(
        default=False, what="the nodes encrypt snapshots with that key", why="as the nodes have it"
    )
    # reliability.md section 5
    lease: float = setting(
        3.0,
        ge=0.3,
        le=600,
        unit="seconds",
        what="silence after which a node has lost its turns; for half of it, it gets no new ones",
        why="shorter finds a dead node sooner, and takes a busy network for one",
    )
    stall: float = setting(
        60.0,
        ge=0.3,
        le=3600,
        unit="seconds",
        what="without a finished step while there was work: a node hangs, however well it still speaks",
        why="longer than the slowest honest step: 512 rows of a 2B model take some 25 s on a board",
    )
    grace: float | None = setting(
        None,
        ge=0,
        le=600,
        unit="seconds",
        what="after a restart nothing is placed for so long; not set: two heartbeats",
        why="nodes that hold rows can register first",
        example=2.0,
    )
    no_node_wait: float = setting(
        2.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        unit="seconds",
        what="how long a client waits for a node before it is told that there is none",
        why="longer than a failover, shorter than patience",
    )
    max_losses: int = setting(
        3,
        ge=1,
        le=100,
        unit="nodes",
        what="nodes that a turn may lose before it fails",
        why="a turn that took down three nodes is not given a fourth",
    )
    max_placements: int = setting(
        3,
        ge=1,
        le=100,
        unit="placements",
        what="placements of a turn that may fail in a row before it pauses",
        why="a fleet in trouble is not hammered",
    )
    max_open_turns: int = setting(
        1_024,
        ge=1,
        le=100_000,
        unit="turns",
        what="open turns of all sessions",
        why="each costs its token list; a fleet of ten boards runs some hundred at once",
    )
    unread_limit: float = setting(
        600.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        unit="seconds",
        what="of a node's work that nobody read, after which an answer is ended with the tokens it has; 0: never",
        why="an answer goes on while nobody is connected, for a client that comes back; not for ever",
    )
    image_tokens: int = setting(
        IMAGE_TOKENS,
        ge=4,
        le=1 << 20,
        unit="tokens",
        what="most tokens of one image; larger ones are scaled down",
        why="1,024 are a megapixel, which a board looks at for some half a minute",
    )
    share_prefixes: tuple[str, ...] = setting(
        (),
        what='tenants that share prefixes, each group\'s names with commas between them; "*": all do',
        why="whoever shares can find out, from how long a first token takes, whether another one sent the text before",
        example=("a,b",),
    )
    expire_days: float = setting(
        0.0,
        ge=0,
        le=36_500,
        allow_inf_nan=False,
        unit="days",
        what="sessions that nobody used for so long are deleted; 0: never",
        why="nothing that was said is deleted unless somebody asked for it",
    )
    generation: int = setting(
        0,
        ge=0,
        lt=2**63,
        what="be at least this generation",
        why="the operator's word against nodes that remember a newer coordinator, which is gone for good",
    )
    tls_dir: Path | None = shared.tls_dir()
    insecure_plaintext: bool = shared.insecure_plaintext()
    reflection: bool | None = shared.reflection()
    tokens: Path | None = setting(
        None,
        what="file of hashed API tokens: clients and gateways need one then, and see that tenant's sessions",
        why="who may ask, for whom and how much (kvferry tokens); not needed where everybody may",
        example="/etc/kvferry/tokens.json",
    )
    metrics: str | None = shared.metrics(9100)
    ready_file: Path | None = shared.ready_file("coordinator")

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

    @property
    def store_place(self) -> StorePlace | None:
        """Where snapshots lie, and how they are sealed."""
        return None if self.store is None else StorePlace(self.store, self.store_key_file, self.store_encrypted)

    def advertised(self, bound: str) -> str:
        """Where the others reach this coordinator, which listens at ``bound``."""
        if self.advertise is None:
            return bound
        return self.advertise if ":" in self.advertise else f"{self.advertise}:{bound.rpartition(':')[2]}"
