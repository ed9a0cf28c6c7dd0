"""What a node is told at start: flags, then the environment (KVFERRY_NODE_...), then a TOML file, then the defaults."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import ByteSize, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from kvferry.engine.cores import choose_cores
from kvferry.node.errors import ConfigInvalid
from kvferry.proto.address import parse_address
from kvferry.proto.ready_file import why_not_ready_file
from kvferry.settings import Settings, setting, shared
from kvferry.store.place import StorePlace

NODE_ID: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
"""Goes into names of temporary files in the store: one path component, no case to lose."""


EVERYWHERE: Final = frozenset({"0.0.0.0", "[::]"})  # noqa: S104 - looked at, not bound

_WITH_PORT: Final = re.compile(r".*[^:\]]:\d+|\[.*\]:\d+")


def _default_node_id() -> str:
    cleaned = re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower()).strip("-._")
    return cleaned[:63].rstrip("-._") or "node"


class NodeConfig(Settings):
    """A frozen, validated value, made once; see the description of each setting."""

    model_config = SettingsConfigDict(env_prefix="KVFERRY_NODE_")

    role: ClassVar = "node"
    invalid: ClassVar = ConfigInvalid
    here: ClassVar = {"ready_file": lambda value: why_not_ready_file(Path(value))}

    model: str = setting(
        min_length=1,
        what="fetched name, GGUF file or folder of the model",
        why="there is no model that suits everybody; all nodes of a fleet serve those of its coordinator",
        example="smollm2-135m",
    )
    coordinator: str | None = setting(
        None,
        what="HOST:PORT of the coordinator, or of several with commas between them; not set: serve alone",
        why="a node without one is for tests; it serves before it has found the coordinator, and keeps looking",
        example="192.0.2.1:7070",
    )
    store: str | None = setting(
        None,
        min_length=1,
        what="folder of the snapshot store, or s3://BUCKET/PREFIX; not set: keep rows in memory only",
        why="without a shared store a conversation that moves to another node is computed again from its start",
        example="/mnt/kvferry",
    )
    store_key_file: Path | None = setting(
        None,
        what="file with the fleet's key: snapshots are signed with it",
        why="needed where others can write to the store; 32 random bytes, readable by their owner only",
        example="/etc/kvferry/store.key",
    )
    store_encrypted: bool = setting(
        default=False,
        what="encrypt snapshots with that key as well",
        why="rows tell what was said; encryption costs some of the store's rate",
    )
    node_id: str = setting(
        default_factory=_default_node_id,
        what="name of this node, unique in the fleet",
        why="the host's name is unique where each board runs one node",
    )
    listen: str = setting(
        "127.0.0.1:0",
        what="HOST:PORT to listen at; port 0 takes a free one",
        why="only this machine can reach loopback: what a fleet shall reach is opened on purpose",
    )
    advertise: str | None = setting(
        None,
        validate_default=True,
        what="HOST[:PORT] the coordinator shall use, if not that of listen",
        why="needed when listening at all addresses, or behind a translation of addresses",
        example="192.0.2.11",
    )
    threads: int = setting(
        0,
        ge=0,
        le=1024,
        unit="threads",
        what="threads of the engine; 0: one for each big processor that this process may use",
        why="a thread on a small core holds up all others at the end of each phase",
    )
    kv_memory: ByteSize = setting(
        ByteSize(1 << 30),
        ge=1 << 20,
        unit="bytes",
        what="memory for K/V rows",
        why="some 23,000 tokens of SmolLM2-135M, or 4,800 of Qwen3-1.7B; beside the weights it fits a board of 4 GB",
    )
    kv: Literal["f32", "f16", "q8"] = setting(
        "f32",
        what="what that memory stores; nodes that share snapshots store the same",
        why="f32 is exact; f16 takes half the memory, q8 a bit more than a quarter",
    )
    vision_cache: ByteSize = setting(
        ByteSize(256 << 20),
        ge=1 << 20,
        unit="bytes",
        what="memory for what images look like, of a model that sees",
        why="eight megapixels of Qwen3-VL-2B: a conversation's pictures are not looked at again each turn",
    )
    context: int | None = setting(
        None,
        ge=32,
        unit="tokens",
        what="most tokens of a conversation; not set: what the model says",
        why="to be lowered where one conversation must not take all of kv_memory",
        example=8192,
    )
    max_running: int = setting(
        8,
        ge=1,
        le=64,
        unit="turns",
        what="turns in one batch",
        why="a batch of eight reads the weights once for all; more make each answer slower than people read",
    )
    quant: Literal["q8", "q4"] = setting(
        "q8",
        what="what weights become that the kernels cannot take as they are stored; all nodes of a fleet the same",
        why="q8 is next to lossless; q4 halves memory and doubles the speed at some loss",
    )
    weights: Literal["auto", "memory", "mmap", "stream"] = setting(
        "auto",
        what="where packed weights lie: own memory, shared pages, or pages dropped after use",
        why="auto takes memory where they fit, else what docs/models.md tells",
    )
    max_queued: int = setting(
        32,
        ge=0,
        le=1024,
        unit="turns",
        what="turns that may wait beside those",
        why="four batches: what waits longer is better told so at once, and placed elsewhere",
    )
    decode_slowdown: float = setting(
        3.0,
        gt=1,
        le=1000,
        unit="times",
        what="how much longer than mostly a step of running turns may take for prompts, 99 times in 100",
        why="answers flow on while prompts are read; higher makes first tokens sooner and answers jerkier",
    )
    step_seconds: float = setting(
        0.5,
        gt=0,
        le=60,
        unit="seconds",
        what="longest step without running turns",
        why="a stop, or a turn that comes meanwhile, waits for the end of a step",
    )
    speculate: Literal["off", "ngram", "draft"] = setting(
        "off",
        what="propose tokens from the text so far, or from the draft model",
        why="tokens are the same; it pays for answers that repeat their context, see docs/operations.md",
    )
    draft_model: str | None = setting(
        None,
        validate_default=True,
        what="small model of the same family that proposes tokens",
        why='needed with speculate = "draft" only',
        example="smollm2-135m",
    )
    max_sessions: int = setting(
        512,
        ge=1,
        le=100_000,
        unit="sessions",
        what="sessions kept in memory",
        why="rows end with kv_memory long before; this bounds what is remembered beside them",
    )
    store_max_bytes: ByteSize = setting(
        ByteSize(16 << 30),
        ge=1 << 20,
        unit="bytes",
        what="size the store may grow to",
        why="half of a small card; what was not used for longest is evicted beyond it",
    )
    store_max_files: int = setting(
        4096,
        ge=1,
        unit="files",
        what="snapshots the store may hold",
        why="each is looked at when a node starts, which takes a second over NFS for so many",
    )
    store_version: Literal[1, 3] = setting(
        3,
        validate_default=True,
        what="of the snapshots written: 3, segments of new rows; 1, whole files for other programs",
        why="segments write each row once, and can be checked, signed and encrypted",
    )
    store_write_per_hour: ByteSize | None = setting(
        None,
        ge=1 << 20,
        unit="bytes an hour",
        what="bytes that this node writes in an hour at most; not set: no limit",
        why="spares flash that wears out",
        example="2GiB",
    )
    publish_every_tokens: int = setting(
        256,
        ge=32,
        unit="tokens",
        what="rows after which a running turn is saved",
        why="what a crash costs at most: so many tokens are computed again",
    )
    publish_min_tokens: int = setting(
        16,
        ge=1,
        unit="tokens",
        what="growth that is worth a new file at the end of a turn",
        why="half a block: less is computed as soon as it is read",
    )
    restore_min_tokens: int = setting(
        32,
        ge=16,
        unit="tokens",
        what="rows a restore must gain over what memory has",
        why="one block: for less, opening the file takes longer than computing",
    )
    restore_deadline_seconds: float = setting(
        30.0,
        gt=0,
        le=3600,
        unit="seconds",
        what="after which rows are computed instead of read",
        why="a long conversation takes seconds over a slow network; for more than that, the store is in trouble",
    )
    store_stall_seconds: float = setting(
        4.0,
        gt=0,
        le=3600,
        unit="seconds",
        what="without progress in the store, after which it counts as hung",
        why="longer than a server's pause for writing out, shorter than the patience of whoever waits",
    )
    drain_timeout_seconds: float = setting(
        30.0,
        gt=0,
        le=3600,
        unit="seconds",
        what="for saving everything on SIGTERM",
        why="less than the 90 s after which systemd kills",
    )
    tls_dir: Path | None = shared.tls_dir()
    insecure_plaintext: bool = shared.insecure_plaintext()
    reflection: bool | None = shared.reflection()
    metrics: str | None = shared.metrics(9101)
    ready_file: Path | None = shared.ready_file("node")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", what="what is logged", why="info is a few lines a turn; prompts are never logged"
    )

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
        elif info.data.get("coordinator") and listen and parse_address(listen, to_listen=True)[0] in EVERYWHERE:
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

    @property
    def coordinators(self) -> tuple[str, ...]:
        """All of them, each once."""
        return () if self.coordinator is None else tuple(dict.fromkeys(self.coordinator.split(",")))

    @property
    def n_threads(self) -> int:
        """Threads of the engine."""
        return self.threads or choose_cores().n_threads

    @property
    def reached_at(self) -> str | None:
        """The address that its certificate has to name; None: nobody calls it, or nobody knows where."""
        address = self.advertised(1)
        return None if parse_address(address)[0] in EVERYWHERE else address

    def advertised(self, port: int) -> str:
        """The address at which the coordinator reaches us, given the port we got."""
        host = self.advertise or parse_address(self.listen, to_listen=True)[0]
        return host if self.advertise and _WITH_PORT.fullmatch(host) else f"{host}:{port}"
