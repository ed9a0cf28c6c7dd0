"""What a node is told at start: flags, then the environment (KVFERRY_NODE_...), then a TOML file, then the defaults."""

from __future__ import annotations

import re
import socket
import tomllib
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ByteSize, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvferry.engine.cores import choose_cores
from kvferry.node.errors import ConfigInvalid
from kvferry.proto.address import parse_address
from kvferry.proto.ready_file import why_not_ready_file
from kvferry.store.place import StorePlace

NODE_ID: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
"""Goes into names of temporary files in the store: one path component, no case to lose."""


_WITH_PORT: Final = re.compile(r".*[^:\]]:\d+|\[.*\]:\d+")


def _default_node_id() -> str:
    cleaned = re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower()).strip("-._")
    return cleaned[:63].rstrip("-._") or "node"


class NodeConfig(BaseSettings):
    """A frozen, validated value, made once; see the description of each field."""

    model_config = SettingsConfigDict(
        env_prefix="KVFERRY_NODE_", frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=()
    )

    model: str = Field(min_length=1, description="fetched name, GGUF file or folder of the model")
    coordinator: str | None = Field(
        default=None, description="HOST:PORT of the coordinator, or of several; none: serve alone"
    )
    store: str | None = Field(
        default=None,
        min_length=1,
        description="folder of the snapshot store, or s3://BUCKET/PREFIX; none: keep rows in memory only",
    )
    store_key_file: Path | None = Field(
        default=None, description="file with the fleet's key: snapshots are signed with it"
    )
    store_encrypted: bool = Field(default=False, description="encrypt snapshots with that key as well")
    node_id: str = Field(default_factory=_default_node_id, description="name of this node, unique in the fleet")
    listen: str = Field(default="127.0.0.1:0", description="HOST:PORT to listen at; port 0 takes a free one")
    advertise: str | None = Field(
        default=None, validate_default=True, description="HOST[:PORT] the coordinator shall use, if not --listen"
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="threads of the engine; 0: one for each big processor we may use"
    )
    kv_memory: ByteSize = Field(default=ByteSize(1 << 30), ge=1 << 20, description="memory for K/V rows, such as 1GiB")
    kv: Literal["f32", "f16", "q8"] = Field(
        default="f32", description="what the K/V memory stores; nodes that share snapshots store the same"
    )
    vision_cache: ByteSize = Field(
        default=ByteSize(256 << 20), ge=1 << 20, description="memory for what images look like, of a model that sees"
    )
    context: int | None = Field(
        default=None, ge=32, description="most tokens of a sequence; default: what the model says"
    )
    max_running: int = Field(default=8, ge=1, le=64, description="turns in one batch")
    quant: Literal["q8", "q4"] = Field(
        default="q8", description="what weights become that the kernels cannot take as they are stored"
    )
    weights: Literal["auto", "memory", "mmap", "stream"] = Field(
        default="auto", description="where packed weights lie: own memory, shared pages, or pages dropped after use"
    )
    max_queued: int = Field(default=32, ge=0, le=1024, description="turns that may wait beside those")
    decode_slowdown: float = Field(
        default=3.0,
        gt=1,
        le=1000,
        description="how much longer than mostly a step of running turns may take for prompts, 99 times in 100",
    )
    step_seconds: float = Field(
        default=0.5, gt=0, le=60, description="longest step without running turns: a stop takes effect after it"
    )
    speculate: Literal["off", "ngram", "draft"] = Field(
        default="off", description="propose tokens from the text so far, or from the draft model"
    )
    draft_model: str | None = Field(
        default=None, validate_default=True, description="small model of the same family that proposes tokens"
    )
    max_sessions: int = Field(default=512, ge=1, le=100_000, description="sessions kept in memory")
    store_max_bytes: ByteSize = Field(default=ByteSize(16 << 30), ge=1 << 20, description="size the store may grow to")
    store_max_files: int = Field(default=4096, ge=1, description="snapshots the store may hold")
    store_version: Literal[1, 3] = Field(
        default=3,
        validate_default=True,
        description="of the snapshots written: 3, segments of new rows; 1, whole files for other programs",
    )
    store_write_per_hour: ByteSize | None = Field(
        default=None, ge=1 << 20, description="bytes that this node writes in an hour at most, to spare flash"
    )
    publish_every_tokens: int = Field(default=256, ge=32, description="rows after which a running turn is published")
    publish_min_tokens: int = Field(
        default=16, ge=1, description="growth that is worth a new file at the end of a turn"
    )
    restore_min_tokens: int = Field(default=32, ge=16, description="rows a restore must save over what memory has")
    restore_deadline_seconds: float = Field(default=30.0, gt=0, le=3600, description="after which rows are recomputed")
    store_stall_seconds: float = Field(
        default=4.0, gt=0, le=3600, description="without progress in the store, after which it counts as hung"
    )
    drain_timeout_seconds: float = Field(default=30.0, gt=0, le=3600, description="for saving everything on SIGTERM")
    metrics: str | None = Field(default=None, description="HOST:PORT at which Prometheus may ask; none: nowhere")
    ready_file: Path | None = Field(default=None, description="file that says where the node serves, once it does")
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$", description="what is logged")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file, in this order."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    # Field by field, not of the whole: then pydantic tells all problems at once.

    @field_validator("coordinator", "listen", "metrics")
    @classmethod
    def _is_address(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            addresses = value.split(",") if info.field_name == "coordinator" else [value]
            for address in addresses:
                parse_address(address, to_listen=info.field_name != "coordinator")
        return value

    @field_validator("node_id")
    @classmethod
    def _is_node_id(cls, value: str) -> str:
        if not NODE_ID.fullmatch(value):
            raise ValueError(f"{value!r} is not a name of 1 to 63 of a-z, 0-9, '.', '_', '-'")
        return value

    @field_validator("advertise")
    @classmethod
    def _is_reachable(cls, value: str | None, info: ValidationInfo) -> str | None:
        listen = info.data.get("listen")  # missing when it is wrong itself
        if value:
            parse_address(value if _WITH_PORT.fullmatch(value) else f"{value}:1")
        elif listen is not None and info.data.get("coordinator"):
            everywhere = {"0.0.0.0", "[::]"}  # noqa: S104 - looked at, not bound
            if parse_address(listen, to_listen=True)[0] in everywhere:
                raise ValueError(f"listening at {listen}, the node cannot know its address in the fleet: set advertise")
        return value

    @field_validator("store_version")
    @classmethod
    def _can_be_saved(cls, value: int, info: ValidationInfo) -> int:
        kv = info.data.get("kv", "f32")
        if info.data.get("store") is not None and kv != "f32" and value == 1:
            raise ValueError(f"version 1 snapshots hold f32 rows only, not {kv}: set store-version to 3, or kv to f32")
        if info.data.get("store_key_file") is not None and value == 1:
            raise ValueError("version 1 snapshots cannot be signed: set store-version to 3, or give no store-key-file")
        return value

    @field_validator("store_encrypted")
    @classmethod
    def _has_key(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("store_key_file") is None:
            raise ValueError("needs a key to encrypt with: name a store-key-file")
        return value

    @property
    def store_place(self) -> StorePlace | None:
        """Where snapshots lie, and how they are sealed."""
        return None if self.store is None else StorePlace(self.store, self.store_key_file, self.store_encrypted)

    @field_validator("draft_model")
    @classmethod
    def _is_of_use(cls, value: str | None, info: ValidationInfo) -> str | None:
        is_wanted = info.data.get("speculate") == "draft"
        if is_wanted and value is None:
            raise ValueError("is missing: speculate draft needs one")
        if value is not None and not is_wanted:
            raise ValueError("is only of use with speculate draft")
        return value

    def check_here(self) -> None:
        """What only the machine that it is for can tell; raises ConfigInvalid."""
        if self.ready_file is not None and (problem := why_not_ready_file(self.ready_file)) is not None:
            raise ConfigInvalid(f"ready-file {problem}")

    @property
    def coordinators(self) -> tuple[str, ...]:
        """All of them, each once."""
        return () if self.coordinator is None else tuple(dict.fromkeys(self.coordinator.split(",")))

    @property
    def n_threads(self) -> int:
        """Threads of the engine."""
        return self.threads or choose_cores().n_threads

    def advertised(self, port: int) -> str:
        """The address at which the coordinator reaches us, given the port we got."""
        host = self.advertise or parse_address(self.listen, to_listen=True)[0]
        return host if self.advertise and _WITH_PORT.fullmatch(host) else f"{host}:{port}"


_SIZES: Final = frozenset({"kv-memory", "vision-cache", "store-max-bytes", "store-write-per-hour"})


def load_config(flags: dict[str, Any], toml_file: Path | None = None) -> NodeConfig:
    """Merge the sources; raises ConfigInvalid with every problem in one message."""
    if toml_file is not None:
        _check_toml(toml_file)

    class _Sourced(NodeConfig):
        model_config = SettingsConfigDict(toml_file=toml_file)

    try:
        return _Sourced(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise ConfigInvalid("; ".join(_sentences(error))) from error


def _check_toml(path: Path) -> None:
    try:
        with path.open("rb") as file:
            tomllib.load(file)
    except OSError as error:
        raise ConfigInvalid(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid(f"the configuration file {path} is not TOML: {error}") from error


def _sentences(error: ValidationError) -> list[str]:
    sentences = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            text = "is missing"
        elif problem["type"] == "extra_forbidden":
            text = "is no setting of a node"
        elif problem["type"].startswith("byte_size"):
            text = f"{problem['input']!r} is no size: give a positive number and a unit, such as 512MiB"
        elif name in _SIZES and problem["type"] == "greater_than_equal":
            text = f"{problem['input']!r} is too small: at least 1MiB"
        elif not problem["msg"].startswith("Value error") and name:
            text = f"{problem['input']!r}: {text[0].lower()}{text[1:]}"
        sentences.append(f"{name} {text}".strip())
    return sentences
