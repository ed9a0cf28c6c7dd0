"""What the coordinator knows, and what it can be asked for, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self, TypedDict

from kvferry.client.errors import InvalidImage
from kvferry.client.sdk.events import FinishReason, Placed
from kvferry.client.sdk.forms import AnswerForm, FormFields, ParsedAnswer, ToolCall

MAX_IMAGE_BYTES: Final = 20 << 20
"""Of one file, as chat.proto has it; more is not even read."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a user's message: a PNG, JPEG or WebP file, which stands before character ``at`` of the content.

    What the coordinator tells of a turn has no data, but the other fields: the SHA-256 in hex of what the model sees,
    its size in pixels, the tokens that it takes, and the index of the first of them among the session's tokens.
    """

    data: bytes = field(default=b"", repr=False)
    at: int = 0
    content_hash: str = ""
    width: int = 0
    height: int = 0
    n_tokens: int = 0
    start: int = 0

    @classmethod
    def read(cls, path: Path | str, at: int = 0) -> Self:
        """The picture in a file. Raises InvalidImage for one that cannot be read, or is too large."""
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        except OSError as error:
            raise InvalidImage(f"The image {path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
        if len(data) > MAX_IMAGE_BYTES:
            raise InvalidImage(f"The image {path} has more than {MAX_IMAGE_BYTES >> 20} MiB, which is the limit.")
        return cls(data, at)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; role is system, user, assistant or tool.

    An assistant's may have `reasoning` and `tool_calls`; a tool's may name the call whose result it is.
    """

    role: str
    content: str
    images: tuple[Image, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """What the model goes on writing, in place of messages: a text or tokens, without the model's chat template.

    All turns of a session have messages, or all have raw prompts.
    """

    prompt: str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn; what is None takes the default named in common.proto. Checked by the coordinator."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


GREEDY = Sampling()


class SamplingFields(TypedDict, total=False):
    """The fields of Sampling as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    seed: int
    logprobs: bool
    top_logprobs: int


class TurnFields(SamplingFields, FormFields, total=False):
    """Everything that may be given as single keyword arguments."""


def with_fields(sampling: Sampling, form: AnswerForm, fields: TurnFields) -> tuple[Sampling, AnswerForm]:
    """Both with the fields that were given in place of their own. Raises TypeError for a name that neither has."""
    of_form: dict[str, Any] = {name: value for name, value in fields.items() if name in FormFields.__annotations__}
    of_sampling: dict[str, Any] = {name: value for name, value in fields.items() if name not in of_form}
    return replace(sampling, **of_sampling), replace(form, **of_form)


class TurnState(StrEnum):
    """Where a turn is."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class NodeState(StrEnum):
    """What the coordinator thinks of a node."""

    UNKNOWN = "unknown"
    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation. `n_tokens` and `n_turns` count finished turns; `open_turn_id` is empty when none is running."""

    session_id: str
    model: str
    created_at_ms: int
    updated_at_ms: int
    n_tokens: int
    n_turns: int
    epoch: int
    open_turn_id: str
    forked_from: str
    last_node_id: str
    tenant: str
    # Unused for so long it is deleted; 0: as the coordinator has it.
    expires_after_s: int = 0


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """One request and its answer."""

    turn_id: str
    state: TurnState
    messages: tuple[Message, ...]
    answer: str
    finish_reason: FinishReason
    n_prompt_tokens: int
    n_answer_tokens: int
    placements: tuple[Placed, ...]
    parsed: ParsedAnswer | None = None


@dataclass(frozen=True, slots=True)
class SessionDetails:
    """A session with its turns and the tokens of the finished ones."""

    session: SessionInfo
    turns: tuple[TurnInfo, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that sessions may name; `fingerprints` are those of its nodes that are not dead."""

    name: str
    tokenizer_digest: str
    vocabulary_size: int
    context_length: int
    sees_images: bool
    n_nodes: int
    fingerprints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFigures:
    """What one node did with its store, since its start."""

    bytes_saved: int
    bytes_restored: int
    # Saves that did not happen, by why.
    saves_without_room: int
    saves_over_write_budget: int
    saves_not_worth_it: int
    # Bytes that may still be written in this hour; None where the node has no such budget.
    write_budget_left: int | None
    files_evicted: int
    # Found damaged, forged, or to be of something else.
    files_refused: int
    files_quarantined: int
    # Blocks of restored rows that were computed again in idle time, and those whose bits differed.
    blocks_audited: int
    blocks_wrong: int


@dataclass(frozen=True, slots=True)
class ExportedSession:
    """A session for another cluster. ``data`` is what import_session takes."""

    session_id: str
    model: str
    token_ids: tuple[int, ...] = field(repr=False)
    # (first token, number of tokens, SHA-256) of what stands at its image tokens.
    pictures: tuple[tuple[int, int, bytes], ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as the coordinator sees it."""

    node_id: str
    address: str
    state: NodeState
    model: str
    fingerprint: str
    n_running: int
    n_queued: int
    n_resident_sessions: int
    kv_bytes_used: int
    kv_bytes_budget: int
    seconds_since_heartbeat: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    kernel_path: str
    store_ok: bool
    n_threads: int
    tokens_generated: int
    # It saves to another store than the coordinator looks at.
    other_store: bool
    # It has another store key than the coordinator.
    other_key: bool
    pid: int
    sees_images: bool
    # None for a node without a store.
    store: StoreFigures | None = None
    restore_bytes_per_second: float = 0.0
    # Of its board's hottest thermal zone; None where there is none.
    temperature_celsius: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The coordinator and its fleet at a glance."""

    version: str
    model: str
    coordinator_id: str
    generation: int
    uptime_seconds: float
    n_sessions: int
    n_open_turns: int
    nodes: tuple[NodeInfo, ...]
    n_snapshots: int
    snapshot_bytes: int
    n_failovers: int
    n_turns_finished: int
    # Of the latest placements: how many, the median relative error of the predicted time to first token, and the
    # medians of what was predicted and of what came.
    n_predictions: int = 0
    prediction_error: float = 0.0
    predicted_seconds: float = 0.0
    first_token_seconds: float = 0.0
    sees_images: bool = False
    # The first one is `model`.
    models: tuple[str, ...] = ()
